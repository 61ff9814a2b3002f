#include "tieroff/sharding/search.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace tieroff::sharding {

namespace {

constexpr int kTree = 60;           // nodes of a usual tree; a wide one has eight times as many
constexpr int kFreshStarts = 3;     // before any start from the best assignment
constexpr double kWorseMax = 1.02;  // a repaired start that is worse by more is not improved
constexpr std::array<double, 6> kPriceShares = {0, 0.5, 1, 2, 4, 16};

std::vector<int> free_nodes(const Reduced& reduced) {
  std::vector<int> nodes;
  for (int node = 0; node < reduced.node_count(); ++node)
    if (reduced.strategies_of(node) > 1) nodes.push_back(node);
  return nodes;
}

}  // namespace

Board::Board(const Reduced& reduced, std::chrono::steady_clock::time_point deadline)
    : deadline_(deadline), dual_(reduced), prices_(reduced.room.size(), 0.0) {}

void Board::offer(double cost, const std::vector<int>& choice) {
  const std::lock_guard lock(mutex_);
  if (cost >= best_cost_ || cost >= kForbidden) return;
  best_cost_ = cost;
  best_choice_ = choice;
}

void Board::raise(double bound) {
  const std::lock_guard lock(mutex_);
  bound_ = std::max(bound_, bound);
}

void Board::raise_bound(double bound, const Dual& dual, const std::vector<double>& prices) {
  const std::lock_guard lock(mutex_);
  bound_ = std::max(bound_, bound);
  dual_.set_messages(dual);
  prices_ = prices;
}

bool Board::is_over() const {
  if (std::chrono::steady_clock::now() >= deadline_) return true;
  const std::lock_guard lock(mutex_);
  return best_cost_ - bound_ < 1;  // costs are whole numbers
}

double Board::best_cost() const {
  const std::lock_guard lock(mutex_);
  return best_cost_;
}

double Board::bound() const {
  const std::lock_guard lock(mutex_);
  return bound_;
}

std::vector<int> Board::best_choice() const {
  const std::lock_guard lock(mutex_);
  return best_choice_;
}

std::unique_ptr<Dual> Board::latest_dual(std::vector<double>& prices) const {
  const std::lock_guard lock(mutex_);
  prices = prices_;
  return std::make_unique<Dual>(dual_);
}

std::int64_t Board::count_start() {
  const std::lock_guard lock(mutex_);
  return start_count_++;
}

std::int64_t Board::start_count() const {
  const std::lock_guard lock(mutex_);
  return start_count_;
}

Search::Search(const Reduced& reduced, Board& board, std::uint64_t seed)
    : reduced_(reduced),
      board_(board),
      random_(seed),
      free_nodes_(free_nodes(reduced)),
      state_(reduced),
      tree_(reduced, free_nodes_, random_),
      cost_(reduced.cost) {}

void Search::start_fresh(std::int64_t number) {
  dual_->pass(number % 2 != 0);
  const double scale = std::abs(board_.bound());
  const double noise = number < 2 || !std::isfinite(scale) ? 0 : 1e-4 * scale * static_cast<double>(random_() % 3);
  state_.assign(dual_->round(number % 2 == 0, noise, random_));
}

void Search::start_from_best() {
  state_.assign(board_.best_choice());
  const double noise = std::abs(board_.best_cost()) * 1e-3 * uniform();
  for (std::uint64_t count = 1 + random_() % 5; count > 0; --count) {
    tree_.grow(2 + static_cast<int>(random_() % (4 * kTree)));
    tree_.optimize(state_, dual_->priced_cost(), noise);
    for (std::size_t i = 0; i < tree_.nodes().size(); ++i) state_.move(tree_.nodes()[i], tree_.best()[i]);
  }
  state_.assign(state_.choice());  // without the rounding that many moves leave
}

void Search::sweep() {
  for (std::size_t visited = 0; visited < free_nodes_.size(); visited += tree_.nodes().size()) {
    tree_.grow(8 * kTree);
    tree_.optimize(state_, dual_->priced_cost(), 0);
    for (std::size_t i = 0; i < tree_.nodes().size(); ++i)
      if (tree_.best()[i] != state_.choice()[tree_.nodes()[i]]) state_.move(tree_.nodes()[i], tree_.best()[i]);
  }
}

