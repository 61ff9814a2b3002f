// The local search and the fitting of windows on seeded random input, for the compiler's sanitizers: no Python, no
// expected values but what any search must hold.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "tieroff/search/improve.hpp"
#include "tieroff/search/windows.hpp"

namespace {

using namespace tieroff;
using Column = std::vector<std::int64_t>;

void expect(bool holds, const char* what, unsigned seed) {
  if (holds) return;
  std::fprintf(stderr, "seed %u: expected %s\n", seed, what);
  std::exit(1);
}

// Gaps of some pieces on a ring of ops, with windows that may be over the budget.
struct Case {
  Column duration_ns, starts_ns, idle_usage;  // the last: bytes at each op with all gaps away from start to stop
  Column piece, start, stop, size_bytes, is_last, copy_from, is_persistent, away_start, away_stop, tier;
  SearchGround ground{};
  std::int64_t n = 0;

  [[nodiscard]] Column usage() const {
    Column bytes = idle_usage;
    for (std::size_t gap = 0; gap < piece.size(); ++gap) {
      for (std::int64_t position = start[gap]; position < stop[gap]; ++position) {
        const bool is_away = position >= away_start[gap] && position < away_stop[gap];
        if (!is_away) bytes[static_cast<std::size_t>(position % n)] += size_bytes[gap];
      }
    }
    return bytes;
  }

  [[nodiscard]] bool is_inside() const {
    for (std::size_t gap = 0; gap < piece.size(); ++gap) {
      if (away_start[gap] >= away_stop[gap]) continue;
      if (away_start[gap] < start[gap] || away_stop[gap] > stop[gap] || tier[gap] < 0 || tier[gap] > 1) return false;
    }
    return true;
  }

  [[nodiscard]] SearchGaps gaps() {
    return {piece, start, stop, size_bytes, is_last, copy_from, is_persistent, away_start, away_stop, tier};
  }
};

class Maker {
 public:
  explicit Maker(unsigned seed) : random_(seed) {}

  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }

  void fill(Case& made) {
    made.n = draw(1, 24);
    made.starts_ns.push_back(0);
    for (std::int64_t op = 0; op < made.n; ++op) {
      made.duration_ns.push_back(draw(0, 40));
      made.starts_ns.push_back(made.starts_ns.back() + made.duration_ns.back());
      made.idle_usage.push_back(draw(0, 50));
    }
    const std::array<std::int64_t, 2> lower{draw(0, 4) == 0 ? 0 : draw(50, 2000), 5000};
    for (std::int64_t number = 0, count = draw(0, 16); number < count; ++number) add_piece(made, number, lower[0] > 0);
    made.ground = {made.duration_ns,
                   {{1.0, 0.25, 1.0, 0.5}, {0.0, 2.0, 0.0, 1.0}, draw(0, 1) == 1, draw(0, 1) ? 1.0 : 0.7},
                   draw(100, 600),
                   lower,
                   draw(0, 1) == 1 ? 1 : 16};
  }

 private:
  void add_piece(Case& made, std::int64_t number, bool has_host) {
    const bool is_persistent = draw(0, 1) == 1;
    const std::int64_t size = draw(1, 100);
    std::int64_t position = draw(0, made.n - 1);
    const std::int64_t first = position;
    const std::int64_t end = is_persistent ? first + made.n : made.n;
    while (position < end && position < made.n) {
      const std::int64_t stop = std::min(end, position + draw(1, made.n));
      const bool is_last = !is_persistent && draw(0, 3) == 0;
      const bool is_away = draw(0, 2) > 0;
      const std::int64_t from = draw(position, stop - 1);
      made.piece.push_back(number);
      made.start.push_back(position);
      made.stop.push_back(stop);
      made.size_bytes.push_back(size);
      made.is_last.push_back(is_last ? 1 : 0);
      made.copy_from.push_back(draw(0, 3) == 0 && is_persistent ? -(std::int64_t{1} << 62U) : draw(first, position));
      made.is_persistent.push_back(is_persistent ? 1 : 0);
      made.away_start.push_back(is_away ? from : position);
      made.away_stop.push_back(is_away ? draw(from + 1, stop) : position);
      made.tier.push_back(is_away ? (has_host ? draw(0, 1) : 1) : -1);
      if (is_last) return;
      position = stop + 1;
    }
  }

