// Device memory: addresses that the host cannot touch, a caching allocator over them, and poison where nothing is.
#pragma once
#include <cstddef>
#include <stdexcept>
#include <string>

#include "stream.hpp"

namespace sim {

constexpr unsigned char kPoison = 0xFF;  // NaN in every floating type, -1 in every integer
constexpr size_t kPage = 4096;

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Figures {
  int64_t allocated = 0, allocated_peak = 0, requested = 0, requested_peak = 0, reserved = 0, reserved_peak = 0;
  int64_t allocations = 0, frees = 0, allocated_sum = 0, freed_sum = 0, retries = 0, refusals = 0;
};

// Memory that accesses are noted of.
struct Held {
  AccessLog* log = nullptr;
  const char* base = nullptr;
  size_t size = 0;
  bool is_device = false;
};

int device_at(const void* address);  // -1 where it is not device memory
// Where a kernel reads and writes the bytes of a device address.
char* kernel_view(const void* address);
void* allocate(int device, Stream& stream, size_t size);
void free_block(void* address);
void record_use(void* address, Stream& stream);
void empty_cache(int device);
Figures figures_of(int device);
void restart_peaks(int device);
void set_total(size_t bytes);
size_t total_bytes();
Held held_at(const void* address);
std::string describe(const Held& held);
void forget_accesses();

}  // namespace sim