Search::Found Search::repair(int patience) {
  Found found;
  std::vector<double> price = dual_->prices();
  double room = 1;
  for (const double bytes : reduced_.room) room = std::max(room, bytes);
  const double scale = std::abs(board_.bound()) / room;  // the cost that a byte is worth, roughly
  double share = 0.01;                                   // of the sum of prices, that one step adds or takes
  for (int idle = 0; idle < patience && !board_.is_over(); ++idle) {
    state_.assign(state_.choice());
    const double most = state_.most_over();
    const double cost = state_.cost();
    if (most <= 0 && cost < found.cost) {
      if (cost < found.cost * (1 - 1e-6)) idle = 0;
      found = {cost, state_.choice()};
      board_.offer(cost, found.choice);
    }
    if (most <= 0) {
      for (double& value : price) value *= 1 - share;
    } else {
      if (found.choice.empty()) idle = 0, share *= 1.01;  // harder and harder until something fits
      double shares = 0;
      for (std::size_t t = 0; t < price.size(); ++t) shares += std::max(0.0, state_.over(t)) / most;
      const double sum = std::accumulate(price.begin(), price.end(), 0.0);
      const double step = std::max(share * sum, 1e-4 * scale) / shares / most;
      for (std::size_t t = 0; t < price.size(); ++t) price[t] += step * std::max(0.0, state_.over(t));
    }
    dual_->set_prices(price);
    sweep();
  }
  return found;
}

// One tree: its best strategies by costs with as little of the prices as memory allows.
bool Search::try_tree(double threshold, double noise, double& cost) {
  tree_.grow(2 + static_cast<int>(random_() % (random_() % 4 == 0 ? 8 * kTree : kTree)));
  for (std::size_t share = random_() % 3; share < kPriceShares.size(); ++share) {
    for (const int node : tree_.nodes())
      for (std::int64_t k = reduced_.first_strategy[node]; k < reduced_.first_strategy[node + 1]; ++k)
        cost_[k] = reduced_.cost[k] + kPriceShares[share] * (dual_->priced_cost()[k] - reduced_.cost[k]);
    tree_.optimize(state_, cost_, noise);
    if (!tree_.is_changed(state_)) return false;
    const double change = tree_.change(state_);
    if (change >= threshold) return false;  // more of the prices only costs more
    if (!state_.move_within_room(tree_.nodes(), tree_.best())) continue;
    cost += change;
    return true;
  }
  return false;
}

void Search::improve(Found& found) {
  state_.assign(found.choice);
  double cost = found.cost;
  const int patience = 400 + static_cast<int>(free_nodes_.size()) / 2;
  const double hottest = found.cost * std::array{0.0, 2e-5, 1e-4}[random_() % 3];
  for (int idle = 0; idle < patience && (idle % 16 != 0 || !board_.is_over()); ++idle) {
    const double heat = hottest * (1 - static_cast<double>(idle) / patience);
    // Metropolis' rule, and noise in every second tree so that others than the best are tried.
    const double threshold = heat > 0 ? -heat * std::log(1 - uniform()) : 0;
    if (!try_tree(threshold, random_() & 1 ? 2 * heat : 0, cost) || cost >= found.cost * (1 - 1e-9)) continue;
    found = {cost, state_.choice()};
    idle = 0;
  }
  state_.assign(found.choice);  // sums of changes are rounded: count once more
  if (state_.most_over() <= 0) board_.offer(state_.cost(), found.choice);
}

void Search::run() {
  while (!board_.is_over()) {
    dual_ = board_.latest_dual(prices_);
    const std::int64_t number = board_.count_start();
    const double scale = number == 0 ? 1 : 0.7 + 0.6 * uniform();
    std::vector<double> price = prices_;
    for (double& value : price) value *= scale;
    dual_->set_prices(price);
    const bool is_fresh = number < kFreshStarts || !board_.has_best() || random_() % 4 == 0;
    if (is_fresh)
      start_fresh(number);
    else
      start_from_best();
    Found found = repair(is_fresh ? 100 : 4);
    if (!found.choice.empty() && found.cost <= kWorseMax * board_.best_cost()) improve(found);
  }
}

}  // namespace tieroff::sharding
