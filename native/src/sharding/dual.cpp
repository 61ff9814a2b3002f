#include "tieroff/sharding/dual.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tieroff::sharding {

Dual::Dual(const Reduced& reduced)
    : reduced_(reduced),
      price_(reduced.room.size(), 0.0),
      priced_cost_(reduced.cost),
      share_(reduced.node_count()),
      first_message_(reduced.neighbours.size()),
      mirror_(reduced.neighbours.size()),
      choice_(reduced.node_count(), 0) {
  std::int64_t count = 0;
  std::size_t most = 0;
  std::vector<std::int64_t> seen(reduced.edges.size(), -1);
  for (int node = 0; node < reduced.node_count(); ++node) {
    int before = 0, behind = 0;
    for (std::int64_t j = reduced.first_neighbour[node]; j < reduced.first_neighbour[node + 1]; ++j) {
      first_message_[j] = count;
      count += reduced.strategies_of(node);
      (reduced.neighbours[j].node < node ? before : behind) += 1;
      std::int64_t& other = seen[reduced.neighbours[j].edge];
      if (other >= 0) mirror_[j] = other, mirror_[other] = j;
      other = j;
    }
    share_[node] = 1.0 / std::max({1, before, behind});
    most = std::max(most, static_cast<std::size_t>(reduced.strategies_of(node)));
  }
  messages_.assign(count, 0.0);
  sum_.resize(most);
}

void Dual::set_prices(const std::vector<double>& price) {
  price_ = price;
  std::vector<double> until(price.size() + 1, 0.0);
  constant_ = 0;
  for (std::size_t t = 0; t < price.size(); ++t) {
    until[t + 1] = until[t] + price[t];
    constant_ -= price[t] * reduced_.room[t];
  }
  priced_cost_ = reduced_.cost;
  for (int node = 0; node < reduced_.node_count(); ++node) {
    double* cost = &priced_cost_[reduced_.first_strategy[node]];
    for (std::int64_t h = reduced_.first_held[node]; h < reduced_.first_held[node + 1]; ++h) {
      const Held& held = reduced_.held[h];
      const double sum = until[held.stop] - until[held.start];
      if (sum > 0)
        for (int k = 0; k < reduced_.strategies_of(node); ++k) cost[k] += sum * reduced_.held_bytes[held.value + k];
    }
  }
}

// The message at `place` becomes the least that the edge costs by the node's strategy, less what its other end took.
void Dual::receive(int node, std::int64_t place) {
  const Neighbour& neighbour = reduced_.neighbours[place];
  const int count = reduced_.strategies_of(node), others = reduced_.strategies_of(neighbour.node);
  double* message = &messages_[first_message_[place]];
  const double* taken = &messages_[first_message_[mirror_[place]]];
  const double* costs = costs_of(neighbour);
  if (neighbour.is_source) {
    std::fill_n(message, count, std::numeric_limits<double>::infinity());
    for (int j = 0; j < others; ++j, costs += count)
      for (int k = 0; k < count; ++k) message[k] = std::min(message[k], costs[k] - taken[j]);
    return;
  }
  for (int k = 0; k < count; ++k, costs += others) {
    double least = costs[0] - taken[0];
    for (int j = 1; j < others; ++j) least = std::min(least, costs[j] - taken[j]);
    message[k] = least;
  }
}

double Dual::pass(bool is_forward) {
  double bound = constant_;
  const int nodes = reduced_.node_count();
  for (int i = 0; i < nodes; ++i) {
    const int node = is_forward ? i : nodes - 1 - i, count = reduced_.strategies_of(node);
    const std::int64_t begin = reduced_.first_neighbour[node], end = reduced_.first_neighbour[node + 1];
    const auto is_behind = [&](std::int64_t j) { return (reduced_.neighbours[j].node > node) == is_forward; };
    std::copy_n(&priced_cost_[reduced_.first_strategy[node]], count, sum_.data());
    int behind = 0;
    for (std::int64_t j = begin; j < end; ++j) {
      if (is_behind(j))
        ++behind;
      else
        receive(node, j);
      for (int k = 0; k < count; ++k) sum_[k] += messages_[first_message_[j] + k];
    }
    choice_[node] = static_cast<int>(std::min_element(sum_.begin(), sum_.begin() + count) - sum_.begin());
    for (std::int64_t j = begin; j < end; ++j)
      if (is_behind(j))
        for (int k = 0; k < count; ++k) messages_[first_message_[j] + k] -= share_[node] * sum_[k];
    // After the pass an edge's far end has taken all of it, and a node keeps what it did not give to edges behind it.
    bound += (1 - behind * share_[node]) * sum_[choice_[node]];
  }
  return bound;
}

