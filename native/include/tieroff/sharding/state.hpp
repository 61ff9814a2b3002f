// An assignment of the reduced problem, what it holds at each time, and its best change along a tree of nodes.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "tieroff/sharding/solve.hpp"

namespace tieroff::sharding {

class State {
 public:
  explicit State(const Reduced& reduced);

  void assign(const std::vector<int>& choice);
  void move(int node, int strategy);
  // Moves nodes[i] to strategies[i] if memory allows it, which held before; else leaves all as it was.
  bool move_within_room(std::span<const int> nodes, std::span<const int> strategies);

  double cost() const;       // of nodes and edges, without prices
  double most_over() const;  // bytes beyond the room at the worst time; 0 when everything fits
  double over(std::size_t time) const { return held_[time] - reduced_.room[time]; }
  const std::vector<int>& choice() const { return choice_; }
  const Reduced& reduced() const { return reduced_; }

 private:
  const Reduced& reduced_;
  std::vector<int> choice_;
  std::vector<double> held_;
};

// Nodes that induce a tree, chosen for together with all others as they are.
class Tree {
 public:
  Tree(const Reduced& reduced, std::span<const int> free_nodes, std::mt19937_64& random);

  // Grows a tree of up to `size` nodes from a random free node.
  void grow(int size);
  // Finds the tree's best strategies by `cost` of nodes (by strategy) and edges, with up to `noise` added.
  void optimize(const State& state, std::span<const double> cost, double noise);
  // What `best()` changes in the cost of nodes and edges, without prices.
  double change(const State& state) const;

  std::span<const int> nodes() const { return nodes_; }
  std::span<const int> best() const { return best_; }
  bool is_changed(const State& state) const;

 private:
  struct Branch {
    int node, parent;
    std::int64_t place;  // among the parent's neighbours
  };

  void take(const Branch& branch);
  void add_outside(const State& state, int node, double* value) const;
  double part_cost(const std::vector<int>& choice, int node) const;

  const Reduced& reduced_;
  std::span<const int> free_nodes_;
  std::mt19937_64& random_;
  std::vector<int> nodes_, parents_, best_;
  std::vector<std::int64_t> places_;
  std::vector<Branch> open_;
  std::vector<int> touched_, touch_count_;
  std::vector<char> is_inside_;
  std::vector<double> values_;
  std::vector<std::int64_t> first_value_, first_answer_;
  std::vector<int> answers_;
  mutable std::vector<int> trial_;
};

}  // namespace tieroff::sharding
