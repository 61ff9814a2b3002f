#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "tieroff/simulate/simulate.hpp"

namespace tieroff {
namespace {

void check(const MemoryInput& in) {
  const auto n = static_cast<std::int64_t>(in.transient_bytes.size());
  for (const auto& r : in.residencies) {
    const bool is_inside = 0 <= r.start && r.start < n && r.start < r.stop && r.stop <= r.start + n;
    if (!is_inside || r.tier > SimulatedTier::kNvme || r.size_bytes < 0) {
      throw std::invalid_argument("expected residencies with 0 <= start < n, start < stop <= start + n, a tier and bytes");
    }
  }
  for (const auto& repeat : in.repeats) {
    if (!(0 <= repeat.op && repeat.op < repeat.at && repeat.at < n)) {
      throw std::invalid_argument("expected repeats with 0 <= op < at < n");
    }
  }
  if (!in.addresses.empty() && in.addresses.size() != in.residencies.size()) {
    throw std::invalid_argument("expected one address per residency, or none");
  }
}

// Highest end of what is held on the device at each op: intervals from the highest end down, each op painted once.
std::vector<std::int64_t> highest_ends(const MemoryInput& in) {
  const std::size_t n = in.transient_bytes.size();
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < in.residencies.size(); ++i) {
    if (in.residencies[i].tier == SimulatedTier::kDevice) order.push_back(i);
  }
  const auto end_of = [&](std::size_t i) { return in.addresses[i] + in.residencies[i].size_bytes; };
  std::ranges::sort(order, std::ranges::greater{}, end_of);
  std::vector<std::int64_t> ends(n);
  std::vector<std::size_t> next(n + 1);  // the first op from here on that is not painted
  std::iota(next.begin(), next.end(), std::size_t{0});
  const auto find = [&](std::size_t op) {
    while (next[op] != op) op = next[op] = next[next[op]];
    return op;
  };
  const auto paint = [&](std::size_t start, std::size_t stop, std::int64_t end) {
    for (std::size_t op = find(start); op < stop; op = find(op)) {
      ends[op] = end;
      next[op] = op + 1;
    }
  };
  for (const std::size_t i : order) {
    const auto start = static_cast<std::size_t>(in.residencies[i].start);
    const auto stop = static_cast<std::size_t>(in.residencies[i].stop);
    paint(start, std::min(stop, n), end_of(i));
    if (stop > n) paint(0, stop - n, end_of(i));
  }
  return ends;
}

}  // namespace

std::array<std::vector<std::int64_t>, 3> memory_per_op(const MemoryInput& input) {
  check(input);
  const std::size_t n = input.transient_bytes.size();
  std::array<std::vector<std::int64_t>, 3> memory;
  memory.fill(std::vector<std::int64_t>(2 * n + 1));
  const bool has_addresses = !input.addresses.empty();
  for (const auto& r : input.residencies) {
    if (r.tier == SimulatedTier::kDevice && has_addresses) continue;
    auto& line = memory[static_cast<std::size_t>(r.tier)];
    line[static_cast<std::size_t>(r.start)] += r.size_bytes;
    line[static_cast<std::size_t>(r.stop)] -= r.size_bytes;
  }
  for (auto& line : memory) {
    std::partial_sum(line.begin(), line.end(), line.begin());
    for (std::size_t op = 0; op < n; ++op) line[op] += line[op + n];
    line.resize(n);
  }
  auto& device = memory[0];
  if (has_addresses) device = highest_ends(input);
  std::vector<std::int64_t> transient(input.transient_bytes.begin(), input.transient_bytes.end());
  for (const auto& repeat : input.repeats) {
    auto& most = transient[static_cast<std::size_t>(repeat.at)];
    most = std::max(most, input.transient_bytes[static_cast<std::size_t>(repeat.op)]);
  }
  for (std::size_t op = 0; op < n; ++op) device[op] += transient[op];
  return memory;
}

}  // namespace tieroff
