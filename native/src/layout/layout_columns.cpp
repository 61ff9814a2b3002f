#include "tieroff/layout/layout_columns.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

namespace tieroff::layout {

namespace {

struct Event {
  std::int64_t time;
  bool is_start;
  std::uint32_t index;

  bool operator<(const Event& other) const {
    return std::tie(time, is_start, index) < std::tie(other.time, other.is_start, other.index);
  }
};

std::vector<Event> events_of(const Problem& problem) {
  std::vector<Event> events;
  for (std::uint32_t i = 0; i < problem.count(); ++i) {
    if (problem.ring != 0 && problem.upper[i] - problem.lower[i] == problem.ring) continue;
    const bool wraps = problem.ring != 0 && problem.upper[i] > problem.ring;
    events.push_back({problem.lower[i], true, i});
    events.push_back({problem.upper[i] - (wraps ? problem.ring : 0), false, i});
  }
  std::sort(events.begin(), events.end());
  return events;
}

}  // namespace

std::int64_t Grid::footprint(const std::vector<std::int64_t>& offset_units) const {
  std::int64_t highest = 0;
  for (std::size_t i = 0; i < blocks.size(); ++i) highest = std::max(highest, end(i, offset_units[i]));
  return highest;
}

// A set of live buffers that is part of a neighbouring one says nothing more, so a column is closed only where a buffer
// ends after another one began. With bytes to keep free above, the smaller set may still bind: then every stretch of
// time between two events is a column.
Grid make_grid(const Problem& problem) {
  const bool is_fine = std::any_of(problem.above.begin(), problem.above.end(), [](auto above) { return above != 0; });
  const auto crosses = [&](std::size_t i) { return problem.ring != 0 && problem.upper[i] > problem.ring; };
  const auto is_whole = [&](std::size_t i) { return problem.ring != 0 && problem.upper[i] - problem.lower[i] == problem.ring; };
  Grid grid{.alignment = problem.alignment, .blocks = std::vector<Block>(problem.count())};
  std::int64_t live = 0;
  for (std::size_t i = 0; i < problem.count(); ++i) live += crosses(i) || is_whole(i);
  bool has_grown = live > 0;
  std::int32_t column = 0;
  std::vector<std::int32_t> last(problem.count());
  std::int64_t now = 0;
  for (const Event& event : events_of(problem)) {
    if (is_fine && event.time != now && live > 0) ++column;
    if (!is_fine && !event.is_start && has_grown) ++column;
    now = event.time;
    if (!is_fine && !event.is_start) has_grown = false;
    if (event.is_start) {
      grid.blocks[event.index].span.first = column;
      has_grown = true;
    } else {
      last[event.index] = column - 1;
    }
    live += event.is_start ? 1 : -1;
  }
  if (live > 0 && (is_fine || has_grown)) ++column;
  grid.column_count = column;
  for (std::size_t i = 0; i < problem.count(); ++i) {
    Block& block = grid.blocks[i];
    block.units = (problem.size[i] + problem.alignment - 1) / problem.alignment;
    block.size = problem.size[i];
    block.above = problem.above[i];
    block.span.count = last[i] - block.span.first + 1 + (crosses(i) ? column : 0);
    if (is_whole(i)) block.span = {0, column};
  }
  return grid;
}

std::int64_t bound(const Grid& grid) {
  const auto columns = static_cast<std::size_t>(grid.column_count);
  std::vector<std::vector<std::uint32_t>> begins(columns), ends(columns);
  std::multiset<std::int64_t> tops;  // what a block adds to whole units when it is the topmost
  std::vector<std::int64_t> top(grid.blocks.size());
  for (std::uint32_t i = 0; i < grid.blocks.size(); ++i) {
    const Block& block = grid.blocks[i];
    top[i] = block.above + block.size - block.units * grid.alignment;
    const auto stop = static_cast<std::size_t>(block.span.first + block.span.count);
    if (stop > columns || block.span.first == 0) tops.insert(top[i]);
    if (block.span.first != 0) begins[static_cast<std::size_t>(block.span.first)].push_back(i);
    if (stop != columns && static_cast<std::size_t>(block.span.count) != columns) ends[stop % columns].push_back(i);
  }
  const std::vector<std::int64_t> units = column_units(grid);
  std::int64_t highest = 0;
  for (std::size_t c = 0; c < columns; ++c) {
    // A block that covers all columns from a first one other than 0 leaves and comes back at no column.
    for (const std::uint32_t i : ends[c]) tops.erase(tops.find(top[i]));
    for (const std::uint32_t i : begins[c])
      if (static_cast<std::size_t>(grid.blocks[i].span.count) != columns) tops.insert(top[i]);
    if (!tops.empty()) highest = std::max(highest, units[c] * grid.alignment + *tops.begin());
  }
  return highest;
}

std::vector<std::int64_t> column_units(const Grid& grid) {
  const auto columns = static_cast<std::size_t>(grid.column_count);
  std::vector<std::int64_t> change(2 * columns + 1, 0);
  for (const Block& block : grid.blocks) {
    change[static_cast<std::size_t>(block.span.first)] += block.units;
    change[static_cast<std::size_t>(block.span.first + block.span.count)] -= block.units;
  }
  std::partial_sum(change.begin(), change.end(), change.begin());
  std::vector<std::int64_t> units(columns);
  for (std::size_t c = 0; c < columns; ++c) units[c] = change[c] + change[c + columns];
  return units;
}

}  // namespace tieroff::layout
