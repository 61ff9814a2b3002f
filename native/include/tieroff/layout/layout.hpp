// Offline storage allocation: offsets for buffers whose lifetimes are known, on a line or on a ring of time.
#pragma once

#include <cstdint>
#include <vector>

namespace tieroff::layout {

// One row per buffer. With `ring` 0 time is a line; otherwise 0 <= lower < ring and upper <= lower + ring, where
// upper > ring wraps round. `above` are bytes that must stay free over a buffer's end and count in its footprint:
// the most that is needed at any time of its life, so a buffer that lives longer has no less.
struct Problem {
  std::vector<std::int64_t> lower;
  std::vector<std::int64_t> upper;
  std::vector<std::int64_t> size;
  std::vector<std::int64_t> above;
  std::int64_t ring = 0;
  std::int64_t alignment = 1;

  std::size_t count() const { return lower.size(); }
};

// Equal options give equal results, unless the time limit strikes. The switches change how long the search takes and,
// when the budget runs out, how far it gets; what a search without limits can place is the same for all of them.
struct Options {
  std::int64_t capacity = -1;            // a footprint that suffices; -1: as small as possible
  std::int64_t node_budget = 1'000'000;  // of the exact search
  std::int64_t fit_budget = 20'000'000;  // steps of placing in order; the first orders are always tried
  std::uint64_t seed = 1;
  std::int64_t time_limit_ns = 0;  // 0: none
  bool splits = true;              // parts that no longer meet in time are solved apart
  bool stacks = true;              // what lives all the time lies at the bottom
  bool dominates = true;           // no buffer is placed above room that another one could have taken
  bool bounds = true;              // what is left at a time must fit above what is there
  bool remembers = true;           // states that failed are not entered again
  bool orders_twins = true;        // of equal buffers the first one is placed first
};

struct Result {
  std::vector<std::int64_t> offsets;  // in bytes
  std::int64_t footprint = 0;         // the highest end, with `above`
  std::int64_t bound = 0;             // no layout has a smaller footprint
  std::int64_t node_count = 0;
  std::int64_t step_count = 0;
};

Result search(const Problem& problem, const Options& options);

}  // namespace tieroff::layout
