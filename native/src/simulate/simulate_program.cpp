#include "tieroff/simulate/simulate_program.hpp"

#include <stdexcept>
#include <string>

namespace tieroff::simulation {
namespace {

std::size_t link_of(const SimulatedTransfer& t) {
  if (t.target == SimulatedTier::kNvme) return kNvmeWrite;
  if (t.source == SimulatedTier::kNvme) return kNvmeWrite + 1;
  return t.target == SimulatedTier::kHost ? kD2h : kH2d;
}

bool touches_device(const SimulatedTransfer& t) {
  return t.source == SimulatedTier::kDevice || t.target == SimulatedTier::kDevice;
}

void require(bool holds, const char* expected, const char* what, std::size_t index) {
  if (!holds) {
    throw std::invalid_argument(std::string("expected ") + expected + ", which " + what + " " + std::to_string(index) +
                                " breaks");
  }
}

std::vector<std::int32_t> order_by_rank(std::span<const SimulatedTransfer> transfers) {
  const auto count = static_cast<std::int32_t>(transfers.size());
  std::vector<std::int32_t> order(transfers.size());
  std::iota(order.begin(), order.end(), 0);
  const auto is_small = [count](const SimulatedTransfer& t) { return 0 <= t.rank && t.rank < count; };
  if (!std::ranges::all_of(transfers, is_small)) {
    std::ranges::stable_sort(order, {}, [&](std::int32_t i) { return transfers[static_cast<std::size_t>(i)].rank; });
    return order;
  }
  std::vector<std::int32_t> next(transfers.size() + 1);
  for (const auto& t : transfers) ++next[static_cast<std::size_t>(t.rank) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  for (std::int32_t i = 0; i < count; ++i) {
    order[static_cast<std::size_t>(next[static_cast<std::size_t>(transfers[static_cast<std::size_t>(i)].rank)]++)] = i;
  }
  return order;
}

}  // namespace

void check(const SimulationInput& in) {
  const auto n = static_cast<std::int64_t>(in.op_ns.size());
  require(n < std::numeric_limits<std::int32_t>::max() / 2 && in.step_count_max >= 1 && in.duplex_share_millionths >= 0 &&
              in.duplex_share_millionths <= kMillion,
          "fewer than 2^30 ops, step_count_max >= 1, and a share of 0 to 1000000", "input", 0);
  const auto is_window = [n](std::int64_t issue, std::int64_t ready) {
    return 0 <= issue && issue <= n && issue <= ready && ready <= issue + n;
  };
  require(in.memory.bytes_per_s >= 0 && in.memory.update_bytes_per_s >= 0 && in.memory.host_passes >= 0 &&
              in.memory.nvme_passes >= 0,
          "rates and passes of the host's memory >= 0", "input", 0);
  for (std::size_t i = 0; i < in.op_ns.size(); ++i) require(in.op_ns[i] >= 0, "a duration >= 0", "op", i);
  require(in.queues.empty() || in.queues.size() == in.op_ns.size(), "a queue for each op or for none", "input", 0);
  for (std::size_t i = 0; i < in.queues.size(); ++i) {
    const std::int32_t awaits = in.queues[i].awaits;
    const bool is_before = -1 <= awaits && awaits < static_cast<std::int32_t>(i);
    require(is_before && (awaits < 0 || in.queues[static_cast<std::size_t>(awaits)].is_communication),
            "awaits of -1 or an op of communication before it", "op", i);
  }
  for (std::size_t i = 0; i < in.transfers.size(); ++i) {
    const auto& t = in.transfers[i];
    require(is_window(t.issue_at, t.ready_by), "0 <= issue_at <= n and issue_at <= ready_by <= issue_at + n", "transfer", i);
    require(t.source != t.target && std::max(t.source, t.target) <= SimulatedTier::kNvme && t.size_bytes > 0,
            "two different tiers and a size > 0", "transfer", i);
    const auto& link = in.links[link_of(t)];
    require(link.bytes_per_s > 0 && link.latency_ns >= 0, "a link with a bandwidth > 0 and a latency >= 0", "transfer", i);
  }
  for (std::size_t i = 0; i < in.updates.size(); ++i) {
    const auto& u = in.updates[i];
    require(is_window(u.issue_at, u.ready_by) && u.duration_ns >= 0,
            "0 <= issue_at <= n, issue_at <= ready_by <= issue_at + n and a duration >= 0", "update", i);
  }
  for (std::size_t i = 0; i < in.repeats.size(); ++i) {
    require(0 <= in.repeats[i].op && in.repeats[i].op < in.repeats[i].at && in.repeats[i].at < n, "0 <= op < at < n", "repeat",
            i);
  }
}

Program::Program(const SimulationInput& in, const Rates& rates) {
  add_items(in, rates);
  std::vector<std::pair<std::int32_t, std::int32_t>> entries[5];
  const auto n = static_cast<std::int32_t>(in.op_ns.size());
  const auto fold = [n](std::int32_t tick) { return tick <= n ? tick : tick - n; };
  const auto add = [&](std::int32_t item, std::int32_t issue_at, std::int32_t ready_by, bool leads_in) {
    const bool is_first = !leads_in && issue_at == ready_by;
    entries[is_first ? 0 : 2].emplace_back(fold(issue_at), item);
    entries[leads_in ? 3 : 1].emplace_back(fold(ready_by), item);
    items[static_cast<std::size_t>(item)].crosses = ready_by > n;
  };
  for (const std::int32_t i : order_by_rank(in.transfers)) {
    const auto& t = in.transfers[static_cast<std::size_t>(i)];
    add(i, t.issue_at, t.ready_by, t.target == SimulatedTier::kDevice);
  }
  auto item = static_cast<std::int32_t>(in.transfers.size());
  for (const auto& u : in.updates) add(item++, u.issue_at, u.ready_by, false);
  std::vector<std::int32_t> order(in.repeats.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](std::int32_t i) { return in.repeats[static_cast<std::size_t>(i)].op; });
  for (const std::int32_t i : order) entries[4].emplace_back(in.repeats[static_cast<std::size_t>(i)].at, i);
  const auto tick_count = static_cast<std::size_t>(n) + 1;
  Lists* const lists[] = {&issue_first, &await_first, &issue, &await_last, &repeats};
  for (std::size_t i = 0; i < 5; ++i) *lists[i] = Lists(tick_count, entries[i]);
}

void Program::add_items(const SimulationInput& in, const Rates& rates) {
  items.reserve(in.transfers.size() + in.updates.size());
  Wide most_ns = 0;  // all work one after the other, at the lowest rates
  unsigned used = 0;
  Wide wanted[kLaneCount]{};  // of the host's memory, per second and lane
  for (const auto& t : in.transfers) {
    const auto link = link_of(t);
    const bool touches = touches_device(t);
    const std::int64_t passes = rates.passes(link, touches);
    const Wide work = static_cast<Wide>(t.size_bytes) * kNsPerS;
    const std::int64_t latency_ns = in.links[link].latency_ns;
    const std::int64_t least = rates.least(link, touches);
    const Wide slow_ns = (work + static_cast<Wide>(least) - 1) / static_cast<Wide>(least);
    most_ns += slow_ns + static_cast<Wide>(latency_ns);
    if (most_ns >> 62U != 0) break;  // refused below
    items.push_back({.latency_ns = latency_ns,
                     .alone_ns = latency_ns + ceil_div(work, rates.of(link, touches, 0)),
                     .work = work,
                     .lane = static_cast<std::uint8_t>(in.has_exclusive_link && link == kH2d ? kD2h : link),
                     .link = static_cast<std::uint8_t>(link),
                     .touches_device = touches});
    Wide& own = wanted[items.back().lane];
    own = std::max(own, static_cast<Wide>(rates.of(link, touches, 0)) * static_cast<Wide>(passes));
    if (touches) used |= 1U << link;
  }
  for (const auto& u : in.updates) {
    const Wide work = static_cast<Wide>(u.duration_ns) * static_cast<Wide>(rates.of_update());
    items.push_back({.alone_ns = u.duration_ns, .work = work, .lane = kCpu});
    wanted[kCpu] = static_cast<Wide>(rates.of_update()) * static_cast<Wide>(rates.passes_of_update());
    const auto least = static_cast<Wide>(rates.least_of_update());
    most_ns += (work + least - 1) / least;
  }
  for (const std::int64_t op_ns : in.op_ns) most_ns += static_cast<Wide>(op_ns);
  for (const auto& repeat : in.repeats) most_ns += static_cast<Wide>(in.op_ns[static_cast<std::size_t>(repeat.op)]);
  if (most_ns * static_cast<Wide>(in.step_count_max + 1) >> 62U != 0) {
    throw std::overflow_error("expected " + std::to_string(in.step_count_max) +
                              " steps that take less than 2^62 ns with everything one after the other");
  }
  const bool is_duplex_slow = in.duplex_share_millionths < kMillion && !in.has_exclusive_link && (used & 3U) == 3U;
  const bool is_memory_full = rates.exceeds_memory(std::accumulate(std::begin(wanted), std::end(wanted), Wide{0}));
  is_shared = is_memory_full || is_duplex_slow || (in.nvme_shares_host_link && ((used & 5U) == 5U || (used & 10U) == 10U));
}

}  // namespace tieroff::simulation
