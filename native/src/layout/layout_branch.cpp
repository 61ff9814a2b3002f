// [Note: exact search]
// If any layout fits, then one does in which every block lies on the ground or on top of another one that it meets in
// time, and in which no block can be moved down: of all that fit, the one with the least sum of offsets. Its blocks,
// sorted by (offset, rank), are placed in this order, so a state is the set of blocks left and, for each of them, its
// `start`: the highest end of what it meets. Nothing else of the past matters. From a state the search goes to each block
// left whose (start, rank) is above the last one's, and skips, by switches of their own,
// * dominates: a start at or above the end that another block left would have at its own start; that one could have
//   been placed before, so the sum of offsets was not the least;
// * bounds: a start after which what is left in some column exceeds the capacity;
// * splits: as soon as blocks left fall into groups that share no column, each is searched apart, and one group that
//   fails ends the state;
// * remembers: a state that failed before, with a last (start, rank) that is not above this one's: less was skipped;
// * orders_twins: a block whose twin (same columns, same size) of lower rank is left.
#include "tieroff/layout/layout_branch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>
#include <unordered_map>

#include "tieroff/layout/layout_fit.hpp"

namespace tieroff::layout {

namespace {

using Indices = std::vector<std::uint32_t>;

constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max() / 4;
constexpr std::size_t kRememberedMax = 1'000'000;
constexpr std::int64_t kClockVisits = 256;
constexpr std::int64_t kNodeColumns = 2048;  // looking at so many columns, over the blocks left, counts as a node more
constexpr std::int64_t kFirstNodes = 2000;
constexpr std::size_t kLearnedOrders = 8;
constexpr std::int64_t kRoundsKept = 10;

std::uint64_t mixed(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

struct Place {
  std::int64_t offset;
  std::uint32_t rank;

  bool operator<(const Place& other) const { return std::tie(offset, rank) < std::tie(other.offset, other.rank); }
};

// The search of blocks that meet in one group; blocks have local indices.
class Search {
 public:
  Search(const Grid& grid, std::int64_t capacity, Limits& limits);

  Outcome run();
  const std::vector<std::int64_t>& offsets() const { return offset_; }

 private:
  Outcome attempt(const Order& order, std::int64_t node_count);
  Order learned(std::mt19937_64& random) const;
  bool visit(const Indices& left, Place last);
  bool descend(const Indices& left, std::uint32_t chosen);
  bool has_room(const Indices& left, std::int64_t floor, std::int64_t& highest);
  Indices candidates(const Indices& left, Place last, std::int64_t highest) const;
  std::vector<Indices> groups(const Indices& left);
  void put(std::uint32_t block);
  void undo(std::size_t mark);
  void rank_by(const Order& order);
  std::array<std::uint64_t, 2> digest(const Indices& left) const;

  template <typename Visit>
  void each_column(std::uint32_t block, Visit visit) const {
    const Span span = grid_.blocks[block].span;
    std::int32_t column = span.first;
    for (std::int32_t k = 0; k < span.count; ++k) {
      visit(static_cast<std::size_t>(column));
      if (++column == grid_.column_count) column = 0;
    }
  }

  struct Change {
    std::uint32_t block;
    std::int64_t start;  // before; -1: the block was placed
  };
  struct Failure {
    std::uint64_t check;
    Place last;
  };

  const Grid& grid_;
  Limits& limits_;
  std::vector<std::int64_t> highest_start_;  // per block
  std::vector<std::int64_t> column_limit_;   // in units
  std::vector<Indices> meets_;
  std::vector<std::int64_t> start_;
  std::vector<std::int64_t> offset_;  // -1: left
  std::vector<std::int64_t> rest_;    // per column: units left
  std::vector<std::int64_t> low_;     // per column, scratch
  std::vector<std::int64_t> blame_;   // per block: how often it was left in a column that failed
  std::vector<Change> trail_;
  std::vector<std::uint32_t> rank_;
  std::vector<std::int64_t> twin_;  // the next lower rank of the same columns and size, or -1
  std::unordered_map<std::uint64_t, Failure> failures_;
  std::int64_t nodes_stop_ = 0;
  bool has_stopped_ = false;
};

Search::Search(const Grid& grid, std::int64_t capacity, Limits& limits)
    : grid_(grid),
      limits_(limits),
      meets_(grid.blocks.size()),
      start_(grid.blocks.size(), 0),
      offset_(grid.blocks.size(), -1),
      rest_(column_units(grid)),
      low_(rest_.size()),
      blame_(grid.blocks.size(), 0),
      rank_(grid.blocks.size()),
      twin_(grid.blocks.size()) {
  // The topmost block of a column ends within the capacity; rounded up, within the capacity rounded up.
  std::vector<std::int64_t> above(rest_.size(), kFar);
  std::vector<std::vector<std::uint32_t>> in_column(rest_.size());
  for (std::uint32_t i = 0; i < grid.blocks.size(); ++i) {
    const Block& block = grid.blocks[i];
    highest_start_.push_back(floor_div(capacity - block.size - block.above, grid.alignment));
    each_column(i, [&](std::size_t c) {
      above[c] = std::min(above[c], block.above);
      in_column[c].push_back(i);
    });
  }
  for (const std::int64_t bytes : above) column_limit_.push_back(-floor_div(bytes - capacity, grid.alignment));
  for (const auto& column : in_column)
    for (const std::uint32_t i : column) meets_[i].insert(meets_[i].end(), column.begin(), column.end());
  for (std::uint32_t i = 0; i < meets_.size(); ++i) {
    std::sort(meets_[i].begin(), meets_[i].end());
    meets_[i].erase(std::unique(meets_[i].begin(), meets_[i].end()), meets_[i].end());
    std::erase(meets_[i], i);
  }
}

void Search::rank_by(const Order& order) {
  for (std::uint32_t rank = 0; rank < order.size(); ++rank) rank_[order[rank]] = rank;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> alike;
  for (const std::uint32_t i : order) {
    const Block& block = grid_.blocks[i];
    twin_[i] = -1;
    auto& earlier = alike[mixed(static_cast<std::uint64_t>(block.size) + mixed(static_cast<std::uint64_t>(block.span.first)))];
    for (const std::uint32_t other : earlier) {
      const Block& peer = grid_.blocks[other];
      if (peer.span.first == block.span.first && peer.span.count == block.span.count && peer.size == block.size &&
          peer.above == block.above)
        twin_[i] = other;
    }
    earlier.push_back(i);
  }
}

// Goes through several orders of rank with growing budgets, each from the start; one that ends has proven it.
Outcome Search::run() {
  for (const std::int64_t highest : highest_start_)
    if (highest < 0) return Outcome::kImpossible;
  const std::vector<Order> orders = orders_by_crowd(grid_);
  std::mt19937_64 random(limits_.options.seed);
  std::int64_t all_columns = 0;
  for (const Block& block : grid_.blocks) all_columns += block.span.count;
  const std::int64_t first_nodes = kFirstNodes * (1 + all_columns / kNodeColumns);
  for (std::int64_t round = 0;; ++round) {
    // What was learned is forgotten from time to time, since it can lead astray; budgets start higher then.
    if (round % kRoundsKept == 0) std::fill(blame_.begin(), blame_.end(), 0);
    const std::int64_t round_nodes = first_nodes * (1 + round / kRoundsKept + round % kRoundsKept / 2);
    for (std::size_t k = 0; k < orders.size() + kLearnedOrders; ++k) {
      const Outcome outcome = attempt(k < orders.size() ? orders[k] : learned(random), round_nodes);
      if (outcome != Outcome::kUnknown || limits_.is_over()) return outcome;
    }
  }
}

Outcome Search::attempt(const Order& order, std::int64_t node_count) {
  rank_by(order);
  failures_.clear();  // a failure holds for one order of rank
  has_stopped_ = false;
  nodes_stop_ = limits_.nodes + node_count;
  bool is_found = true;
  for (const Indices& group : limits_.options.splits ? groups(order) : std::vector<Indices>{order})
    is_found = is_found && visit(group, {-1, 0});
  if (is_found) return Outcome::kFound;
  undo(0);
  return has_stopped_ ? Outcome::kUnknown : Outcome::kImpossible;
}

// What was left most often in a column that failed tends to the front.
Order Search::learned(std::mt19937_64& random) const {
  const auto share = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  const double exponent = 2 * share(), weight = std::max(0.0, 2 * share() - 1);
  std::vector<double> lifts;
  for (const std::int64_t count : blame_) lifts.push_back(weight * std::log(1 + static_cast<double>(count)) + share());
  return order_by_size(grid_, exponent, lifts);
}

bool Search::visit(const Indices& left, Place last) {
  if (left.empty()) return true;
  if (limits_.nodes >= nodes_stop_ || limits_.is_over()) {
    has_stopped_ = true;
    return false;
  }
  std::int64_t looked_at = 0;
  for (const std::uint32_t i : left) looked_at += grid_.blocks[i].span.count;
  limits_.nodes += 1 + looked_at / kNodeColumns;
  std::int64_t highest = kFar;
  if (limits_.options.bounds && !has_room(left, last.offset, highest)) return false;
  const auto key = limits_.options.remembers ? digest(left) : std::array<std::uint64_t, 2>{};
  if (limits_.options.remembers) {
    const auto found = failures_.find(key[0]);
    if (found != failures_.end() && found->second.check == key[1] && !(last < found->second.last)) return false;
  }
  for (const std::uint32_t chosen : candidates(left, last, highest)) {
    const std::size_t mark = trail_.size();
    if (descend(left, chosen)) return true;
    undo(mark);
    if (has_stopped_) return false;
  }
  if (limits_.options.remembers && failures_.size() < kRememberedMax) {
    const auto [found, is_new] = failures_.try_emplace(key[0], Failure{key[1], last});
    if (!is_new && (found->second.check != key[1] || last < found->second.last)) found->second = {key[1], last};
  }
  return false;
}

bool Search::descend(const Indices& left, std::uint32_t chosen) {
  const Place place{start_[chosen], rank_[chosen]};
  put(chosen);
  Indices rest;
  rest.reserve(left.size());
  for (const std::uint32_t i : left)
    if (i != chosen) rest.push_back(i);
  for (const std::uint32_t i : meets_[chosen])
    if (offset_[i] < 0 && start_[i] > highest_start_[i]) return false;
  bool has_closed = false;
  each_column(chosen, [&](std::size_t c) { has_closed = has_closed || rest_[c] == 0; });
  if (!has_closed || !limits_.options.splits) return visit(rest, place);
  for (const Indices& group : groups(rest))
    if (!visit(group, place)) return false;
  return true;
}

// False when what is left in some column cannot fit. `highest`: no block left may be placed above it first.
bool Search::has_room(const Indices& left, std::int64_t floor, std::int64_t& highest) {
  for (const std::uint32_t i : left) each_column(i, [&](std::size_t c) { low_[c] = kFar; });
  for (const std::uint32_t i : left) {
    const std::int64_t start = std::max(start_[i], floor);
    each_column(i, [&](std::size_t c) { low_[c] = std::min(low_[c], start); });
  }
  for (const std::uint32_t i : left) {
    bool is_full = false;
    each_column(i, [&](std::size_t c) {
      is_full = is_full || low_[c] + rest_[c] > column_limit_[c];
      highest = std::min(highest, column_limit_[c] - rest_[c]);
    });
    if (is_full) {
      ++blame_[i];
      return false;
    }
  }
  return true;
}

Indices Search::candidates(const Indices& left, Place last, std::int64_t highest) const {
  std::int64_t first_end = kFar;
  if (limits_.options.dominates)
    for (const std::uint32_t i : left) first_end = std::min(first_end, start_[i] + grid_.blocks[i].units);
  Indices chosen;
  for (const std::uint32_t i : left) {
    if (start_[i] >= first_end || start_[i] > highest || !(last < Place{start_[i], rank_[i]})) continue;
    if (limits_.options.orders_twins && twin_[i] >= 0 && offset_[static_cast<std::size_t>(twin_[i])] < 0) continue;
    chosen.push_back(i);
  }
  std::sort(chosen.begin(), chosen.end(),
            [&](auto a, auto b) { return start_[a] != start_[b] ? start_[a] < start_[b] : rank_[a] < rank_[b]; });
  return chosen;
}

// Blocks that share no column with those of another group, the smallest group first.
std::vector<Indices> Search::groups(const Indices& left) {
  const std::int32_t columns = grid_.column_count;
  std::int32_t cut = 0;  // a column that no block left is in, so that the ring is a line from there
  while (cut < columns && rest_[static_cast<std::size_t>(cut)] != 0) ++cut;
  std::vector<std::tuple<std::int32_t, std::int32_t, std::uint32_t>> spans;
  for (const std::uint32_t i : left) {
    const Span span = grid_.blocks[i].span;
    std::int32_t first = span.first - cut;
    if (first < 0) first += columns;
    spans.emplace_back(first, first + span.count, i);
  }
  std::sort(spans.begin(), spans.end());
  std::vector<Indices> found;
  std::int32_t reach = -1;
  for (const auto& [first, stop, i] : spans) {
    if (found.empty() || (first >= reach && cut < columns)) found.emplace_back();
    found.back().push_back(i);
    reach = std::max(reach, stop);
  }
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); });
  return found;
}

