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

// What a walk leaves to the step after it.
struct Left {
  std::int64_t end_ns = 0;  // when the step ends if it waits for all copies
  std::vector<std::pair<std::int64_t, std::size_t>> copies;  // of slots that may stay: how long each takes yet, and the slot
};

// A tensor that stays on the device while it is copied out.
struct Leaving {
  std::size_t slot;
  std::int64_t copied_ns;
  std::int64_t release_at;
  std::int64_t limit;
  bool is_late;  // its copy is one that the step before left to this one
};

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
        late_(slots.start.size(), 0),
        stays_(usage.size() + 1) {
    std::fill(release_at_.begin(), release_at_.end(), kNever);
    std::fill(load_at_.begin(), load_at_.end(), kNever);
    order_loads(lead_ns);
  }

  // Walks over the step, which takes over what the one before left to it.
  Left run(const Left& before) {
    take_over(before);
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
    return end();
  }

 private:
  static std::size_t at(std::int64_t tick) { return static_cast<std::size_t>(tick); }

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

  // Has a leaving tensor stay from `tick` on, as long as it is copied and there is room, and commits its bytes.
  void extend(Leaving& leaving, std::int64_t tick) {
    const std::int64_t target_ns = leaving.copied_ns - now_ns_ + starts_ns_[at(tick)];
    const auto found = std::lower_bound(starts_ns_.begin(), starts_ns_.end(), target_ns) - starts_ns_.begin();
    const std::int64_t limit = std::min(static_cast<std::int64_t>(found), leaving.limit);
    const std::int64_t size = slots_.size_bytes[leaving.slot];
    std::int64_t stop = tick;
    while (stop < limit && usage_[at(stop)] + size <= budget_) ++stop;
    add(tick, stop, size);
    leaving.release_at = stop;
  }

  void release(const Leaving& leaving, std::int64_t tick) {
    (leaving.is_late ? late_ : release_at_)[leaving.slot] = tick;
  }

  // A tensor leaves from a tick on; one that cannot stay is waited for.
  void leave(Leaving leaving, std::int64_t tick) {
    extend(leaving, tick);
    release(leaving, leaving.release_at);
    if (leaving.release_at > tick) {
      leaving_.push_back(leaving);
      copying_.emplace(leaving.copied_ns, leaving_.size() - 1);
      stays_[at(leaving.release_at)].push_back(leaving_.size() - 1);
    } else if (!leaving.is_late) {
      wait(leaving, tick);
    }
  }

  void begin(std::size_t slot, std::int64_t tick) {
    release_at_[slot] = tick;
    if (slots_.copy_tick[slot] >= 0) leave({slot, copied_ns_[slot], tick, slots_.release_limit[slot], false}, tick);
  }

  // Waits for the copy of a tensor that has to go, but at the step's end of one that may go later.
  void wait(const Leaving& leaving, std::int64_t tick) {
    if (tick < n_ || slots_.late_limit[leaving.slot] == 0) {
      now_ns_ = std::max(now_ns_, leaving.copied_ns);
    } else {
      last_.push_back(leaving.slot);
    }
  }

  // Copies that the step before left to this one come first; a tensor with no room at the beginning leaves before the end.
  void take_over(const Left& before) {
    for (const auto& [left_ns, slot] : before.copies) {
      std::int64_t& free_ns = link_free_ns_[at(slots_.tier[slot])][1];
      free_ns = std::max(free_ns, left_ns);
      leave({slot, left_ns, 0, slots_.late_limit[slot], true}, 0);
    }
  }

  Left end() {
    Left left{now_ns_, {}};
    for (const std::size_t slot : last_) {
      if (copied_ns_[slot] > now_ns_) left.copies.emplace_back(copied_ns_[slot] - now_ns_, slot);
      if (late_[slot] > 0) {
        release_at_[slot] = n_ + late_[slot];
      } else {
        left.end_ns = std::max(left.end_ns, copied_ns_[slot]);
      }
    }
    std::ranges::sort(left.copies);
    return left;
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
      Leaving& leaving = leaving_[number];
      if (leaving.copied_ns <= now_ns_ && leaving.release_at > tick) {
        add(tick, leaving.release_at, -slots_.size_bytes[leaving.slot]);
        leaving.release_at = tick;
        release(leaving, tick);
      } else if (leaving.release_at == tick && leaving.copied_ns > now_ns_) {
        extend(leaving, tick);
        release(leaving, leaving.release_at);
        if (leaving.release_at > tick) {
          stays_[at(leaving.release_at)].push_back(number);
          continue;
        }
        wait(leaving, tick);
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
    for (const std::size_t number : late) copying_.emplace(leaving_[number].copied_ns, number);
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
      const bool is_released = release_at_[slot] > kNever && release_at_[slot] <= tick;
      const bool is_away = slots_.is_boundary[slot] ? late_[slot] == 0 || late_[slot] < tick : is_released;
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
  std::vector<std::int64_t> late_;                         // the tick to which a slot's tensor of the step before stays; 0: none
  std::vector<std::size_t> last_;                          // slots that the end of the step would wait for
  std::vector<Leaving> leaving_;                           // in the order in which they began
  MinHeap<std::pair<std::int64_t, std::size_t>> copying_;  // when a copy is done, and its place in `leaving_`
  std::vector<std::vector<std::size_t>> stays_;            // places in `leaving_` of those that stay up to a tick
};

void check(const SweptSlots& slots, std::size_t op_count, std::size_t start_count, std::size_t release_count,
           std::size_t load_count) {
  const std::size_t count = slots.start.size();
  const auto n = static_cast<std::int64_t>(op_count);
  if (start_count != op_count + 1) throw std::invalid_argument("expected one start more than ops");
  for (const auto& row : {slots.tensor, slots.tier, slots.release_limit, slots.deadline, slots.copy_tick, slots.size_bytes,
                          slots.out_ns, slots.back_ns, slots.is_boundary, slots.is_last, slots.late_limit}) {
    if (row.size() != count) throw std::invalid_argument("expected arrays of one length for the slots");
  }
  if (release_count != count || load_count != count) {
    throw std::invalid_argument("expected arrays of one length for the slots");
  }
  for (std::size_t slot = 0; slot < count; ++slot) {
    const bool has_deadline = slots.is_last[slot] || (slots.deadline[slot] >= 0 && slots.deadline[slot] <= n);
    const bool is_late = slots.late_limit[slot] != 0;
    if (slots.start[slot] < 0 || slots.start[slot] > n || slots.copy_tick[slot] > slots.start[slot] ||
        slots.release_limit[slot] > n || !has_deadline || (is_late && !slots.is_boundary[slot]) || slots.late_limit[slot] < 0 ||
        (is_late && slots.late_limit[slot] >= slots.deadline[slot])) {
      throw std::invalid_argument("expected slots within the step");
    }
    if (slots.tier[slot] < 0 || slots.tier[slot] >= static_cast<std::int64_t>(kLowerTierCount)) {
      throw std::invalid_argument("expected a lower tier by its number");
    }
  }
}

}  // namespace

