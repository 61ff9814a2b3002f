#include "tieroff/search/improve.hpp"

#include "tieroff/search/improve_play.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <vector>

namespace tieroff {

namespace {

constexpr double kCalm = 1e-5;          // waits below this share of the step are not worth a change
constexpr double kFirstSlack = 5e-4;    // how much longer than the best a step may be at the beginning
constexpr std::int64_t kJobWork = 800;  // of playing a transfer, in units of about a ns
constexpr int kSpills = 4;              // runs that may leave the host for one that comes

// Small and the same on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t next() {
    std::uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
    z = (z ^ (z >> 30U)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27U)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31U);
  }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(next() % count); }
  double share() { return static_cast<double>(next() >> 11U) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

struct Candidate {
  double cost;
  std::size_t gap;
  std::int64_t position;
};

struct Change {
  std::size_t gap;
  std::int64_t away_start;
  std::int64_t away_stop;
  std::int64_t tier;
};

class Search {
 public:
  Search(std::span<std::int64_t> usage, const SearchGround& ground, const SearchGaps& gaps, std::uint64_t seed)
      : usage_(usage),
        ground_(ground),
        gaps_(gaps),
        n_(static_cast<std::int64_t>(usage.size())),
        random_(seed),
        player_(ground, gaps) {
    check();
    line_.assign(static_cast<std::size_t>(2 * n_ + 1), 0.0);
    for (std::size_t i = 0; i < static_cast<std::size_t>(2 * n_); ++i) {
      line_[i + 1] = line_[i] + static_cast<double>(ground.duration_ns[i % static_cast<std::size_t>(n_)]);
    }
  }

  Improved run(std::int64_t work) {
    const auto first = evaluate();
    work_ = 0;
    if (!first || *std::max_element(usage_.begin(), usage_.end()) > ground_.device_bytes) return {0.0, 0.0, 0};
    std::swap(now_, trial_);
    Score current = *first;
    Score best = current;
    std::vector<Change> back_to_best;  // what undoes all since the best
    std::int64_t node = 0;
    while (work_ < work && pick_stall()) {
      ++node;
      const double heat = kFirstSlack * (1.0 - static_cast<double>(work_) / static_cast<double>(work));
      changes_.clear();
      held_.clear();
      const auto found = propose() ? settle() : std::nullopt;
      if (found && (!current.beats(*found) || found->step_ns < best.step_ns * (1.0 + heat * random_.share()))) {
        current = *found;
        back_to_best.insert(back_to_best.end(), changes_.begin(), changes_.end());
        if (current.beats(best)) {
          best = current;
          back_to_best.clear();
        }
        std::swap(now_, trial_);
      } else {
        undo(changes_);
      }
    }
    undo(back_to_best);
    return {first->step_ns, best.step_ns, node};
  }

 private:
  void check() const {
    const std::size_t count = gaps_.piece.size();
    for (const std::size_t other :
         {gaps_.start.size(), gaps_.stop.size(), gaps_.size_bytes.size(), gaps_.is_last.size(), gaps_.copy_from.size(),
          gaps_.is_persistent.size(), gaps_.away_start.size(), gaps_.away_stop.size(), gaps_.tier.size()}) {
      if (other != count) throw std::invalid_argument("expected arrays of one length for the gaps");
    }
    if (n_ == 0 || ground_.duration_ns.size() != usage_.size() || ground_.granule_bytes < 1) {
      throw std::invalid_argument("expected a duration and a usage per op, and a granule of a byte or more");
    }
    for (std::size_t gap = 0; gap < count; ++gap) {
      const bool is_inside =
          !is_away(gap) || (gaps_.away_start[gap] >= gaps_.start[gap] && gaps_.away_stop[gap] <= gaps_.stop[gap] &&
                            (gaps_.tier[gap] == 0 || gaps_.tier[gap] == 1));
      if (gaps_.start[gap] < 0 || gaps_.start[gap] > n_ || gaps_.stop[gap] < gaps_.start[gap] ||
          gaps_.stop[gap] > gaps_.start[gap] + n_ || !is_inside || (gap > 0 && gaps_.piece[gap] < gaps_.piece[gap - 1])) {
        throw std::invalid_argument("expected gaps on the ring by piece, each with its window inside");
      }
    }
  }

  [[nodiscard]] bool is_away(std::size_t gap) const { return gaps_.away_start[gap] < gaps_.away_stop[gap]; }

  [[nodiscard]] std::size_t op_at(std::int64_t position) const { return static_cast<std::size_t>(((position % n_) + n_) % n_); }

  // Windows.

  void add(std::int64_t from, std::int64_t to, std::int64_t size_bytes) {
    for (std::int64_t position = from; position < to; ++position) {
      usage_[static_cast<std::size_t>(position >= n_ ? position - n_ : position)] += size_bytes;
    }
  }

  void set(std::size_t gap, std::int64_t away_start, std::int64_t away_stop, std::int64_t tier) {
    changes_.push_back({gap, gaps_.away_start[gap], gaps_.away_stop[gap], gaps_.tier[gap]});
    put({gap, away_start, away_stop, tier});
  }

  void put(const Change& to) {
    add(gaps_.away_start[to.gap], gaps_.away_stop[to.gap], gaps_.size_bytes[to.gap]);
    gaps_.away_start[to.gap] = to.away_start;
    gaps_.away_stop[to.gap] = to.away_stop;
    gaps_.tier[to.gap] = to.tier;
    add(to.away_start, to.away_stop, -gaps_.size_bytes[to.gap]);
    work_ += gaps_.stop[to.gap] - gaps_.start[to.gap];
  }

  void undo(const std::vector<Change>& changes) {
    for (auto change = changes.rbegin(); change != changes.rend(); ++change) put(*change);
  }

  void keep(std::size_t gap) {
    set(gap, gaps_.start[gap], gaps_.start[gap], -1);
    held_.push_back(gap);
  }

  [[nodiscard]] bool is_held(std::size_t gap) const { return std::find(held_.begin(), held_.end(), gap) != held_.end(); }

  [[nodiscard]] double span_ns(std::int64_t from, std::int64_t to) const {
    return line_[static_cast<std::size_t>(to)] - line_[static_cast<std::size_t>(from)];
  }

  // What to widen a window to an op costs; lower is better.
  [[nodiscard]] double widening_cost(std::size_t gap, std::int64_t position, std::size_t how) const {
    const double before = span_ns(gaps_.start[gap], position);
    const double after = span_ns(position, gaps_.stop[gap]);
    if (!is_away(gap)) return how == 0 ? -std::min(before, after) / 8.0 : -std::min(before, after);
    const bool is_before = position < gaps_.away_start[gap];
    const double grows = is_before ? span_ns(position, gaps_.away_start[gap]) : span_ns(gaps_.away_stop[gap], position + 1);
    if (how == 1) return grows / ((is_before ? before : after) + 1.0);
    return -(is_before ? before : after);
  }

  // Widens windows until every op fits; false when an op has nothing left that could go.
  bool cover() {
    const std::size_t how = random_.below(3);
    for (std::int64_t op = 0; op < n_; ++op) {
      if (usage_[static_cast<std::size_t>(op)] <= ground_.device_bytes) continue;
      find_candidates(op, how);
      for (const Candidate& next : candidates_) {
        if (usage_[static_cast<std::size_t>(op)] <= ground_.device_bytes) break;
        widen(next.gap, next.position, op);
      }
      if (usage_[static_cast<std::size_t>(op)] > ground_.device_bytes) return false;
    }
    return true;
  }

  void find_candidates(std::int64_t op, std::size_t how) {
    candidates_.clear();
    for (std::size_t gap = 0; gap < gaps_.start.size(); ++gap) {
      const std::int64_t position = op < gaps_.start[gap] ? op + n_ : op;
      if (position >= gaps_.stop[gap] || (position >= gaps_.away_start[gap] && position < gaps_.away_stop[gap])) continue;
      if (!is_held(gap)) candidates_.push_back({widening_cost(gap, position, how), gap, position});
    }
    std::sort(candidates_.begin(), candidates_.end(),
              [](const Candidate& a, const Candidate& b) { return a.cost != b.cost ? a.cost < b.cost : a.gap < b.gap; });
    work_ += static_cast<std::int64_t>(2 * gaps_.start.size() + 60 * candidates_.size());
  }

  // Over all ops from this one on that need it, so that few windows serve a long stretch.
  void widen(std::size_t gap, std::int64_t position, std::int64_t op) {
    std::int64_t end = position + 1;
    while (end < gaps_.stop[gap] && ++op < n_ && usage_[static_cast<std::size_t>(op)] > ground_.device_bytes) ++end;
    if (!is_away(gap)) {
      set(gap, position, end, free_tier());
    } else {
      set(gap, std::min(gaps_.away_start[gap], position), std::max(gaps_.away_stop[gap], end), gaps_.tier[gap]);
    }
  }

  [[nodiscard]] std::int64_t free_tier() {
    if (ground_.lower_bytes[0] == 0) return 1;
    return ground_.lower_bytes[1] > 0 && random_.below(3) == 0 ? 1 : 0;
  }

  // Shrinks the windows that were widened as far as there is room.
  void fill() {
    const std::size_t count = changes_.size();
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t gap = changes_[i].gap;
      if (!is_away(gap)) continue;
      std::int64_t from = gaps_.away_start[gap];
      std::int64_t to = gaps_.away_stop[gap];
      const std::int64_t size = gaps_.size_bytes[gap];
      const auto has_room = [&](std::int64_t position) { return usage_[op_at(position)] + size <= ground_.device_bytes; };
      if (!gaps_.is_last[gap]) {
        while (to > from && has_room(to - 1)) --to;
      }
      while (from < to && has_room(from)) ++from;
      if (from != gaps_.away_start[gap] || to != gaps_.away_stop[gap]) set(gap, from, to, gaps_.tier[gap]);
    }
  }

  std::optional<Score> evaluate() {
    const auto score = player_.play(trial_);
    work_ += kJobWork * static_cast<std::int64_t>(trial_.link.size());
    return score;
  }

  // Plays a change; where the host is short, runs that lie there go to the drive.
  std::optional<Score> settle() {
    if (!cover()) return std::nullopt;
    fill();
    for (int spill = 0; spill <= kSpills; ++spill) {
      const auto score = evaluate();
      if (score || player_.short_tier() == 1 || ground_.lower_bytes[1] == 0 || !spill_run()) return score;
    }
    return std::nullopt;
  }

  bool spill_run() {
    std::size_t count = 0;
    std::size_t chosen = 0;
    for (std::size_t number = 0; number < trial_.runs.size(); ++number) {
      const Run& run = trial_.runs[number];
      if (run.tier != 0 || is_held(trial_.run_gaps[run.first])) continue;
      const std::int64_t start = run.out < 0 ? 0 : trial_.issue[static_cast<std::size_t>(run.out)];
      const std::int64_t stop = run.out < 0 ? n_ : std::min(run.stop, start + n_);
      const auto away = static_cast<std::int64_t>(op_at(player_.short_op() - start));
      if (away < stop - start && random_.below(++count) == 0) chosen = number;
    }
    if (count > 0) retier(trial_, trial_.runs[chosen], 1);
    return count > 0;
  }

  void retier(const Play& play, const Run& run, std::int64_t tier) {
    for (std::size_t i = run.first; i < run.first + run.count; ++i) {
      const std::size_t gap = play.run_gaps[i];
      set(gap, gaps_.away_start[gap], gaps_.away_stop[gap], tier);
    }
  }

  // Changes.

  // Chooses an op that waits, by how long; false when hardly any does.
  bool pick_stall() {
    double total = 0.0;
    for (const double wait : now_.result.waits_ns) total += wait;
    if (total <= kCalm * now_.result.step_ns || now_.link.empty()) return false;
    double left = random_.share() * total;
    for (stall_ = 0; stall_ + 1 < n_ && (left -= now_.result.waits_ns[static_cast<std::size_t>(stall_)]) > 0.0;) ++stall_;
    return true;
  }

  // Chooses a job that the waiting op waits for, or that its link served a little before it.
  std::optional<std::size_t> pick_job() {
    std::size_t count = 0;
    std::size_t awaited = 0;
    for (std::size_t job = 0; job < now_.link.size(); ++job) {
      if (op_at(now_.by[job]) == static_cast<std::size_t>(stall_) && random_.below(++count) == 0) awaited = job;
    }
    if (count == 0) return std::nullopt;
    auto link = static_cast<std::size_t>(now_.link[awaited]);
    std::size_t place = now_.place[awaited];
    const std::size_t beside = link ^ 1U;
    if (ground_.links.nvme_shares_host_link && !now_.order[beside].empty() && random_.below(4) == 0) {
      // The last that began before the awaited one on the link that shares its bandwidth.
      const auto& list = now_.order[beside];
      const std::size_t at = op_at(now_.result.start_tick[awaited]);
      place = static_cast<std::size_t>(
          std::upper_bound(list.begin(), list.end(), at,
                           [&](std::size_t op, std::size_t job) { return op < op_at(now_.result.start_tick[job]); }) -
          list.begin());
      link = beside;
      place = place == 0 ? list.size() - 1 : place - 1;
    }
    const auto& list = now_.order[link];
    const auto back = static_cast<std::size_t>(-12.0 * std::log(1.0 - random_.share()));
    return list[(place + list.size() - back % list.size()) % list.size()];
  }

  bool propose() {
    const auto job = pick_job();
    if (!job) return false;
    const Run run = now_.runs[now_.run_of[*job]];
    const std::size_t gap = now_.gap_of[*job];
    switch (random_.below(4)) {
      case 0:
        if (ground_.lower_bytes[1 - run.tier] == 0) return false;
        held_.push_back(now_.run_gaps[run.first]);
        retier(now_, run, static_cast<std::int64_t>(1 - run.tier));
        return true;
      case 1:
        keep(gap);
        return true;
      case 2:
        for (std::size_t i = run.first; i < run.first + run.count; ++i) keep(now_.run_gaps[i]);
        return true;
      default:
        return shift(gap, now_.link[*job] >= static_cast<std::int64_t>(kH2d));
    }
  }

  // A load may be issued earlier, or a copy be done later.
  bool shift(std::size_t gap, bool is_load) {
    const auto by = static_cast<std::int64_t>(1 + random_.below(static_cast<std::size_t>(n_ / 32 + 2)));
    std::int64_t from = gaps_.away_start[gap];
    std::int64_t to = gaps_.away_stop[gap];
    if (is_load) {
      to = std::max(from + 1, to - by);
    } else {
      from = std::min(to - 1, from + by);
    }
    if (from == gaps_.away_start[gap] && to == gaps_.away_stop[gap]) return false;
    held_.push_back(gap);
    set(gap, from, to, gaps_.tier[gap]);
    return true;
  }

  std::span<std::int64_t> usage_;
  SearchGround ground_;
  SearchGaps gaps_;
  std::int64_t n_;
  Random random_;
  std::vector<double> line_;
  std::vector<Change> changes_;
  std::vector<Candidate> candidates_;
  std::vector<std::size_t> held_;  // gaps that this change does not touch again
  Player player_;
  Play now_;    // of the windows before a change
  Play trial_;  // of the windows with it
  std::int64_t stall_ = 0;
  std::int64_t work_ = 0;
};

}  // namespace

Improved improve(std::span<std::int64_t> usage, const SearchGround& ground, const SearchGaps& gaps, std::uint64_t seed,
                 std::int64_t work) {
  return Search(usage, ground, gaps, seed).run(work);
}

}  // namespace tieroff
