// The search for an assignment within memory: rounded from messages, repaired under rising prices, improved along trees.
#pragma once

#include <chrono>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "tieroff/sharding/dual.hpp"
#include "tieroff/sharding/state.hpp"

namespace tieroff::sharding {

// What threads of one search tell each other.
class Board {
 public:
  Board(const Reduced& reduced, std::chrono::steady_clock::time_point deadline);

  void offer(double cost, const std::vector<int>& choice);
  void raise_bound(double bound, const Dual& dual, const std::vector<double>& prices);
  void prove() { raise(best_cost()); }

  bool is_over() const;  // the time, or the search: the bound is met
  double best_cost() const;
  double bound() const;
  bool has_best() const { return best_cost() < kForbidden; }
  std::vector<int> best_choice() const;
  std::unique_ptr<Dual> latest_dual(std::vector<double>& prices) const;
  std::int64_t count_start();
  std::int64_t start_count() const;

 private:
  void raise(double bound);

  mutable std::mutex mutex_;
  std::chrono::steady_clock::time_point deadline_;
  double best_cost_ = std::numeric_limits<double>::infinity();
  double bound_ = -std::numeric_limits<double>::infinity();
  std::vector<int> best_choice_;
  Dual dual_;
  std::vector<double> prices_;
  std::int64_t start_count_ = 0;
};

class Search {
 public:
  Search(const Reduced& reduced, Board& board, std::uint64_t seed);

  void run();

 private:
  struct Found {
    double cost = std::numeric_limits<double>::infinity();
    std::vector<int> choice;
  };

  void start_fresh(std::int64_t number);
  void start_from_best();
  void sweep();                // chooses anew along trees that cover every free node once on average, by priced costs
  Found repair(int patience);  // moves prices until memory holds, and further while it gets better
  void improve(Found& found);  // along trees, within memory
  bool try_tree(double threshold, double noise, double& cost);
  double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }

  const Reduced& reduced_;
  Board& board_;
  std::mt19937_64 random_;
  std::vector<int> free_nodes_;
  State state_;
  Tree tree_;
  std::unique_ptr<Dual> dual_;
  std::vector<double> prices_;
  std::vector<double> cost_;  // of the tree's nodes, with a share of their prices
};

}  // namespace tieroff::sharding