void sweep_windows(std::span<std::int64_t> usage, std::span<const std::int64_t> starts_ns, std::int64_t budget_bytes,
                   std::int64_t lead_ns, const SweptSlots& slots, std::span<std::int64_t> release_at,
                   std::span<std::int64_t> load_at) {
  check(slots, usage.size(), starts_ns.size(), release_at.size(), load_at.size());
  const bool may_be_late = std::ranges::any_of(slots.late_limit, [](std::int64_t limit) { return limit != 0; });
  std::vector<std::int64_t> late_usage;
  if (may_be_late) late_usage.assign(usage.begin(), usage.end());
  const Left left = Sweep(usage, starts_ns, budget_bytes, lead_ns, slots, release_at, load_at).run({});
  if (left.copies.empty()) return;
  // Copies would hold up the step's end: once more, with what the next step has to take over.
  std::vector<std::int64_t> releases(release_at.size());
  std::vector<std::int64_t> loads(load_at.size());
  const Left late = Sweep(late_usage, starts_ns, budget_bytes, lead_ns, slots, releases, loads).run(left);
  if (late.end_ns >= left.end_ns) return;
  std::ranges::copy(late_usage, usage.begin());
  std::ranges::copy(releases, release_at.begin());
  std::ranges::copy(loads, load_at.begin());
}

}  // namespace tieroff
