#include "tieroff/search/windows.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <vector>

namespace tieroff {

namespace {

class Fitting {
 public:
  Fitting(std::span<std::int64_t> usage, std::span<const std::int64_t> starts_ns, std::int64_t budget_bytes, const Gaps& gaps)
      : usage_(usage), starts_ns_(starts_ns), budget_(budget_bytes), gaps_(gaps), n_(static_cast<std::int64_t>(usage.size())) {
    check();
    std::vector<std::int64_t> change(2 * usage.size() + 1);
    const auto hold = [&](std::int64_t from, std::int64_t to, std::int64_t size_bytes) {
      change[static_cast<std::size_t>(from)] += size_bytes;
      change[static_cast<std::size_t>(to)] -= size_bytes;
    };
    for (std::size_t gap = 0; gap < gaps.start.size(); ++gap) {
      hold(gaps.start[gap], gaps.stop[gap], gaps.size_bytes[gap]);
      if (!is_kept(gap)) hold(gaps.away_start[gap], gaps.away_stop[gap], -gaps.size_bytes[gap]);
    }
    std::int64_t held = 0;
    for (std::int64_t position = 0; position < 2 * n_; ++position) {
      held += change[static_cast<std::size_t>(position)];
      usage_[op_at(position)] += held;
    }
  }

  bool repair(Repair how) {
    std::vector<std::vector<std::size_t>> begins(static_cast<std::size_t>(n_));
    std::vector<Active> active;
    for (std::size_t gap = 0; gap < gaps_.start.size(); ++gap) {
      if (gaps_.start[gap] < n_) begins[static_cast<std::size_t>(gaps_.start[gap])].push_back(gap);
      if (gaps_.stop[gap] > n_) active.push_back({gap, n_});  // it reaches round the end: the same gap, a step earlier
    }
    bool fits = true;
    for (std::int64_t op = 0; op < n_; ++op) {
      for (const std::size_t gap : begins[static_cast<std::size_t>(op)]) active.push_back({gap, 0});
      if (usage_[static_cast<std::size_t>(op)] <= budget_) continue;
      std::erase_if(active, [&](const Active& a) { return op + a.shift >= gaps_.stop[a.gap]; });
      give_way(op, active, how);
      fits = fits && usage_[static_cast<std::size_t>(op)] <= budget_;
    }
    return fits;
  }

  void fill(const Filling& filling) {
    for (const char pass : filling.passes) {
      const bool is_load = pass == 'L' || pass == 'l';
      if (!is_load && pass != 'R' && pass != 'r') throw std::invalid_argument("expected passes of the letters L, R, l and r");
      const bool is_limited = pass == 'L' || pass == 'R';
      for (const std::int64_t index : is_load ? filling.load_order : filling.release_order) {
        const auto gap = static_cast<std::size_t>(index);
        if (is_kept(gap)) continue;
        if (is_load) {
          load_earlier(gap, is_limited ? filling.load_from[gap] : 0);
        } else {
          release_later(gap, is_limited ? filling.release_until[gap] : 2 * n_);
        }
      }
    }
  }

 private:
  struct Active {
    std::size_t gap;
    std::int64_t shift;  // position = op + shift
  };
  struct Candidate {
    double cost;
    std::size_t gap;
    std::int64_t position;
  };

  void check() const {
    const std::size_t count = gaps_.start.size();
    if (starts_ns_.size() != usage_.size() + 1) throw std::invalid_argument("expected one start more than ops");
    if (gaps_.stop.size() != count || gaps_.size_bytes.size() != count || gaps_.away_start.size() != count ||
        gaps_.away_stop.size() != count) {
      throw std::invalid_argument("expected arrays of one length for the gaps");
    }
    for (std::size_t gap = 0; gap < count; ++gap) {
      const bool is_inside =
          is_kept(gap) || (gaps_.away_start[gap] >= gaps_.start[gap] && gaps_.away_stop[gap] <= gaps_.stop[gap]);
      if (gaps_.start[gap] < 0 || gaps_.start[gap] > n_ || gaps_.stop[gap] < gaps_.start[gap] ||
          gaps_.stop[gap] > gaps_.start[gap] + n_ || !is_inside) {
        throw std::invalid_argument("expected gaps on the ring, each with its window inside");
      }
    }
  }

  [[nodiscard]] bool is_kept(std::size_t gap) const { return gaps_.away_start[gap] >= gaps_.away_stop[gap]; }

  [[nodiscard]] std::size_t op_at(std::int64_t position) const {
    return static_cast<std::size_t>(position >= n_ ? position - n_ : position);
  }

  [[nodiscard]] double time_at(std::int64_t position) const {
    const auto step_ns = static_cast<double>(starts_ns_.back());
    if (position <= n_) return static_cast<double>(starts_ns_[static_cast<std::size_t>(position)]);
    return step_ns + static_cast<double>(starts_ns_[static_cast<std::size_t>(position - n_)]);
  }

  void add(std::int64_t from, std::int64_t to, std::int64_t size_bytes) {
    for (std::int64_t op = from; op < std::min(to, n_); ++op) usage_[static_cast<std::size_t>(op)] += size_bytes;
    for (std::int64_t op = std::max(from, n_) - n_; op < to - n_; ++op) usage_[static_cast<std::size_t>(op)] += size_bytes;
  }

