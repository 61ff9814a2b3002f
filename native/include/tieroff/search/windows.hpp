// Windows of idle gaps on the ring of ops: when each tensor's bytes are away from the device.
//
// Positions lie on the line [0, 2n) for a ring of n ops; a gap that wraps round the step's end has a stop above n.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace tieroff {

// One entry per gap. The bytes are idle over [start, stop) and away over [away_start, away_stop), which is empty for a
// gap in which they stay.
struct Gaps {
  std::span<const std::int64_t> start;
  std::span<const std::int64_t> stop;
  std::span<const std::int64_t> size_bytes;
  std::span<std::int64_t> away_start;
  std::span<std::int64_t> away_stop;
};

// Which of the gaps at an op over the budget give way first when windows are repaired.
enum class Repair {
  kLeastTime,     // those whose window grows by the least time
  kDeepest,       // those furthest from both uses, kept ones too
  kFurthestUse,   // those whose use (the next before a load, the last before a release) is furthest
  kRelativeTime,  // those whose window grows by the least share of the time to that use
};

// How windows shrink again where the budget leaves room, gap by gap in the orders given.
struct Filling {
  std::span<const std::int64_t> load_order;     // gaps, in the order in which loads may be issued earlier
  std::span<const std::int64_t> release_order;  // gaps, in the order in which releases may be later
  std::span<const std::int64_t> load_from;      // per gap: an earlier load would help nothing
  std::span<const std::int64_t> release_until;  // per gap: a later release would help nothing
  // One letter per pass: L loads and R releases within those limits, l and r without.
  std::string_view passes;
};

// Widens windows until every op fits, then shrinks them while every op still fits.
//
// usage: on entry the bytes at each op with all gaps away from start to stop; on return those with the windows found.
// starts_ns: start of each op and the end of the step, n + 1 values.
// Returns false when an op is over the budget with everything away that can be. Throws std::invalid_argument for arrays
// whose lengths or positions make no sense.
bool fit_windows(std::span<std::int64_t> usage, std::span<const std::int64_t> starts_ns, std::int64_t budget_bytes,
                 const Gaps& gaps, Repair repair, const Filling& filling);

// Returns the ends of transfers that a link serves one after the other, each from its limit on; going back in time, the
// starts of those that have to end by their limits.
// Throws std::invalid_argument for arrays of different lengths.
std::vector<double> serve_in_turn(std::span<const double> limits_ns, std::span<const double> takes_ns, bool is_backwards);

}  // namespace tieroff
