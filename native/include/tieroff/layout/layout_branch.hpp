// Exact search for a layout within a capacity.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tieroff/layout/layout_columns.hpp"

namespace tieroff::layout {

enum class Outcome { kFound, kImpossible, kUnknown };

struct Branching {
  Outcome outcome = Outcome::kUnknown;
  std::vector<std::int64_t> offsets;  // in units; when found
};

// What ends a search. `nodes` counts on; those of large problems count more than once.
struct Limits {
  const Options& options;
  std::int64_t node_budget;
  const std::function<bool()>& is_late;
  std::int64_t& nodes;
  std::int64_t visits = 0;

  bool is_over();
};

// Looks for a layout with a footprint within `capacity` bytes.
Branching branch(const Grid& grid, std::int64_t capacity, Limits& limits);

// The same for a grid as it is; `branch` takes it apart first.
Branching branch_whole(const Grid& grid, std::int64_t capacity, Limits& limits);

// Rounds towards minus infinity; `by` > 0.
constexpr std::int64_t floor_div(std::int64_t value, std::int64_t by) {
  return value >= 0 ? value / by : -((by - 1 - value) / by);
}

}  // namespace tieroff::layout