  std::mt19937_64 random_;
};

// Widens and shrinks the windows; true when every op fits.
bool test_fit(Case& made, unsigned seed) {
  Column order(made.piece.size());
  std::iota(order.begin(), order.end(), 0);
  Column loads;
  std::copy_if(order.begin(), order.end(), std::back_inserter(loads),
               [&](std::int64_t gap) { return made.is_last[static_cast<std::size_t>(gap)] == 0; });
  const Column from(order.size(), 0);
  const Column until(order.size(), 2 * made.n);
  Column bytes = made.idle_usage;
  const Gaps gaps{made.start, made.stop, made.size_bytes, made.away_start, made.away_stop};
  const bool fits = fit_windows(bytes, made.starts_ns, made.ground.device_bytes, gaps, static_cast<Repair>(seed % 4),
                                {loads, order, from, until, seed % 2 == 0 ? "LRlr" : "rRLl"});
  for (std::size_t gap = 0; gap < order.size(); ++gap) {
    const bool is_away = made.away_start[gap] < made.away_stop[gap];
    if (is_away && made.tier[gap] < 0) made.tier[gap] = 1;
  }
  const std::int64_t highest = *std::max_element(bytes.begin(), bytes.end());
  expect(!fits || (highest <= made.ground.device_bytes && made.is_inside()), "windows that fit, inside their gaps", seed);
  expect(!fits || bytes == made.usage(), "the usage of the windows found", seed);
  return fits;
}

void test_search(const Case& begin, unsigned seed) {
  Case first = begin, again = begin;
  Column bytes = first.usage(), more = again.usage();
  const std::int64_t work = seed % 5 == 0 ? 0 : 400'000;
  const Improved found = improve(bytes, first.ground, first.gaps(), seed, work);
  const Improved same = improve(more, again.ground, again.gaps(), seed, work);
  expect(found.after_ns <= found.before_ns && found.nodes >= 0, "a step that is no longer", seed);
  expect(first.away_start == again.away_start && first.away_stop == again.away_stop && first.tier == again.tier &&
             found.after_ns == same.after_ns && found.nodes == same.nodes,
         "the same of the same seed", seed);
  expect(bytes == first.usage() && first.is_inside(), "the usage of the windows found, inside their gaps", seed);
  expect(*std::max_element(bytes.begin(), bytes.end()) <= first.ground.device_bytes, "windows that fit", seed);
  const Improved none = improve(bytes, first.ground, first.gaps(), seed, 0);
  expect(none.before_ns == found.after_ns && none.nodes == 0, "the step that was found when it is played again", seed);
}

template <class Change>
void expect_refused(Change change, const char* what) {
  Case made;
  Maker(3).fill(made);
  while (made.piece.empty()) {
    made = Case{};
    Maker(static_cast<unsigned>(made.n) + 7).fill(made);
  }
  change(made);
  Column bytes(static_cast<std::size_t>(made.n), 0);
  try {
    improve(bytes, made.ground, made.gaps(), 1, 1000);
  } catch (const std::invalid_argument&) {
    return;
  }
  expect(false, what, 0);
}

void test_refusals() {
  expect_refused([](Case& made) { made.stop[0] = made.start[0] + made.n + 1; }, "a gap longer than the ring to be refused");
  expect_refused([](Case& made) { made.tier.push_back(0); }, "columns of two lengths to be refused");
  expect_refused([](Case& made) { made.ground.granule_bytes = 0; }, "a granule of nothing to be refused");
  expect_refused(
      [](Case& made) {
        made.away_start[0] = made.start[0] - 1;
        made.away_stop[0] = made.stop[0];
      },
      "a window outside its gap to be refused");
}

}  // namespace

int main() {
  test_refusals();
  unsigned fitting = 0;
  for (unsigned seed = 0; seed < 1500; ++seed) {
    Case made;
    Maker(seed).fill(made);
    if (!test_fit(made, seed)) continue;
    ++fitting;
    test_search(made, seed);
  }
  expect(fitting > 300, "many cases that can fit at all", 0);
}
