// Lower bounds by message passing and prices of memory.
//
// Every edge passes part of its cost to its ends as messages, and every byte at a time has a price at or above zero,
// paid on what is held beyond the room. For any messages and prices, the sum of each node's least cost and each edge's
// least cost that is left is a lower bound. Messages are improved node by node along an order, forth and back
// (sequential tree-reweighted message passing: Kolmogorov, IEEE PAMI 28(10), 2006), prices by subgradients with Polyak's
// step.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "tieroff/sharding/solve.hpp"

namespace tieroff::sharding {

class Dual {
 public:
  explicit Dual(const Reduced& reduced);

  // One pass over all nodes; returns the bound of the messages that it leaves. `choice()` is each node's best then.
  double pass(bool is_forward);

  void set_prices(const std::vector<double>& price);

  // What is held beyond the room at each time by the last pass's choices: a subgradient of the bound by the prices.
  void excess(std::vector<double>& excess) const;

  // Chooses node after node, knowing those before it, by messages for those behind it; `noise` is added to costs.
  std::vector<int> round(bool is_forward, double noise, std::mt19937_64& random) const;

  void set_messages(const Dual& other) { messages_ = other.messages_; }  // of the same problem

  const std::vector<double>& prices() const { return price_; }
  const std::vector<double>& priced_cost() const { return priced_cost_; }

 private:
  void receive(int node, std::int64_t place);
  const double* costs_of(const Neighbour& neighbour) const { return &reduced_.entry[reduced_.edges[neighbour.edge].entry]; }

  const Reduced& reduced_;
  std::vector<double> price_, priced_cost_, share_;
  double constant_ = 0;                      // of the bound: the price of all room
  std::vector<double> messages_;             // to a node, by its neighbours in order
  std::vector<std::int64_t> first_message_;  // by place in `neighbours`
  std::vector<std::int64_t> mirror_;         // the same edge's place at its other end
  std::vector<int> choice_;
  std::vector<double> sum_;
};

// Raises a bound step by step.
class Ascent {
 public:
  explicit Ascent(const Reduced& reduced);

  // One step towards `goal`, the least cost known; returns false when steps have become too small to matter.
  bool step(double goal);

  double bound() const { return bound_; }
  const std::vector<double>& best_prices() const { return best_prices_; }
  Dual& dual() { return dual_; }

 private:
  Dual dual_;
  double bound_;
  std::vector<double> best_prices_, direction_, excess_;
  double step_share_ = 1;
  int idle_count_ = 0;
};

}  // namespace tieroff::sharding
