// Time as columns: the moments that matter, so that two buffers meet in time exactly when they share a column.
#pragma once

#include <cstdint>
#include <vector>

#include "tieroff/layout/layout.hpp"

namespace tieroff::layout {

// Columns first, first + 1, ..., first + count - 1, modulo the number of columns.
struct Span {
  std::int32_t first = 0;
  std::int32_t count = 0;
};

// A buffer in whole units of the alignment.
struct Block {
  Span span;
  std::int64_t units = 0;  // size, rounded up
  std::int64_t size = 0;   // bytes
  std::int64_t above = 0;  // bytes
};

struct Grid {
  std::int32_t column_count = 0;
  std::int64_t alignment = 1;
  std::vector<Block> blocks;

  std::int64_t end(std::size_t index, std::int64_t offset_units) const {
    return offset_units * alignment + blocks[index].size + blocks[index].above;
  }
  std::int64_t footprint(const std::vector<std::int64_t>& offset_units) const;
};

Grid make_grid(const Problem& problem);

// Returns a footprint that no layout is below: of what meets in a column all but the topmost take whole units.
std::int64_t bound(const Grid& grid);

// Returns the units that meet in each column.
std::vector<std::int64_t> column_units(const Grid& grid);

}  // namespace tieroff::layout
