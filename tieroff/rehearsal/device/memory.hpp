// Memory that is counted and has no bytes behind it: the device's, and the host's tiers below it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>

#include "clock.hpp"

namespace rehearsal {

struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Figures {
  int64_t allocated = 0, peak = 0, step_peak = 0, reserved = 0, reserved_peak = 0;
  int64_t allocations = 0, frees = 0, allocated_sum = 0, freed_sum = 0;
};

// Addresses of device memory, of which an access by the host is a fault.
void* allocate(size_t size);
void free_block(void* address);
// All that is read of the device is zero, but for the answer of `all`, which is kept as true while its block is there: checks
// that all is as it should be then find so.
void mark_true(void* address);
bool is_true(void* address);
Figures figures();
void restart_peaks();
void restart_step_peak();  // beside the peak that the program restarts as it likes
void empty_cache();
void set_device_bytes(size_t bytes);
size_t device_bytes();

// Memory of the host: reads as zeros, and takes pages only where the program itself writes.
void* map_host(size_t size, bool is_drive);
void unmap_host(void* address);
bool is_mapped(const void* address);
bool is_drive(const void* address);

}  // namespace rehearsal
