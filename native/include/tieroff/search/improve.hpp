// Local search on windows: small changes where the step waits, kept when the dispatcher says that they help.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tieroff/search/dispatch.hpp"

namespace tieroff {

// What does not change in a search; lower tiers are 0 (host) and 1 (NVMe).
struct SearchGround {
  std::span<const std::int64_t> duration_ns;  // per op
  DispatchLinks links;
  std::int64_t device_bytes;
  std::array<std::int64_t, 2> lower_bytes;  // 0 for a tier that cannot be used
  std::int64_t granule_bytes;               // of room below
};

// One entry per gap of each piece; the gaps of a piece are neighbours, in order. Positions as in windows.hpp.
struct SearchGaps {
  std::span<const std::int64_t> piece;
  std::span<const std::int64_t> start;
  std::span<const std::int64_t> stop;
  std::span<const std::int64_t> size_bytes;
  std::span<const std::int64_t> is_last;    // nothing comes back from it
  std::span<const std::int64_t> copy_from;  // tick after the last write before it; very low where nothing writes
  std::span<const std::int64_t> is_persistent;
  std::span<std::int64_t> away_start;
  std::span<std::int64_t> away_stop;
  std::span<std::int64_t> tier;
};

struct Improved {
  double before_ns;  // step time as the dispatcher plays it
  double after_ns;
  std::int64_t nodes;  // changes tried
};

// Changes windows and tiers while that makes the step shorter, until it has done so much work; the same for the same
// seed. A unit of work takes about a ns.
//
// usage: bytes at each op of the device with the windows given; on return with those found.
// When the windows given do not fit below, nothing changes and both times are 0.
// Throws std::invalid_argument for arrays whose lengths or positions make no sense.
Improved improve(std::span<std::int64_t> usage, const SearchGround& ground, const SearchGaps& gaps, std::uint64_t seed,
                 std::int64_t work);

}  // namespace tieroff
