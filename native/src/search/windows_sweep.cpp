#include "tieroff/search/windows_sweep.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <utility>
#include <vector>

namespace tieroff {

namespace {

template <typename T>
using MinHeap = std::priority_queue<T, std::vector<T>, std::greater<>>;

constexpr std::int64_t kNever = -1;

class Sweep {
 public:
  Sweep(std::span<std::int64_t> usage, std::span<const std::int64_t> starts_ns, std::int64_t budget_bytes, std::int64_t lead_ns,
        const SweptSlots& slots, std::span<std::int64_t> release_at, std::span<std::int64_t> load_at)
      : usage_(usage),
        starts_ns_(starts_ns),
        budget_(budget_bytes),
        slots_(slots),
        release_at_(release_at),
        load_at_(load_at),
        n_(static_cast<std::int64_t>(usage.size())),
        copied_ns_(slots.start.size(), kNever),
        loaded_ns_(slots.start.size(), kNever),
        reach_ns_(slots.start.size(), 0),
        stays_(usage.size() + 1) {
    check();
    std::fill(release_at_.begin(), release_at_.end(), kNever);
    std::fill(load_at_.begin(), load_at_.end(), kNever);
    order_loads(lead_ns);
  }

  void run() {
    const std::size_t ticks = usage_.size() + 1;
    std::vector<std::vector<std::size_t>> copies(ticks);
    std::vector<std::vector<std::size_t>> begins(ticks);
    std::vector<std::vector<std::size_t>> due(ticks);
    for (std::size_t slot = 0; slot < slots_.start.size(); ++slot) {
      if (slots_.copy_tick[slot] >= 0) copies[at(slots_.copy_tick[slot])].push_back(slot);
      begins[at(slots_.start[slot])].push_back(slot);
      if (!slots_.is_last[slot]) due[at(slots_.deadline[slot])].push_back(slot);
    }
    for (std::int64_t tick = 0; tick <= n_; ++tick) {
      revise(tick);
      for (const std::size_t slot : copies[at(tick)]) copied_ns_[slot] = serve(slot, true, slots_.out_ns[slot]);
      for (const std::size_t slot : begins[at(tick)]) begin(slot, tick);
      issue_loads(tick);
      for (const std::size_t slot : due[at(tick)]) {
        if (load_at_[slot] == kNever) issue(slot, tick);
        now_ns_ = std::max(now_ns_, loaded_ns_[slot]);
      }
      if (tick < n_) now_ns_ += starts_ns_[at(tick + 1)] - starts_ns_[at(tick)];
    }
  }

 private:
  static std::size_t at(std::int64_t tick) { return static_cast<std::size_t>(tick); }

  void check() const {
    const std::size_t count = slots_.start.size();
    if (starts_ns_.size() != usage_.size() + 1) throw std::invalid_argument("expected one start more than ops");
    for (const auto& row : {slots_.tensor, slots_.tier, slots_.release_limit, slots_.deadline, slots_.copy_tick,
                            slots_.size_bytes, slots_.out_ns, slots_.back_ns, slots_.is_boundary, slots_.is_last}) {
      if (row.size() != count) throw std::invalid_argument("expected arrays of one length for the slots");
    }
    if (release_at_.size() != count || load_at_.size() != count) {
      throw std::invalid_argument("expected arrays of one length for the slots");
    }
    for (std::size_t slot = 0; slot < count; ++slot) {
      const bool has_deadline = slots_.is_last[slot] || (slots_.deadline[slot] >= 0 && slots_.deadline[slot] <= n_);
      if (slots_.start[slot] < 0 || slots_.start[slot] > n_ || slots_.copy_tick[slot] > slots_.start[slot] ||
          slots_.release_limit[slot] > n_ || !has_deadline) {
        throw std::invalid_argument("expected slots within the step");
      }
      if (slots_.tier[slot] < 0 || slots_.tier[slot] >= static_cast<std::int64_t>(kLowerTierCount)) {
        throw std::invalid_argument("expected a lower tier by its number");
      }
    }
  }

  // Orders the loads of each tier, last deadline first, and finds the time from which each is in reach.
  void order_loads(std::int64_t lead_ns) {
    std::vector<std::size_t> order(slots_.start.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return deadline_of(b) < deadline_of(a); });
    std::array<std::int64_t, kLowerTierCount> latest_ns{};
    latest_ns.fill(starts_ns_.back());
    for (const std::size_t slot : order) {
      if (slots_.is_last[slot]) continue;
      const std::size_t tier = at(slots_.tier[slot]);
      loads_[tier].push_back(slot);
      latest_ns[tier] = std::min(latest_ns[tier], starts_ns_[at(slots_.deadline[slot])]) - slots_.back_ns[slot];
      reach_ns_[slot] = latest_ns[tier] - lead_ns;
    }
  }

  [[nodiscard]] std::pair<std::int64_t, std::int64_t> deadline_of(std::size_t slot) const {
    return {slots_.deadline[slot], slots_.tensor[slot]};
  }

  std::int64_t serve(std::size_t slot, bool leaves, std::int64_t duration_ns) {
    std::int64_t& free_ns = link_free_ns_[at(slots_.tier[slot])][leaves ? 1 : 0];
    free_ns = std::max(now_ns_, free_ns) + duration_ns;
    return free_ns;
  }

  void add(std::int64_t from, std::int64_t to, std::int64_t size_bytes) {
    for (std::int64_t op = from; op < to; ++op) usage_[at(op)] += size_bytes;
  }

