// Placing blocks one by one, each at the lowest free offset or in the tightest free range.
#pragma once

#include <cstdint>
#include <vector>

#include "tieroff/layout/layout_columns.hpp"

namespace tieroff::layout {

// Room taken, by columns: a tree over the columns whose nodes hold sorted ranges of offsets that do not touch.
class Room {
 public:
  explicit Room(std::int32_t column_count);

  void clear();
  void take(Span span, std::int64_t offset, std::int64_t units);
  // Returns a free offset in all columns of the span; adds what it took to find to `steps`.
  std::int64_t find(Span span, std::int64_t units, bool is_best_fit, std::int64_t& steps);

 private:
  struct Range {
    std::int64_t start;
    std::int64_t stop;
  };
  using Ranges = std::vector<Range>;
  struct Cursor {
    const Range* next;
    const Range* stop;
  };

  static void merge(Ranges& ranges, Range added);
  void take(std::size_t node, std::int32_t low, std::int32_t high, std::int32_t first, std::int32_t stop, Range range);
  void collect(std::size_t node, std::int32_t low, std::int32_t high, std::int32_t first, std::int32_t stop);
  void add(const Ranges& ranges);
  std::int64_t lowest_free(std::int64_t from, std::int64_t units, std::int64_t& steps);
  std::int64_t next_taken() const;

  std::int32_t column_count_;
  std::vector<Ranges> own_;  // of blocks that cover the node's columns, but not its parent's
  std::vector<Ranges> all_;  // of blocks in any column of the node
  std::vector<Cursor> cursors_;
};

using Order = std::vector<std::uint32_t>;

// Returns orders by the most that is live meanwhile, length and size, in several mixtures.
std::vector<Order> orders_by_crowd(const Grid& grid);

// Returns the order of falling size times length^exponent times e^lift.
Order order_by_size(const Grid& grid, double exponent, const std::vector<double>& lifts);

// Returns the offset of each block, in units.
std::vector<std::int64_t> place(const Grid& grid, Room& room, const Order& order, bool is_best_fit, std::int64_t& steps);

}  // namespace tieroff::layout
