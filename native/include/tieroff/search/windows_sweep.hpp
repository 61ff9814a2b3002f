// Windows of whole tensors from one walk over the ops beside a clock of the links: [Note: sweep] in
// tieroff/planner/auto/windows.py says how.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace tieroff {

inline constexpr std::size_t kLowerTierCount = 2;

// One entry per slot of a tensor that leaves. Ticks lie on the line [0, n] for a step of n ops.
struct SweptSlots {
  std::span<const std::int64_t> tensor;
  std::span<const std::int64_t> tier;           // by number, below kLowerTierCount
  std::span<const std::int64_t> start;          // the tick at which the tensor is idle from
  std::span<const std::int64_t> release_limit;  // the last tick to which it may stay
  std::span<const std::int64_t> deadline;       // the tick by which it is there again
  std::span<const std::int64_t> copy_tick;      // when its copy out is queued; negative: the copy below is valid
  std::span<const std::int64_t> size_bytes;
  std::span<const std::int64_t> out_ns;
  std::span<const std::int64_t> back_ns;
  std::span<const std::int64_t> is_boundary;  // its load may be issued before its release: it is of the step before
  std::span<const std::int64_t> is_last;      // nothing comes back
  std::span<const std::int64_t> late_limit;   // the last tick of the next step to which it may stay; 0: it leaves in its own
};

// Finds when each slot's tensor is released and when its load is issued.
//
// usage: on entry the bytes at each op with all slots away; on return those with the windows found.
// starts_ns: start of each op and the end of the step, n + 1 values.
// lead_ns: how much earlier than the latest start a load may be issued.
// release_at, load_at: one entry per slot; a load that does not take place is left as it is. A release at tick i of the
// next step is n + i.
// Throws std::invalid_argument for arrays whose lengths or ticks make no sense.
void sweep_windows(std::span<std::int64_t> usage, std::span<const std::int64_t> starts_ns, std::int64_t budget_bytes,
                   std::int64_t lead_ns, const SweptSlots& slots, std::span<std::int64_t> release_at,
                   std::span<std::int64_t> load_at);

}  // namespace tieroff
