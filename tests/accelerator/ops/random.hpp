// Random numbers: a generator per device, of which each kernel takes its own when it is submitted.
#pragma once
#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
void seed_all(uint64_t seed);
// A generator of the host for one kernel. Kernels draw in the order of submission, whichever thread runs them when.
at::Generator draw_from(const at::Generator& generator);

}  // namespace sim
