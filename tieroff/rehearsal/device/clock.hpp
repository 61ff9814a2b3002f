// The device's clock: when kernels and copies of a given machine begin and end, while the host's time is its own.
#pragma once
#include <array>
#include <cstdint>
#include <memory>

namespace rehearsal {

constexpr int kStreams = 33;  // the default one, and the pool that new ones are dealt from, round and round

enum Link { kToDevice, kToHost, kNvmeRead, kNvmeWrite, kLinks };

struct Rate {
  double bytes_per_s = 0, latency_s = 0;  // a rate of 0 takes no time
};

struct Rates {
  std::array<Rate, kLinks> links;
  double duplex_share = 1;  // what both directions of the host link move at once, over the sum of each alone
};

// A point of a stream's work: when it is over, and when the host asked for the last of it.
struct Event {
  int64_t time_ns = 0, asked_ns = 0;
};

// What happened since `restart_counters`. Times in ns.
struct Counters {
  int64_t device_ns = 0;  // when the last kernel is over
  int64_t kernels = 0;
  int64_t busy_ns = 0;     // kernels ran
  int64_t copying_ns = 0;  // no kernel ran, and the next one waited for another stream: for a copy
  int64_t starved_ns = 0;  // no kernel ran, and the next one had not been submitted by the host
  int64_t waited_ns = 0;   // threads that submit kernels waited for the device
  int64_t values = 0;      // numbers and tensors that the program read from the device, and got zeros for
  std::array<int64_t, kLinks> bytes{}, copies{};
};

int64_t now_ns();  // of the host's monotonic clock, on which the device's times lie too
void set_rates(const Rates& rates);
Counters counters();
void restart_counters();
void count_value();

void launch(int64_t stream, int64_t cost_ns);
void copy(int64_t stream, Link link, double bytes);
void record(Event& event, int64_t stream);
void wait_event(int64_t stream, const Event& event);
bool is_idle(int64_t stream);
void synchronize(int64_t stream);
void synchronize_all();
void synchronize(const Event& event);

int64_t current_stream();
int64_t exchange_stream(int64_t stream);
int64_t new_stream();

}  // namespace rehearsal
