// The update per instruction set.
#pragma once

// [Note: one file per instruction set]
// The build is for any x86-64; what is wider than that is compiled for a function's target and chosen at run time. The target
// holds for a region of a file, in which the rules are included; everything that they include comes before, so that no inline
// function of a library is compiled for a processor that may not be there.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "tieroff/update/job.hpp"
#include "tieroff/update/lanes.hpp"

#if defined(__x86_64__)
#define TIEROFF_UPDATES_ON_X86
#endif

namespace tieroff {

void update_portable(const UpdatePart& part, std::int64_t first, std::int64_t count);
#ifdef TIEROFF_UPDATES_ON_X86
void update_avx2(const UpdatePart& part, std::int64_t first, std::int64_t count);    // with FMA
void update_avx512(const UpdatePart& part, std::int64_t first, std::int64_t count);  // F, BW, DQ and VL
#endif

}  // namespace tieroff