  [[nodiscard]] double cost(std::size_t gap, std::int64_t position, Repair how) const {
    const double now = time_at(position);
    const double step_ns = time_at(n_) + 1.0;
    if (is_kept(gap)) {
      const double first = time_at(gaps_.start[gap]);
      const double last = time_at(gaps_.stop[gap]);
      if (how == Repair::kDeepest) return -0.1 * std::min(last - now, now - first);
      return 1e3 * step_ns - (last - first);  // the last resort, the longest gap first
    }
    const bool is_before = position < gaps_.away_start[gap];
    const double grows =
        is_before ? time_at(gaps_.away_start[gap]) - now : time_at(position + 1) - time_at(gaps_.away_stop[gap]);
    const double to_use = is_before ? now - time_at(gaps_.start[gap]) : time_at(gaps_.stop[gap]) - now;
    switch (how) {
      case Repair::kLeastTime:
        return grows;
      case Repair::kRelativeTime:
        return grows / (to_use + 1e-6 * step_ns);
      case Repair::kDeepest:
      case Repair::kFurthestUse:
        break;
    }
    return -to_use;
  }

  void give_way(std::int64_t op, const std::vector<Active>& active, Repair how) {
    candidates_.clear();
    for (const Active& a : active) {
      const std::int64_t position = op + a.shift;
      const bool is_away = !is_kept(a.gap) && position >= gaps_.away_start[a.gap] && position < gaps_.away_stop[a.gap];
      if (!is_away) candidates_.push_back({cost(a.gap, position, how), a.gap, position});
    }
    // A heap: few of them have to give way.
    const auto is_later = [](const Candidate& a, const Candidate& b) {
      return a.cost != b.cost ? a.cost > b.cost : a.gap > b.gap;
    };
    std::make_heap(candidates_.begin(), candidates_.end(), is_later);
    while (!candidates_.empty() && usage_[static_cast<std::size_t>(op)] > budget_) {
      std::pop_heap(candidates_.begin(), candidates_.end(), is_later);
      widen(candidates_.back().gap, candidates_.back().position);
      candidates_.pop_back();
    }
  }

  void widen(std::size_t gap, std::int64_t position) {
    const std::int64_t size = gaps_.size_bytes[gap];
    if (is_kept(gap)) {
      gaps_.away_start[gap] = position;
      gaps_.away_stop[gap] = position + 1;
      add(position, position + 1, -size);
    } else if (position < gaps_.away_start[gap]) {
      add(position, gaps_.away_start[gap], -size);
      gaps_.away_start[gap] = position;
    } else {
      add(gaps_.away_stop[gap], position + 1, -size);
      gaps_.away_stop[gap] = position + 1;
    }
  }

  [[nodiscard]] bool has_room(std::int64_t position, std::int64_t size_bytes) const {
    return usage_[op_at(position)] + size_bytes <= budget_;
  }

  void load_earlier(std::size_t gap, std::int64_t from) {
    const std::int64_t size = gaps_.size_bytes[gap];
    std::int64_t& stop = gaps_.away_stop[gap];
    while (stop > gaps_.away_start[gap] && stop > from && has_room(stop - 1, size)) {
      --stop;
      usage_[op_at(stop)] += size;
    }
  }

  void release_later(std::size_t gap, std::int64_t until) {
    const std::int64_t size = gaps_.size_bytes[gap];
    std::int64_t& start = gaps_.away_start[gap];
    while (start < gaps_.away_stop[gap] && start < until && has_room(start, size)) {
      usage_[op_at(start)] += size;
      ++start;
    }
  }

  std::span<std::int64_t> usage_;
  std::span<const std::int64_t> starts_ns_;
  std::int64_t budget_;
  Gaps gaps_;
  std::int64_t n_;
  std::vector<Candidate> candidates_;
};

}  // namespace

bool fit_windows(std::span<std::int64_t> usage, std::span<const std::int64_t> starts_ns, std::int64_t budget_bytes,
                 const Gaps& gaps, Repair repair, const Filling& filling) {
  Fitting fitting(usage, starts_ns, budget_bytes, gaps);
  if (!fitting.repair(repair)) return false;
  fitting.fill(filling);
  return true;
}

std::vector<double> serve_in_turn(std::span<const double> limits_ns, std::span<const double> takes_ns, bool is_backwards) {
  if (limits_ns.size() != takes_ns.size()) throw std::invalid_argument("expected a limit for each transfer");
  std::vector<double> ends_ns;
  ends_ns.reserve(limits_ns.size());
  double now_ns = std::numeric_limits<double>::infinity() * (is_backwards ? 1.0 : -1.0);
  for (std::size_t i = 0; i < limits_ns.size(); ++i) {
    now_ns = is_backwards ? std::min(now_ns, limits_ns[i]) - takes_ns[i] : std::max(now_ns, limits_ns[i]) + takes_ns[i];
    ends_ns.push_back(now_ns);
  }
  return ends_ns;
}

}  // namespace tieroff
