#include "tieroff/layout/layout.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <limits>
#include <random>

#include "tieroff/layout/layout_branch.hpp"
#include "tieroff/layout/layout_columns.hpp"
#include "tieroff/layout/layout_fit.hpp"

namespace tieroff::layout {

namespace {

constexpr std::size_t kBranchBlocksMax = 2000;   // the exact search holds pairs of blocks
constexpr std::size_t kBestFitBlocksMax = 5000;  // looking at every free range takes long
constexpr std::array kExponents{0.0, 0.2, 0.3, 0.4, 0.6, 1.0};
constexpr double kStartExponent = 0.4;
constexpr double kExponentStep = 0.2;
constexpr std::int64_t kNothing = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kShare = 4;  // of the node budget left, for one capacity
constexpr std::size_t kRoundsBeforeBranching = 20;

class Packing {
 public:
  Packing(const Problem& problem, const Options& options)
      : options_(options), grid_(make_grid(problem)), room_(grid_.column_count), start_(Clock::now()) {
    result_.bound = bound(grid_);
    target_ = std::max(result_.bound, options.capacity);
  }

  Result run() {
    if (grid_.blocks.empty()) return result_;
    const bool is_hopeless = options_.capacity >= 0 && options_.capacity < result_.bound;
    fit_first();
    const bool is_small = grid_.blocks.size() <= kBranchBlocksMax;
    if (!is_done() && !is_hopeless) improve(is_small ? kRoundsBeforeBranching : grid_.blocks.size());
    if (!is_done() && !is_hopeless && is_small) options_.capacity >= 0 ? meet() : shrink();
    for (const std::int64_t offset : best_) result_.offsets.push_back(offset * grid_.alignment);
    return result_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  bool is_done() const { return !best_.empty() && result_.footprint <= target_; }
  bool is_late() const {
    return options_.time_limit_ns > 0 && Clock::now() - start_ > std::chrono::nanoseconds(options_.time_limit_ns);
  }

  void offer(std::vector<std::int64_t> offsets) {
    const std::int64_t footprint = grid_.footprint(offsets);
    if (!best_.empty() && footprint >= result_.footprint) return;
    best_ = std::move(offsets);
    result_.footprint = footprint;
  }

  void fit(const Order& order) {
    for (const bool is_best_fit : {false, true}) {
      if (is_done() || (is_best_fit && grid_.blocks.size() > kBestFitBlocksMax)) continue;
      offer(place(grid_, room_, order, is_best_fit, result_.step_count));
    }
  }

  void fit_first() {
    for (const Order& order : orders_by_crowd(grid_))
      if (best_.empty() || (!is_done() && !is_late())) fit(order);
    const std::vector<double> lifts(grid_.blocks.size(), 0);
    for (const double exponent : kExponents)
      if (!is_done() && !is_late()) fit(order_by_size(grid_, exponent, lifts));
  }

  // Around the best mixture of size and length so far, and with what ended above the target lifted further to the front.
  void improve(std::size_t round_count) {
    std::mt19937_64 random(options_.seed);
    const auto share = [&] { return static_cast<double>(random() >> 11) * 0x1p-53; };
    const std::int64_t stop = result_.step_count + options_.fit_budget;
    std::vector<double> best_lifts(grid_.blocks.size(), 0);
    double best_exponent = kStartExponent;
    std::int64_t best_footprint = kNothing;
    std::vector<std::int64_t> offsets = best_;
    std::vector<double> lifts = best_lifts;
    double exponent = best_exponent;
    for (std::size_t round = 0; round < round_count && result_.step_count < stop && !is_done() && !is_late(); ++round) {
      offsets = place(grid_, room_, order_by_size(grid_, exponent, lifts), false, result_.step_count);
      const std::int64_t footprint = grid_.footprint(offsets);
      if (footprint < best_footprint) {
        best_footprint = footprint;
        best_lifts = lifts;
        best_exponent = exponent;
      }
      offer(offsets);
      lifts = best_lifts;
      exponent = std::max(0.0, best_exponent + (share() - 0.5) * kExponentStep);
      for (std::size_t i = 0; i < lifts.size(); ++i)
        if (grid_.end(i, offsets[i]) > target_) lifts[i] += share();
    }
  }

  Outcome try_branch(std::int64_t capacity, std::int64_t budget) {
    const std::function<bool()> late = [this] { return is_late(); };
    Limits limits{options_, result_.node_count + budget, late, result_.node_count};
    Branching found = branch(grid_, capacity, limits);
    if (found.outcome == Outcome::kFound) offer(std::move(found.offsets));
    return found.outcome;
  }

  void meet() {
    if (try_branch(target_, options_.node_budget) == Outcome::kImpossible) result_.bound = target_ + 1;
  }

  // The bound first, then half way between what is out of reach and what is known.
  void shrink() {
    std::int64_t low = result_.bound;
    bool is_proven = true;
    const std::int64_t stop = options_.node_budget;
    for (std::int64_t capacity = low; low < result_.footprint && result_.node_count < stop && !is_late();
         capacity = low + (result_.footprint - 1 - low) / 2) {
      const std::int64_t budget = std::max<std::int64_t>(1, (stop - result_.node_count) / kShare);
      const Outcome outcome = try_branch(capacity, budget);
      if (outcome == Outcome::kFound) continue;
      low = capacity + 1;
      is_proven = is_proven && outcome == Outcome::kImpossible;
      if (is_proven) result_.bound = low;
    }
  }

  const Options& options_;
  Grid grid_;
  Room room_;
  Clock::time_point start_;
  std::int64_t target_ = 0;
  std::vector<std::int64_t> best_;  // in units
  Result result_;
};

}  // namespace

Result search(const Problem& problem, const Options& options) { return Packing(problem, options).run(); }

}  // namespace tieroff::layout
