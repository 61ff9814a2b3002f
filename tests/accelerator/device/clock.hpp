// The device's own time: how long kernels and copies take on a given machine, whatever the host's clock says.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace sim {

// What of a device does the work; each does one thing at a time.
enum class Engine { kCompute, kToDevice, kToHost, kNone };

// Rates in units per second; a rate of 0 takes no time.
struct Rates {
  double fp32_flops = 0, half_flops = 0, memory_bytes = 0;
  double to_device_bytes = 0, to_host_bytes = 0;
  double to_device_latency_s = 0, to_host_latency_s = 0;
  double duplex_share = 1;  // what both directions move at once, over the sum of each alone
  double kernel_s = 0;      // every kernel takes this besides
};

struct Cost {
  double flops = 0, bytes = 0;
  bool is_half = false;
};

struct Entry {
  int device;
  Engine engine;
  std::string stream, name;
  int64_t start_ns, stop_ns;
};

// All of these are called with the state locked.
void set_rates(const Rates& rates);
bool has_rates();
void forget_rates();
// Returns when work that may start at `ready_ns` is over, having taken its engine for that long.
int64_t reserve(int device, Engine engine, const Cost& cost, int64_t ready_ns, const std::string& stream, const char* name);
std::vector<Entry> timeline();
void keep_timeline(bool is_on);
void restart_time();

}  // namespace sim