void Dual::excess(std::vector<double>& excess) const {
  excess.assign(reduced_.room.size() + 1, 0.0);
  for (int node = 0; node < reduced_.node_count(); ++node)
    for (std::int64_t h = reduced_.first_held[node]; h < reduced_.first_held[node + 1]; ++h) {
      const double bytes = reduced_.held_bytes[reduced_.held[h].value + choice_[node]];
      excess[reduced_.held[h].start] += bytes;
      excess[reduced_.held[h].stop] -= bytes;
    }
  double sum = 0;
  for (std::size_t t = 0; t < reduced_.room.size(); ++t) {
    sum += excess[t];
    excess[t] = sum - reduced_.room[t];
  }
  excess.pop_back();
}

std::vector<int> Dual::round(bool is_forward, double noise, std::mt19937_64& random) const {
  const int nodes = reduced_.node_count();
  std::vector<int> chosen(nodes, 0);
  std::vector<double> sum;
  std::uniform_real_distribution<double> extra(0, std::max(noise, 1e-300));
  for (int i = 0; i < nodes; ++i) {
    const int node = is_forward ? i : nodes - 1 - i, count = reduced_.strategies_of(node);
    sum.assign(&priced_cost_[reduced_.first_strategy[node]], &priced_cost_[reduced_.first_strategy[node]] + count);
    for (std::int64_t j = reduced_.first_neighbour[node]; j < reduced_.first_neighbour[node + 1]; ++j) {
      const Neighbour& neighbour = reduced_.neighbours[j];
      const int others = reduced_.strategies_of(neighbour.node), theirs = chosen[neighbour.node];
      const double* costs = costs_of(neighbour);
      for (int k = 0; k < count; ++k) {
        if ((neighbour.node > node) == is_forward)
          sum[k] += messages_[first_message_[j] + k];
        else
          sum[k] += neighbour.is_source ? costs[std::size_t(theirs) * count + k] : costs[std::size_t(k) * others + theirs];
      }
    }
    if (noise > 0)
      for (double& value : sum) value += extra(random);
    chosen[node] = static_cast<int>(std::min_element(sum.begin(), sum.end()) - sum.begin());
  }
  return chosen;
}

namespace {

constexpr int kIdleMax = 60;        // steps without progress until they become shorter
constexpr double kProgress = 1e-5;  // of the bound: what counts as progress
constexpr double kStepShareMin = 1e-7;
constexpr double kMemory = 0.7;  // of the last direction in the next one

}  // namespace

Ascent::Ascent(const Reduced& reduced)
    : dual_(reduced),
      bound_(-std::numeric_limits<double>::infinity()),
      best_prices_(reduced.room.size(), 0.0),
      direction_(reduced.room.size(), 0.0) {}

bool Ascent::step(double goal) {
  double bound = dual_.pass(true);
  bound = std::max(bound, dual_.pass(false));
  if (bound > bound_) {
    if (bound > bound_ + kProgress * std::abs(bound)) idle_count_ = 0;
    bound_ = bound;
    best_prices_ = dual_.prices();
  }
  if (++idle_count_ > kIdleMax) {
    step_share_ *= 0.7;
    idle_count_ = 0;
  }
  dual_.excess(excess_);
  std::vector<double> price = dual_.prices();
  double norm = 0;
  for (std::size_t t = 0; t < price.size(); ++t) {
    direction_[t] = kMemory * direction_[t] + (1 - kMemory) * excess_[t];
    if (price[t] > 0 || direction_[t] > 0) norm += direction_[t] * direction_[t];
  }
  const double gap = std::isfinite(goal) ? goal - bound : 0.05 * std::abs(bound_) + 1;
  if (norm > 0 && gap > 0)
    for (std::size_t t = 0; t < price.size(); ++t)
      price[t] = std::max(0.0, price[t] + step_share_ * gap / norm * direction_[t]);
  dual_.set_prices(price);
  return step_share_ > kStepShareMin;
}

}  // namespace tieroff::sharding
