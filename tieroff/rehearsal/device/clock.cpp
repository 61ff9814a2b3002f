#include "clock.hpp"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <deque>
#include <mutex>

namespace rehearsal {

namespace {

constexpr double kNsPerS = 1e9;

struct Interval {
  int64_t start, stop;
};

// Guards all that follows; nobody sleeps while holding it.
std::mutex clock_mutex;
Rates rates;
std::array<Event, kStreams> ready{};            // per stream: the end of all that it was given
int64_t compute_free = 0;                       // when the last kernel is over
std::array<std::deque<Interval>, kLinks> busy;  // per link: copies that are not over yet
Counters so_far;
std::atomic<int64_t> waited_ns{0}, values{0};
std::atomic<int64_t> dealt{0};
thread_local int64_t current = 0;
thread_local bool submits = false;  // a thread that only waits (for a drive, say) holds up nobody

Link opposite(Link link) { return link == kToDevice ? kToHost : kToDevice; }

// A copy over the host link from `start` on: as fast as the link is alone, and slower while the other direction is busy. The
// direction that was asked first keeps its rate, and this one has the rest of what both move together.
int64_t copy_stop(Link link, double bytes, int64_t start) {
  const Rate& rate = rates.links[link];
  double now = static_cast<double>(start) + rate.latency_s * kNsPerS;
  if (rate.bytes_per_s <= 0) return static_cast<int64_t>(now);
  if (link == kToDevice || link == kToHost) {
    const double other = rates.links[opposite(link)].bytes_per_s;
    const double beside = std::max(rate.bytes_per_s * 0.01, rates.duplex_share * (rate.bytes_per_s + other) - other);
    for (const Interval& one : busy[opposite(link)]) {
      if (static_cast<double>(one.stop) <= now) continue;
      const double until = std::max(now, static_cast<double>(one.start));
      const double alone = rate.bytes_per_s * (until - now) / kNsPerS;
      if (bytes <= alone) break;
      bytes -= alone;
      now = until;
      const double both = beside * (static_cast<double>(one.stop) - now) / kNsPerS;
      if (bytes <= both) return static_cast<int64_t>(now + bytes / beside * kNsPerS);
      bytes -= both;
      now = static_cast<double>(one.stop);
    }
  }
  return static_cast<int64_t>(std::ceil(now + bytes / rate.bytes_per_s * kNsPerS));
}

void sleep_until(int64_t when_ns) {
  const int64_t begun = now_ns();
  if (when_ns <= begun) return;
  const timespec until{when_ns / 1000000000, when_ns % 1000000000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
  if (submits) waited_ns += now_ns() - begun;
}

}  // namespace

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

void set_rates(const Rates& given) {
  const std::lock_guard<std::mutex> lock(clock_mutex);
  rates = given;
}

Counters counters() {
  const std::lock_guard<std::mutex> lock(clock_mutex);
  Counters all = so_far;
  all.waited_ns = waited_ns;
  all.values = values;
  all.device_ns = compute_free;
  return all;
}

void restart_counters() {
  const std::lock_guard<std::mutex> lock(clock_mutex);
  so_far = {};
  waited_ns = values = 0;
}

void count_value() { values++; }

void launch(int64_t stream, int64_t cost_ns) {
  submits = true;
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(clock_mutex);
  const int64_t waits_for = std::max(ready[stream].time_ns, compute_free);
  const int64_t start = std::max(waits_for, now);
  if (compute_free > 0) {
    // What it waits for may itself have been asked for late.
    const int64_t asked = std::clamp(ready[stream].asked_ns, compute_free, waits_for);
    so_far.copying_ns += waits_for - asked;
    so_far.starved_ns += asked - compute_free + start - waits_for;
  }
  so_far.kernels++;
  so_far.busy_ns += cost_ns;
  compute_free = start + cost_ns;
  ready[stream] = {compute_free, now};
}

void copy(int64_t stream, Link link, double bytes) {
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(clock_mutex);
  for (auto& one : busy)
    while (!one.empty() && one.front().stop <= now) one.pop_front();
  int64_t start = std::max(ready[stream].time_ns, now);
  if (!busy[link].empty()) start = std::max(start, busy[link].back().stop);
  const int64_t stop = copy_stop(link, bytes, start);
  busy[link].push_back({start, stop});
  so_far.bytes[link] += static_cast<int64_t>(bytes);
  so_far.copies[link]++;
  ready[stream] = {stop, now};
}

void record(Event& event, int64_t stream) {
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(clock_mutex);
  event = ready[stream].time_ns > now ? ready[stream] : Event{now, now};
}

void wait_event(int64_t stream, const Event& event) {
  const std::lock_guard<std::mutex> lock(clock_mutex);
  if (event.time_ns > ready[stream].time_ns) ready[stream] = event;
}

bool is_idle(int64_t stream) {
  const int64_t now = now_ns();
  const std::lock_guard<std::mutex> lock(clock_mutex);
  return ready[stream].time_ns <= now;
}

void synchronize(int64_t stream) {
  int64_t until;
  {
    const std::lock_guard<std::mutex> lock(clock_mutex);
    until = ready[stream].time_ns;
  }
  sleep_until(until);
}

void synchronize_all() {
  int64_t until;
  {
    const std::lock_guard<std::mutex> lock(clock_mutex);
    until = 0;
    for (const Event& one : ready) until = std::max(until, one.time_ns);
  }
  sleep_until(until);
}

void synchronize(const Event& event) { sleep_until(event.time_ns); }

int64_t current_stream() { return current; }

int64_t exchange_stream(int64_t stream) {
  const int64_t before = current;
  current = stream;
  return before;
}

int64_t new_stream() { return 1 + dealt++ % (kStreams - 1); }

}  // namespace rehearsal
