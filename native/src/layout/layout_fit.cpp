#include "tieroff/layout/layout_fit.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

namespace tieroff::layout {

namespace {

constexpr std::size_t kRoot = 1;
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

std::size_t rounded_up(std::int32_t count) {
  std::size_t size = 1;
  while (size < static_cast<std::size_t>(count)) size *= 2;
  return size;
}

}  // namespace

Room::Room(std::int32_t column_count)
    : column_count_(column_count), own_(2 * rounded_up(column_count)), all_(2 * rounded_up(column_count)) {}

void Room::clear() {
  for (Ranges& ranges : own_) ranges.clear();
  for (Ranges& ranges : all_) ranges.clear();
}

void Room::merge(Ranges& ranges, Range added) {
  const auto first = std::lower_bound(ranges.begin(), ranges.end(), added.start,
                                      [](const Range& range, std::int64_t start) { return range.stop < start; });
  auto last = first;
  while (last != ranges.end() && last->start <= added.stop) {
    added.start = std::min(added.start, last->start);
    added.stop = std::max(added.stop, last->stop);
    ++last;
  }
  if (first == last) {
    ranges.insert(first, added);
  } else {
    *first = added;
    ranges.erase(first + 1, last);
  }
}

void Room::take(Span span, std::int64_t offset, std::int64_t units) {
  const std::int32_t stop = span.first + span.count;
  const auto leaves = static_cast<std::int32_t>(own_.size() / 2);
  const Range range{offset, offset + units};
  take(kRoot, 0, leaves, span.first, std::min(stop, column_count_), range);
  if (stop > column_count_) take(kRoot, 0, leaves, 0, stop - column_count_, range);
}

void Room::take(std::size_t node, std::int32_t low, std::int32_t high, std::int32_t first, std::int32_t stop, Range range) {
  if (stop <= low || high <= first) return;
  merge(all_[node], range);
  if (first <= low && high <= stop) {
    merge(own_[node], range);
    return;
  }
  const std::int32_t middle = (low + high) / 2;
  take(2 * node, low, middle, first, stop, range);
  take(2 * node + 1, middle, high, first, stop, range);
}

void Room::add(const Ranges& ranges) {
  if (!ranges.empty()) cursors_.push_back({ranges.data(), ranges.data() + ranges.size()});
}

void Room::collect(std::size_t node, std::int32_t low, std::int32_t high, std::int32_t first, std::int32_t stop) {
  if (stop <= low || high <= first || all_[node].empty()) return;
  if (first <= low && high <= stop) {
    add(all_[node]);
    return;
  }
  add(own_[node]);
  const std::int32_t middle = (low + high) / 2;
  collect(2 * node, low, middle, first, stop);
  collect(2 * node + 1, middle, high, first, stop);
}

// Returns the lowest offset from `from` on with enough room in all lists. Cursors then stand at the first range that
// ends above it.
std::int64_t Room::lowest_free(std::int64_t from, std::int64_t units, std::int64_t& steps) {
  std::int64_t offset = from;
  std::size_t clear = 0;
  for (std::size_t k = 0; clear < cursors_.size(); k = k + 1 < cursors_.size() ? k + 1 : 0) {
    Cursor& cursor = cursors_[k];
    ++steps;
    while (cursor.next != cursor.stop && cursor.next->stop <= offset) ++cursor.next, ++steps;
    ++clear;
    while (cursor.next != cursor.stop && cursor.next->start < offset + units) {
      offset = cursor.next->stop;
      ++cursor.next;
      ++steps;
      clear = 1;
    }
  }
  return offset;
}

std::int64_t Room::next_taken() const {
  std::int64_t start = kNever;
  for (const Cursor& cursor : cursors_)
    if (cursor.next != cursor.stop) start = std::min(start, cursor.next->start);
  return start;
}

std::int64_t Room::find(Span span, std::int64_t units, bool is_best_fit, std::int64_t& steps) {
  cursors_.clear();
  const std::int32_t stop = span.first + span.count;
  const auto leaves = static_cast<std::int32_t>(own_.size() / 2);
  collect(kRoot, 0, leaves, span.first, std::min(stop, column_count_));
  if (stop > column_count_) collect(kRoot, 0, leaves, 0, stop - column_count_);
  std::int64_t offset = lowest_free(0, units, steps);
  if (!is_best_fit) return offset;
  std::int64_t best = offset;
  std::int64_t best_room = kNever;
  for (;;) {
    const std::int64_t taken = next_taken();
    steps += static_cast<std::int64_t>(cursors_.size());
    if (taken == kNever) return best_room == kNever ? offset : best;
    if (taken - offset < best_room) {
      best = offset;
      best_room = taken - offset;
    }
    offset = lowest_free(taken, units, steps);
  }
}

namespace {

// Per block the most units that meet in any of its columns.
std::vector<std::int64_t> crowds(const Grid& grid) {
  std::vector<std::vector<std::int64_t>> most{column_units(grid)};  // most[k][c]: over columns c to c + 2^k - 1
  const auto columns = most[0].size();
  for (std::size_t width = 2; width <= columns; width *= 2) {
    const auto& half = most.back();
    std::vector<std::int64_t> next(columns);
    for (std::size_t c = 0; c < columns; ++c) next[c] = std::max(half[c], half[(c + width / 2) % columns]);
    most.push_back(std::move(next));
  }
  std::vector<std::int64_t> crowd;
  for (const Block& block : grid.blocks) {
    std::size_t level = 0;
    while (std::size_t{2} << level <= static_cast<std::size_t>(block.span.count)) ++level;
    const auto first = static_cast<std::size_t>(block.span.first);
    const auto second = first + static_cast<std::size_t>(block.span.count) - (std::size_t{1} << level);
    crowd.push_back(std::max(most[level][first], most[level][second % columns]));
  }
  return crowd;
}

}  // namespace

std::vector<Order> orders_by_crowd(const Grid& grid) {
  const std::vector<std::int64_t> crowd = crowds(grid);
  std::vector<Order> orders;
  const auto add = [&](auto key) {
    std::vector<decltype(key(std::size_t{}))> keys;
    for (std::size_t i = 0; i < grid.blocks.size(); ++i) keys.push_back(key(i));
    Order order(grid.blocks.size());
    std::iota(order.begin(), order.end(), 0U);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return keys[a] > keys[b]; });
    orders.push_back(std::move(order));
  };
  using Key = std::array<double, 3>;
  const auto units = [&](std::size_t i) { return static_cast<double>(grid.blocks[i].units); };
  const auto length = [&](std::size_t i) { return static_cast<double>(grid.blocks[i].span.count); };
  const auto full = [&](std::size_t i) { return static_cast<double>(crowd[i]); };
  add([&](std::size_t i) { return Key{full(i) * length(i) * units(i), length(i)}; });
  add([&](std::size_t i) { return Key{full(i), length(i), units(i)}; });
  add([&](std::size_t i) { return Key{full(i), units(i) * length(i), length(i)}; });
  add([&](std::size_t i) { return Key{length(i), units(i)}; });
  return orders;
}

Order order_by_size(const Grid& grid, double exponent, const std::vector<double>& lifts) {
  std::vector<double> keys;
  for (std::size_t i = 0; i < grid.blocks.size(); ++i) {
    const Block& block = grid.blocks[i];
    const double length = std::log(static_cast<double>(block.span.count));
    keys.push_back(std::log(static_cast<double>(block.units)) + exponent * length + lifts[i]);
  }
  Order order(grid.blocks.size());
  std::iota(order.begin(), order.end(), 0U);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return keys[a] > keys[b]; });
  return order;
}

std::vector<std::int64_t> place(const Grid& grid, Room& room, const Order& order, bool is_best_fit, std::int64_t& steps) {
  room.clear();
  std::vector<std::int64_t> offsets(grid.blocks.size());
  for (const std::uint32_t i : order) {
    const Block& block = grid.blocks[i];
    offsets[i] = room.find(block.span, block.units, is_best_fit, steps);
    room.take(block.span, offsets[i], block.units);
  }
  return offsets;
}

}  // namespace tieroff::layout
