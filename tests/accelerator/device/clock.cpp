#include "clock.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

namespace sim {

namespace {

constexpr double kNsPerS = 1e9;

struct Interval {
  int64_t start, stop;
};
// When an engine is busy: in order, with neighbours merged.
using Busy = std::vector<Interval>;

std::optional<Rates> rates;
std::map<std::pair<int, Engine>, Busy> busy;
std::vector<Entry> entries;
bool keeps_entries = false;

void add(Busy& all, int64_t start, int64_t stop) {
  if (start == stop) return;
  auto at = std::lower_bound(all.begin(), all.end(), start, [](const Interval& a, int64_t t) { return a.start < t; });
  at = all.insert(at, {start, stop});
  if (at != all.begin() && std::prev(at)->stop == at->start) {
    std::prev(at)->stop = at->stop;
    at = std::prev(all.erase(at));
  }
  const auto next = std::next(at);
  if (next != all.end() && at->stop == next->start) {
    at->stop = next->stop;
    all.erase(next);
  }
}

double kernel_ns(const Cost& cost) {
  const double flops = cost.is_half && rates->half_flops > 0 ? rates->half_flops : rates->fp32_flops;
  const double compute = flops > 0 ? cost.flops / flops : 0;
  const double memory = rates->memory_bytes > 0 ? cost.bytes / rates->memory_bytes : 0;
  return (std::max(compute, memory) + rates->kernel_s) * kNsPerS;
}

// A copy that starts at `start`: as fast as its link is alone, and slower while the other direction is busy. The direction
// that was asked first keeps its rate and this one gets the rest of what both move together, so that the sum is right.
int64_t copy_stop(int device, Engine engine, double bytes, int64_t start) {
  const bool is_in = engine == Engine::kToDevice;
  const double alone = is_in ? rates->to_device_bytes : rates->to_host_bytes;
  const double other = is_in ? rates->to_host_bytes : rates->to_device_bytes;
  const double latency = is_in ? rates->to_device_latency_s : rates->to_host_latency_s;
  double now = static_cast<double>(start) + latency * kNsPerS;
  if (alone <= 0) return static_cast<int64_t>(std::ceil(now));
  const double beside = std::max(alone * 0.01, rates->duplex_share * (alone + other) - other);
  for (const Interval& one : busy[{device, is_in ? Engine::kToHost : Engine::kToDevice}]) {
    if (static_cast<double>(one.stop) <= now) continue;
    const double until = std::max(now, static_cast<double>(one.start));
    if (bytes <= alone * (until - now) / kNsPerS) break;
    bytes -= alone * (until - now) / kNsPerS;
    now = until;
    const double in_both = beside * (static_cast<double>(one.stop) - now) / kNsPerS;
    if (bytes <= in_both) return static_cast<int64_t>(std::ceil(now + bytes / beside * kNsPerS));
    bytes -= in_both;
    now = static_cast<double>(one.stop);
  }
  return static_cast<int64_t>(std::ceil(now + bytes / alone * kNsPerS));
}

int64_t stop_from(int device, Engine engine, const Cost& cost, int64_t start) {
  if (engine == Engine::kCompute) return start + static_cast<int64_t>(std::ceil(kernel_ns(cost)));
  return copy_stop(device, engine, cost.bytes, start);
}

}  // namespace

void set_rates(const Rates& given) { rates = given; }
bool has_rates() { return rates.has_value(); }
void forget_rates() { rates.reset(); }

int64_t reserve(int device, Engine engine, const Cost& cost, int64_t ready_ns, const std::string& stream, const char* name) {
  if (!rates || engine == Engine::kNone) return ready_ns;
  Busy& own = busy[{device, engine}];
  // The first gap that it fits into: work that was submitted earlier, but waits for something, holds nobody up.
  int64_t start = ready_ns, stop = stop_from(device, engine, cost, start);
  for (const Interval& one : own) {
    if (one.stop <= start) continue;
    if (one.start >= stop) break;
    start = one.stop;
    stop = stop_from(device, engine, cost, start);
  }
  add(own, start, stop);
  if (keeps_entries) entries.push_back({device, engine, stream, name, start, stop});
  return stop;
}

std::vector<Entry> timeline() { return entries; }

void keep_timeline(bool is_on) {
  keeps_entries = is_on;
  entries.clear();
}

void restart_time() {
  busy.clear();
  entries.clear();
}

}  // namespace sim
