#include "tieroff/simulate/simulate.hpp"

#include <algorithm>
#include <span>
#include <vector>

#include "tieroff/simulate/simulate_links.hpp"
#include "tieroff/simulate/simulate_program.hpp"

namespace tieroff {
namespace {

using namespace simulation;

std::int64_t mean_up(std::int64_t total_ns, std::int64_t count) { return (total_ns + count - 1) / count; }

// One run, round after round of the ring.
template <class Links>
class Run {
 public:
  Run(const SimulationInput& in, const Program& program, const Rates& rates)
      : in_(in), program_(program), jobs_(2 * program.items.size()), links_(program, rates, jobs_), ends_ns_(in.queues.size()) {}

  SimulationResult simulate() {
    std::vector<std::int64_t> ends_ns{0};
    std::vector<std::vector<std::uint64_t>> states{state()};
    SimulationResult result;
    std::size_t count = 0;
    while (result.cycle == 0 && count < static_cast<std::size_t>(in_.step_count_max)) {
      run_round(count++, result);
      ends_ns.push_back(now_ns_);
      states.push_back(state());
      const auto seen = std::find(states.begin(), states.end() - 1, states.back());
      result.cycle = static_cast<std::int32_t>(states.end() - 1 - seen);
    }
    const std::int64_t rounds = std::max(result.cycle, 1);
    const std::int64_t span_ns = now_ns_ - ends_ns[count - static_cast<std::size_t>(rounds)];
    result.step_ns = mean_up(span_ns, rounds);
    result.first_step_ns = ends_ns[1];
    if (in_.with_spans) add_spans(count - 1, ends_ns[count - 1], result);
    return result;
  }

 private:
  [[nodiscard]] std::vector<std::uint64_t> state() {
    std::vector<std::uint64_t> found;
    links_.describe(now_ns_, found);
    return found;
  }

  // Stalls and spans of compute are those of the last round that was run.
  void run_round(std::size_t round, SimulationResult& result) {
    result.stalls.clear();
    result.ops.clear();
    result.repeats.clear();
    result.recompute_ns = 0;
    const std::int64_t begin_ns = now_ns_;
    const auto compute = [&](std::int32_t index, std::int64_t duration_ns, std::vector<SimulatedSpan>& spans) {
      if (in_.with_spans) spans.push_back({index, now_ns_ - begin_ns, now_ns_ - begin_ns + duration_ns});
      now_ns_ += duration_ns;
    };
    for (std::size_t tick = 0; tick <= in_.op_ns.size(); ++tick) {
      await_communication(tick, result.stalls);
      issue(round, program_.issue_first.at(tick));
      await(round, tick, program_.await_first.at(tick), result.stalls);
      issue(round, program_.issue.at(tick));
      await(round, tick, program_.await_last.at(tick), result.stalls);
      for (const std::int32_t index : program_.repeats.at(tick)) {
        const auto op = static_cast<std::size_t>(in_.repeats[static_cast<std::size_t>(index)].op);
        result.recompute_ns += in_.op_ns[op];
        compute(index, in_.op_ns[op], result.repeats);
      }
      if (tick < in_.queues.size() && in_.queues[tick].is_communication) {
        const std::int64_t start_ns = std::max(now_ns_, peers_free_ns_);
        peers_free_ns_ = ends_ns_[tick] = start_ns + in_.op_ns[tick];
        if (in_.with_spans) {
          result.ops.push_back({static_cast<std::int32_t>(tick), start_ns - begin_ns, peers_free_ns_ - begin_ns});
        }
      } else if (tick < in_.op_ns.size()) {
        compute(static_cast<std::int32_t>(tick), in_.op_ns[tick], result.ops);
      }
    }
    links_.advance(now_ns_);
  }

  // At the end of the ring all communication is awaited, so that none is under way from one round to the next.
  void await_communication(std::size_t tick, std::vector<SimulatedStall>& stalls) {
    std::int64_t until_ns = now_ns_;
    if (tick == in_.queues.size()) {
      until_ns = std::max(until_ns, peers_free_ns_);
    } else if (tick < in_.queues.size() && in_.queues[tick].awaits >= 0) {
      until_ns = std::max(until_ns, ends_ns_[static_cast<std::size_t>(in_.queues[tick].awaits)]);
    }
    if (until_ns == now_ns_) return;
    stalls.push_back({static_cast<std::int32_t>(tick), until_ns - now_ns_, -1});
    now_ns_ = until_ns;
  }

  [[nodiscard]] static std::uint32_t slot_of(std::int32_t item, std::size_t round) {
    return static_cast<std::uint32_t>(item) * 2 + static_cast<std::uint32_t>(round & 1U);
  }

  void issue(std::size_t round, std::span<const std::int32_t> items) {
    for (const std::int32_t index : items) {
      links_.issue(slot_of(index, round), now_ns_);
    }
  }

  void await(std::size_t round, std::size_t tick, std::span<const std::int32_t> items, std::vector<SimulatedStall>& stalls) {
    std::int64_t until_ns = now_ns_;
    std::int32_t cause = -1;
    for (const std::int32_t index : items) {
      const bool crosses = program_.items[static_cast<std::size_t>(index)].crosses;
      if (crosses && round == 0) continue;  // it was issued before the simulation began
      const std::uint32_t slot = slot_of(index, crosses ? round - 1 : round);
      links_.finish(slot);
      if (jobs_[slot].stop_ns > until_ns) {
        until_ns = jobs_[slot].stop_ns;
        cause = index;
      }
    }
    if (cause < 0) return;
    stalls.push_back({static_cast<std::int32_t>(tick), until_ns - now_ns_, cause});
    now_ns_ = until_ns;
  }

  void add_spans(std::size_t round, std::int64_t begin_ns, SimulationResult& result) {
    const auto is_open = [&](std::size_t item) {
      return jobs_[slot_of(static_cast<std::int32_t>(item), round)].stop_ns == kNever;
    };
    for (std::size_t item = 0; item < program_.items.size(); ++item) {
      if (!is_open(item)) continue;
      SimulationResult after;  // what the last round left under way ends within the next
      run_round(round + 1, after);
      break;
    }
    const auto transfer_count = static_cast<std::int32_t>(in_.transfers.size());
    for (std::size_t tick = 0; tick <= in_.op_ns.size(); ++tick) {
      for (const Lists* list : {&program_.issue_first, &program_.issue}) {
        for (const std::int32_t item : list->at(tick)) {
          const Job& job = jobs_[slot_of(item, round)];
          const bool is_update = item >= transfer_count;
          (is_update ? result.updates : result.transfers)
              .push_back({is_update ? item - transfer_count : item, job.start_ns - begin_ns, job.stop_ns - begin_ns});
        }
      }
    }
  }

  const SimulationInput& in_;
  const Program& program_;
  std::vector<Job> jobs_;
  Links links_;
  std::vector<std::int64_t> ends_ns_;  // per op, of communication in this round
  std::int64_t peers_free_ns_ = 0;     // when the queue of communication has ended all it has
  std::int64_t now_ns_ = 0;
};

}  // namespace

SimulationResult simulate(const SimulationInput& input) {
  simulation::check(input);
  const Rates rates(input);
  const Program program(input, rates);
  if (program.is_shared) return Run<SharedLinks>(input, program, rates).simulate();
  return Run<SeparateLinks>(input, program, rates).simulate();
}

}  // namespace tieroff
