// Takes a problem apart before the exact search: by groups in time, and by what lives all the time.
#include <algorithm>
#include <numeric>

#include "tieroff/layout/layout_branch.hpp"

namespace tieroff::layout {

namespace {

using Indices = std::vector<std::uint32_t>;

// Blocks without those of other groups; the columns start at the group's first one.
Grid part_of(const Grid& grid, const Indices& blocks, std::int32_t first_column, std::int32_t column_count) {
  Grid part{.column_count = column_count, .alignment = grid.alignment, .blocks = {}};
  for (const std::uint32_t i : blocks) {
    Block block = grid.blocks[i];
    block.span.first = (block.span.first - first_column + grid.column_count) % grid.column_count;
    part.blocks.push_back(block);
  }
  return part;
}

// Blocks in all columns can lie at the bottom, in any order. Where nothing must stay free above, only the topmost end may
// be no whole unit, so for one of them the top is tried as well; else those that are no whole units are left as they are.
class Reduction {
 public:
  explicit Reduction(Limits& limits) : limits_(limits) {}

  Branching solve(const Grid& grid, std::int64_t capacity) {
    Indices all(grid.blocks.size());
    std::iota(all.begin(), all.end(), 0U);
    const std::vector<Group> groups = limits_.options.splits ? split(grid) : std::vector<Group>{};
    if (groups.size() > 1) return solve_apart(grid, capacity, groups);
    Indices whole, others;
    const auto keeps_free = [](const Block& block) { return block.above != 0; };
    const bool is_plain = std::none_of(grid.blocks.begin(), grid.blocks.end(), keeps_free);
    for (const std::uint32_t i : all) {
      const Block& block = grid.blocks[i];
      const bool is_exact = is_plain || block.units * grid.alignment == block.size;
      (is_exact && block.span.count == grid.column_count ? whole : others).push_back(i);
    }
    if (limits_.options.stacks && !whole.empty()) return solve_above(grid, capacity, std::move(whole), others);
    return branch_whole(grid, capacity, limits_);
  }

 private:
  struct Group {
    Indices blocks;
    std::int32_t first = 0;
    std::int32_t stop = 0;
  };

  static std::vector<Group> split(const Grid& grid) {
    const std::vector<std::int64_t> units = column_units(grid);
    std::vector<std::uint8_t> crosses(units.size(), 0);  // some block is in this column and in the one before
    for (const Block& block : grid.blocks)
      for (std::int32_t k = 1; k < block.span.count; ++k)
        crosses[static_cast<std::size_t>((block.span.first + k) % grid.column_count)] = 1;
    std::vector<std::int32_t> cuts;
    for (std::int32_t c = 0; c < grid.column_count; ++c)
      if (crosses[static_cast<std::size_t>(c)] == 0) cuts.push_back(c);
    if (cuts.empty()) return {};
    std::vector<Group> groups;
    for (std::size_t k = 0; k < cuts.size(); ++k)
      groups.push_back({{}, cuts[k], k + 1 < cuts.size() ? cuts[k + 1] : cuts[0] + grid.column_count});
    for (std::uint32_t i = 0; i < grid.blocks.size(); ++i) {
      const std::int32_t first = grid.blocks[i].span.first;
      const auto after = std::upper_bound(cuts.begin(), cuts.end(), first) - cuts.begin();
      groups[(static_cast<std::size_t>(after) + cuts.size() - 1) % cuts.size()].blocks.push_back(i);
    }
    std::erase_if(groups, [](const Group& group) { return group.blocks.empty(); });
    std::stable_sort(groups.begin(), groups.end(),
                     [](const Group& a, const Group& b) { return a.blocks.size() < b.blocks.size(); });
    return groups;
  }

  Branching solve_apart(const Grid& grid, std::int64_t capacity, const std::vector<Group>& groups) {
    Branching result{Outcome::kFound, std::vector<std::int64_t>(grid.blocks.size())};
    for (const Group& group : groups) {
      const Branching part = solve(part_of(grid, group.blocks, group.first, group.stop - group.first), capacity);
      if (part.outcome == Outcome::kImpossible) return {Outcome::kImpossible, {}};
      if (part.outcome == Outcome::kUnknown) result.outcome = Outcome::kUnknown;
      for (std::size_t k = 0; k < part.offsets.size(); ++k) result.offsets[group.blocks[k]] = part.offsets[k];
    }
    return result;
  }

  // Blocks in all columns go to the bottom, the one with the most padding last. Only as the topmost of all may it use
  // room that is no whole unit: then the others end below it on a whole unit, with nothing to keep free.
  Branching solve_above(const Grid& grid, std::int64_t capacity, Indices whole, const Indices& others) {
    const auto padding = [&](std::uint32_t i) { return grid.blocks[i].units * grid.alignment - grid.blocks[i].size; };
    std::stable_sort(whole.begin(), whole.end(), [&](auto i, auto k) { return padding(i) < padding(k); });
    const std::uint32_t top = whole.back();
    std::int64_t units = 0;
    for (const std::uint32_t i : whole) units += grid.blocks[i].units;
    const std::int64_t room = capacity - units * grid.alignment;
    const std::int64_t room_below = floor_div(room + padding(top) - grid.blocks[top].above, grid.alignment);
    if (room_below < 0) return {Outcome::kImpossible, {}};
    if (others.empty()) return stacked(grid, whole, others, {}, false);
    Grid part = part_of(grid, others, 0, grid.column_count);
    std::int64_t above = 0;
    for (const Block& block : part.blocks) above = std::max(above, block.above);
    const Branching first = solve(part, room);
    if (first.outcome == Outcome::kFound) return stacked(grid, whole, others, first.offsets, false);
    if (room_below <= floor_div(room - above, grid.alignment)) return first;
    for (Block& block : part.blocks) block.above = 0, block.size = block.units * grid.alignment;
    const Branching second = solve(part, room_below * grid.alignment);
    if (second.outcome == Outcome::kFound) return stacked(grid, whole, others, second.offsets, true);
    return {first.outcome == Outcome::kUnknown ? first.outcome : second.outcome, {}};
  }

  static Branching stacked(const Grid& grid, const Indices& whole, const Indices& others,
                           const std::vector<std::int64_t>& offsets, bool is_last_on_top) {
    Branching result{Outcome::kFound, std::vector<std::int64_t>(grid.blocks.size())};
    std::int64_t end = 0;
    for (const std::uint32_t i : whole) {
      if (is_last_on_top && i == whole.back()) break;
      result.offsets[i] = end;
      end += grid.blocks[i].units;
    }
    std::int64_t highest = end;
    for (std::size_t k = 0; k < others.size(); ++k) {
      result.offsets[others[k]] = end + offsets[k];
      highest = std::max(highest, end + offsets[k] + grid.blocks[others[k]].units);
    }
    if (is_last_on_top) result.offsets[whole.back()] = highest;
    return result;
  }

  Limits& limits_;
};

}  // namespace

Branching branch(const Grid& grid, std::int64_t capacity, Limits& limits) { return Reduction(limits).solve(grid, capacity); }

}  // namespace tieroff::layout