  // Returns the tick up to which a leaving tensor stays from `tick` on, and commits its bytes.
  std::int64_t extend(std::size_t slot, std::int64_t tick) {
    const std::int64_t target_ns = copied_ns_[slot] - now_ns_ + starts_ns_[at(tick)];
    const auto found = std::lower_bound(starts_ns_.begin(), starts_ns_.end(), target_ns) - starts_ns_.begin();
    const std::int64_t limit = std::min(static_cast<std::int64_t>(found), slots_.release_limit[slot]);
    const std::int64_t size = slots_.size_bytes[slot];
    std::int64_t stop = tick;
    while (stop < limit && usage_[at(stop)] + size <= budget_) ++stop;
    add(tick, stop, size);
    return stop;
  }

  void begin(std::size_t slot, std::int64_t tick) {
    release_at_[slot] = tick;
    if (slots_.copy_tick[slot] < 0) return;
    release_at_[slot] = extend(slot, tick);
    if (release_at_[slot] > tick) {
      leaving_.push_back(slot);
      const std::size_t number = leaving_.size() - 1;
      copying_.emplace(copied_ns_[slot], number);
      stays_[at(release_at_[slot])].push_back(number);
    } else {
      now_ns_ = std::max(now_ns_, copied_ns_[slot]);
    }
  }

  // Releases what is copied, and waits for what must go; in the order in which slots began. Looks only at slots whose
  // copy is done by now and at those that stay up to this tick.
  void revise(std::int64_t tick) {
    MinHeap<std::size_t> due;
    for (const std::size_t number : stays_[at(tick)]) due.push(number);
    for (const std::size_t number : copied()) due.push(number);
    std::vector<std::size_t> late;  // copied too late for their turn: they go at the next tick
    while (!due.empty()) {
      const std::size_t number = due.top();
      due.pop();
      const std::size_t slot = leaving_[number];
      if (copied_ns_[slot] <= now_ns_ && release_at_[slot] > tick) {
        add(tick, release_at_[slot], -slots_.size_bytes[slot]);
        release_at_[slot] = tick;
      } else if (release_at_[slot] == tick && copied_ns_[slot] > now_ns_) {
        release_at_[slot] = extend(slot, tick);
        if (release_at_[slot] > tick) {
          stays_[at(release_at_[slot])].push_back(number);
          continue;
        }
        now_ns_ = copied_ns_[slot];
        for (const std::size_t other : copied()) {
          if (other > number) {
            due.push(other);
          } else {
            late.push_back(other);
          }
        }
      }
    }
    // Only now: `copied` would find them again at every wait.
    for (const std::size_t number : late) copying_.emplace(copied_ns_[leaving_[number]], number);
  }

  // Returns the slots, by their place in `leaving_`, whose copies are done by now, each once.
  std::vector<std::size_t> copied() {
    std::vector<std::size_t> found;
    while (!copying_.empty() && copying_.top().first <= now_ns_) {
      found.push_back(copying_.top().second);
      copying_.pop();
    }
    return found;
  }

  // Issues loads in order of deadline while the next one is in reach and fits.
  void issue_loads(std::int64_t tick) {
    std::array<bool, kLowerTierCount> is_blocked{};
    while (true) {
      std::vector<std::size_t>* queue = nullptr;
      for (std::size_t tier = 0; tier < kLowerTierCount; ++tier) {
        if (loads_[tier].empty() || is_blocked[tier]) continue;
        if (queue == nullptr || deadline_of(loads_[tier].back()) < deadline_of(queue->back())) queue = &loads_[tier];
      }
      if (queue == nullptr) return;
      const std::size_t slot = queue->back();
      if (load_at_[slot] != kNever) {
        queue->pop_back();
        continue;
      }
      const std::int64_t deadline = slots_.deadline[slot];
      const bool is_away = slots_.is_boundary[slot] || (release_at_[slot] > kNever && release_at_[slot] <= tick);
      const bool is_far = tick < deadline && starts_ns_[at(tick + 1)] <= reach_ns_[slot];  // the next tick is early enough
      if (!is_away || is_far) {
        is_blocked[at(slots_.tier[slot])] = true;
        continue;
      }
      for (std::int64_t op = tick; op < deadline; ++op) {
        if (usage_[at(op)] + slots_.size_bytes[slot] > budget_) return;
      }
      queue->pop_back();
      issue(slot, tick);
    }
  }

  void issue(std::size_t slot, std::int64_t tick) {
    load_at_[slot] = tick;
    add(tick, slots_.deadline[slot], slots_.size_bytes[slot]);
    loaded_ns_[slot] = serve(slot, false, slots_.back_ns[slot]);
  }

  std::span<std::int64_t> usage_;
  std::span<const std::int64_t> starts_ns_;
  std::int64_t budget_;
  SweptSlots slots_;
  std::span<std::int64_t> release_at_;
  std::span<std::int64_t> load_at_;
  std::int64_t n_;
  std::int64_t now_ns_ = 0;
  std::vector<std::int64_t> copied_ns_;
  std::vector<std::int64_t> loaded_ns_;
  std::vector<std::int64_t> reach_ns_;
  std::array<std::array<std::int64_t, 2>, kLowerTierCount> link_free_ns_{};
  std::array<std::vector<std::size_t>, kLowerTierCount> loads_;
  std::vector<std::size_t> leaving_;                       // in the order in which they began
  MinHeap<std::pair<std::int64_t, std::size_t>> copying_;  // when a copy is done, and its place in `leaving_`
  std::vector<std::vector<std::size_t>> stays_;            // places in `leaving_` of those that stay up to a tick
};

}  // namespace

void sweep_windows(std::span<std::int64_t> usage, std::span<const std::int64_t> starts_ns, std::int64_t budget_bytes,
                   std::int64_t lead_ns, const SweptSlots& slots, std::span<std::int64_t> release_at,
                   std::span<std::int64_t> load_at) {
  Sweep(usage, starts_ns, budget_bytes, lead_ns, slots, release_at, load_at).run();
}

}  // namespace tieroff
