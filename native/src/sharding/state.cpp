#include "tieroff/sharding/state.hpp"

#include <algorithm>

namespace tieroff::sharding {

State::State(const Reduced& reduced) : reduced_(reduced) { assign(std::vector<int>(reduced.node_count(), 0)); }

void State::assign(const std::vector<int>& choice) {
  choice_ = choice;
  held_.assign(reduced_.room.size() + 1, 0.0);
  for (int node = 0; node < reduced_.node_count(); ++node)
    for (std::int64_t h = reduced_.first_held[node]; h < reduced_.first_held[node + 1]; ++h) {
      const double bytes = reduced_.held_bytes[reduced_.held[h].value + choice_[node]];
      held_[reduced_.held[h].start] += bytes;
      held_[reduced_.held[h].stop] -= bytes;
    }
  for (std::size_t t = 1; t < held_.size(); ++t) held_[t] += held_[t - 1];
  held_.pop_back();
}

void State::move(int node, int strategy) {
  for (std::int64_t h = reduced_.first_held[node]; h < reduced_.first_held[node + 1]; ++h) {
    const Held& held = reduced_.held[h];
    const double more = reduced_.held_bytes[held.value + strategy] - reduced_.held_bytes[held.value + choice_[node]];
    if (more == 0) continue;
    for (int t = held.start; t < held.stop; ++t) held_[t] += more;
  }
  choice_[node] = strategy;
}

bool State::move_within_room(std::span<const int> nodes, std::span<const int> strategies) {
  std::vector<int> before;
  before.reserve(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    before.push_back(choice_[nodes[i]]);
    if (strategies[i] != before[i]) move(nodes[i], strategies[i]);
  }
  const auto fits = [&](int node, int old) {
    for (std::int64_t h = reduced_.first_held[node]; h < reduced_.first_held[node + 1]; ++h) {
      const Held& held = reduced_.held[h];
      if (reduced_.held_bytes[held.value + choice_[node]] <= reduced_.held_bytes[held.value + old]) continue;
      for (int t = held.start; t < held.stop; ++t)
        if (held_[t] > reduced_.room[t]) return false;
    }
    return true;
  };
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (choice_[nodes[i]] == before[i] || fits(nodes[i], before[i])) continue;
    for (std::size_t j = 0; j < nodes.size(); ++j)
      if (choice_[nodes[j]] != before[j]) move(nodes[j], before[j]);
    return false;
  }
  return true;
}

double State::cost() const {
  double sum = 0;
  for (int node = 0; node < reduced_.node_count(); ++node) sum += reduced_.cost[reduced_.first_strategy[node] + choice_[node]];
  for (const Edge& edge : reduced_.edges)
    sum += reduced_.entry[edge.entry + std::int64_t(choice_[edge.source]) * reduced_.strategies_of(edge.target) +
                          choice_[edge.target]];
  return sum;
}

double State::most_over() const {
  double most = 0;
  for (std::size_t t = 0; t < held_.size(); ++t) most = std::max(most, over(t));
  return most;
}

}  // namespace tieroff::sharding