void Search::put(std::uint32_t block) {
  const Block& placed = grid_.blocks[block];
  offset_[block] = start_[block];
  trail_.push_back({block, -1});
  each_column(block, [&](std::size_t c) { rest_[c] -= placed.units; });
  const std::int64_t end = start_[block] + placed.units;
  for (const std::uint32_t i : meets_[block]) {
    if (offset_[i] >= 0 || start_[i] >= end) continue;
    trail_.push_back({i, start_[i]});
    start_[i] = end;
  }
}

void Search::undo(std::size_t mark) {
  while (trail_.size() > mark) {
    const Change change = trail_.back();
    trail_.pop_back();
    if (change.start >= 0) {
      start_[change.block] = change.start;
      continue;
    }
    offset_[change.block] = -1;
    each_column(change.block, [&](std::size_t c) { rest_[c] += grid_.blocks[change.block].units; });
  }
}

std::array<std::uint64_t, 2> Search::digest(const Indices& left) const {
  std::array<std::uint64_t, 2> sums{};
  for (const std::uint32_t i : left) {
    const std::uint64_t value = mixed(mixed(i + 1) + static_cast<std::uint64_t>(start_[i]));
    sums[0] += value;
    sums[1] += mixed(value + 0x9e3779b97f4a7c15ULL);
  }
  return sums;
}

}  // namespace

bool Limits::is_over() {
  if (nodes < node_budget && ++visits % kClockVisits == 0 && is_late()) nodes = node_budget;
  return nodes >= node_budget;
}

Branching branch_whole(const Grid& grid, std::int64_t capacity, Limits& limits) {
  Search search(grid, capacity, limits);
  const Outcome outcome = search.run();
  return {outcome, outcome == Outcome::kFound ? search.offsets() : std::vector<std::int64_t>{}};
}

}  // namespace tieroff::layout
