#include <algorithm>
#include <limits>

#include "tieroff/sharding/state.hpp"

namespace tieroff::sharding {

Tree::Tree(const Reduced& reduced, std::span<const int> free_nodes, std::mt19937_64& random)
    : reduced_(reduced),
      free_nodes_(free_nodes),
      random_(random),
      touch_count_(reduced.node_count(), 0),
      is_inside_(reduced.node_count(), 0),
      trial_(reduced.node_count(), 0) {}

void Tree::take(const Branch& branch) {
  is_inside_[branch.node] = 1;
  const int index = static_cast<int>(nodes_.size());
  nodes_.push_back(branch.node);
  parents_.push_back(branch.parent);
  places_.push_back(branch.place);
  for (std::int64_t j = reduced_.first_neighbour[branch.node]; j < reduced_.first_neighbour[branch.node + 1]; ++j) {
    const int other = reduced_.neighbours[j].node;
    if (touch_count_[other]++ == 0) touched_.push_back(other);
    if (!is_inside_[other] && touch_count_[other] == 1) open_.push_back({other, index, j});
  }
}

void Tree::grow(int size) {
  for (const int node : nodes_) is_inside_[node] = 0;
  nodes_.clear();
  parents_.clear();
  places_.clear();
  open_.clear();
  take({free_nodes_[random_() % free_nodes_.size()], -1, -1});
  while (!open_.empty() && static_cast<int>(nodes_.size()) < size) {
    // Half the time the newest, for long branches, else any, for wide ones.
    const std::size_t i = random_() & 1 ? random_() % open_.size() : open_.size() - 1;
    const Branch branch = open_[i];
    open_[i] = open_.back();
    open_.pop_back();
    // A second neighbour in the tree would close a cycle.
    if (!is_inside_[branch.node] && touch_count_[branch.node] == 1) take(branch);
  }
  for (const int node : touched_) touch_count_[node] = 0;
  touched_.clear();
}

void Tree::add_outside(const State& state, int node, double* value) const {
  const int count = reduced_.strategies_of(node);
  for (std::int64_t j = reduced_.first_neighbour[node]; j < reduced_.first_neighbour[node + 1]; ++j) {
    const Neighbour& neighbour = reduced_.neighbours[j];
    if (is_inside_[neighbour.node]) continue;
    const double* costs = &reduced_.entry[reduced_.edges[neighbour.edge].entry];
    const int theirs = state.choice()[neighbour.node];
    if (neighbour.is_source) {
      costs += std::int64_t(theirs) * count;
      for (int k = 0; k < count; ++k) value[k] += costs[k];
    } else {
      const std::size_t others = reduced_.strategies_of(neighbour.node);
      for (int k = 0; k < count; ++k) value[k] += costs[k * others + theirs];
    }
  }
}

void Tree::optimize(const State& state, std::span<const double> cost, double noise) {
  const std::size_t size = nodes_.size();
  first_value_.resize(size + 1);
  first_answer_.resize(size);
  std::int64_t count = 0;
  for (std::size_t i = 0; i < size; ++i) first_value_[i] = count, count += reduced_.strategies_of(nodes_[i]);
  first_value_[size] = count;
  values_.resize(count);
  answers_.clear();
  std::uniform_real_distribution<double> extra(0, std::max(noise, std::numeric_limits<double>::min()));
  for (std::size_t i = 0; i < size; ++i) {
    double* value = &values_[first_value_[i]];
    std::copy_n(&cost[reduced_.first_strategy[nodes_[i]]], reduced_.strategies_of(nodes_[i]), value);
    if (noise > 0)
      for (int k = 0; k < reduced_.strategies_of(nodes_[i]); ++k) value[k] += extra(random_);
    add_outside(state, nodes_[i], value);
  }
  for (std::size_t i = size; i-- > 1;) {  // leaves to root: children come behind their parents
    const int own = reduced_.strategies_of(nodes_[i]), above = reduced_.strategies_of(nodes_[parents_[i]]);
    const Neighbour& neighbour = reduced_.neighbours[places_[i]];
    const double *costs = &reduced_.entry[reduced_.edges[neighbour.edge].entry], *value = &values_[first_value_[i]];
    double* to = &values_[first_value_[parents_[i]]];
    first_answer_[i] = static_cast<std::int64_t>(answers_.size());
    for (int a = 0; a < above; ++a) {
      double least = std::numeric_limits<double>::infinity();
      int answer = 0;
      for (int k = 0; k < own; ++k) {
        const double sum = value[k] + costs[neighbour.is_source ? std::size_t(k) * above + a : std::size_t(a) * own + k];
        if (sum < least) least = sum, answer = k;
      }
      to[a] += least;
      answers_.push_back(answer);
    }
  }
  best_.resize(size);
  const auto root_end = values_.begin() + first_value_[1];
  best_[0] = static_cast<int>(std::min_element(values_.begin(), root_end) - values_.begin());
  for (std::size_t i = 1; i < size; ++i) best_[i] = answers_[first_answer_[i] + best_[parents_[i]]];
}

double Tree::part_cost(const std::vector<int>& choice, int node) const {
  double sum = reduced_.cost[reduced_.first_strategy[node] + choice[node]];
  for (std::int64_t j = reduced_.first_neighbour[node]; j < reduced_.first_neighbour[node + 1]; ++j) {
    const Neighbour& neighbour = reduced_.neighbours[j];
    if (is_inside_[neighbour.node] && neighbour.node < node) continue;
    const Edge& edge = reduced_.edges[neighbour.edge];
    sum +=
        reduced_
            .entry[edge.entry + std::int64_t(choice[edge.source]) * reduced_.strategies_of(edge.target) + choice[edge.target]];
  }
  return sum;
}

double Tree::change(const State& state) const {
  double before = 0, behind = 0;
  for (const int node : nodes_) {
    before += part_cost(state.choice(), node);
    trial_[node] = state.choice()[node];
    for (std::int64_t j = reduced_.first_neighbour[node]; j < reduced_.first_neighbour[node + 1]; ++j)
      trial_[reduced_.neighbours[j].node] = state.choice()[reduced_.neighbours[j].node];
  }
  for (std::size_t i = 0; i < nodes_.size(); ++i) trial_[nodes_[i]] = best_[i];
  for (const int node : nodes_) behind += part_cost(trial_, node);
  return behind - before;
}

bool Tree::is_changed(const State& state) const {
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    if (best_[i] != state.choice()[nodes_[i]]) return true;
  return false;
}

}  // namespace tieroff::sharding
