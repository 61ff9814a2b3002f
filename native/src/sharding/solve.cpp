#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <thread>

#include "tieroff/sharding/search.hpp"

namespace tieroff::sharding {

namespace {

constexpr double kEnumerable = 20'000;  // assignments that are tried one by one
constexpr double kRounding = 1e-9;      // of a bound, for what sums in floating point lose
constexpr int kPublished = 20;          // steps of the ascent between two looks at the board
constexpr double kStepsMin = 100;

double assignments(const Reduced& reduced) {
  double count = 1;
  for (int node = 0; node < reduced.node_count(); ++node) count *= reduced.strategies_of(node);
  return count;
}

void enumerate(const Reduced& reduced, Board& board) {
  State state(reduced);
  while (true) {
    if (state.most_over() <= 0) board.offer(state.cost(), state.choice());
    int node = 0;
    while (node < reduced.node_count() && state.choice()[node] + 1 == reduced.strategies_of(node)) state.move(node++, 0);
    if (node == reduced.node_count()) return;
    state.move(node, state.choice()[node] + 1);
  }
}

void ascend(Ascent& ascent, Board& board, double steps) {
  for (double step = 0; step < steps && !board.is_over(); ++step) {
    const bool is_moving = ascent.step(board.best_cost());
    if (is_moving && static_cast<int>(step) % kPublished != 0) continue;
    board.raise_bound(ascent.bound() - kRounding * std::abs(ascent.bound()), ascent.dual(), ascent.best_prices());
    if (!is_moving) return;
  }
}

// One thread raises the bound while the other searches, then both search.
void search(const Reduced& reduced, Board& board, std::uint64_t seed) {
  Ascent ascent(reduced);
  ascend(ascent, board, kStepsMin);
  std::exception_ptr failure;
  std::thread second([&] {
    try {
      ascend(ascent, board, std::numeric_limits<double>::infinity());
      Search(reduced, board, seed + 1).run();
    } catch (...) {
      failure = std::current_exception();
    }
  });
  try {
    Search(reduced, board, seed).run();
  } catch (...) {
    second.join();
    throw;
  }
  second.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

Result solve(const Problem& problem, const Options& options) {
  const auto deadline =
      std::chrono::steady_clock::now() +
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(std::min(options.time_limit_s, 1e6)));
  Result result;
  const Reduced reduced = reduce(problem);
  result.bound = std::numeric_limits<double>::infinity();
  if (!reduced.is_feasible) return result;
  Board board(reduced, deadline);
  if (assignments(reduced) <= kEnumerable) {
    enumerate(reduced, board);
    board.prove();
  } else {
    search(reduced, board, options.seed);
  }
  result.is_feasible = board.has_best();
  result.cost = board.best_cost();
  result.bound = std::min(board.bound(), board.best_cost());
  result.start_count = board.start_count();
  if (result.is_feasible) result.strategies = expand(reduced, board.best_choice(), problem.start.size());
  return result;
}

}  // namespace tieroff::sharding
