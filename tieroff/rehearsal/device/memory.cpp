#include "memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace rehearsal {

namespace {

constexpr size_t kRounding = 512;             // as CUDA's allocator rounds
constexpr size_t kAddresses = size_t{1} << 44;  // of which the same sizes are given again and again

std::mutex memory_mutex;
char* first = nullptr;
size_t given = 0;
size_t total = 0;
std::unordered_map<size_t, std::vector<void*>> unused;  // by size; the last freed is the first given
std::unordered_map<void*, size_t> sizes;
std::unordered_set<void*> truths;
Figures held;

struct Mapped {
  size_t size;
  bool is_drive;
};
std::map<const char*, Mapped> mapped;  // by first address

void* new_addresses(size_t size) {
  if (first == nullptr) {
    void* made = mmap(nullptr, kAddresses, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) throw OutOfMemory("rehearsal: no address space of " + std::to_string(kAddresses) + " bytes is left; raise `ulimit -v`");
    first = static_cast<char*>(made);
  }
  if (given + size > kAddresses) throw OutOfMemory("rehearsal: the device's addresses are used up: too many different sizes were asked for");
  void* address = first + given;
  given += size;
  return address;
}

const Mapped* at(const void* address) {
  auto found = mapped.upper_bound(static_cast<const char*>(address));
  if (found == mapped.begin()) return nullptr;
  --found;
  return static_cast<const char*>(address) < found->first + found->second.size ? &found->second : nullptr;
}

}  // namespace

void* allocate(size_t size) {
  const size_t rounded = (size + kRounding - 1) / kRounding * kRounding;
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const auto bytes = static_cast<int64_t>(rounded);
  if (static_cast<size_t>(held.allocated) + rounded > total)
    throw OutOfMemory("CUDA out of memory (rehearsed). Tried to allocate " + std::to_string(rounded) + " bytes; of " + std::to_string(total) +
                      " bytes " + std::to_string(held.allocated) + " are allocated.");
  auto& same = unused[rounded];
  void* address;
  if (same.empty()) {
    address = new_addresses(rounded);
  } else {
    address = same.back();
    same.pop_back();
  }
  sizes[address] = rounded;
  held.allocated += bytes;
  held.allocated_sum += bytes;
  held.allocations++;
  held.peak = std::max(held.peak, held.allocated);
  held.step_peak = std::max(held.step_peak, held.allocated);
  held.reserved = std::max(held.reserved, held.allocated);
  held.reserved_peak = std::max(held.reserved_peak, held.reserved);
  return address;
}

void free_block(void* address) {
  if (address == nullptr) return;
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const auto found = sizes.find(address);
  if (found == sizes.end()) return;
  unused[found->second].push_back(address);
  held.allocated -= static_cast<int64_t>(found->second);
  held.freed_sum += static_cast<int64_t>(found->second);
  held.frees++;
  sizes.erase(found);
  truths.erase(address);
}

void mark_true(void* address) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  truths.insert(address);
}

bool is_true(void* address) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return truths.count(address) > 0;
}

Figures figures() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return held;
}

void restart_peaks() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  held.peak = held.allocated;
  held.reserved_peak = held.reserved;
}

void restart_step_peak() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  held.step_peak = held.allocated;
}

void empty_cache() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  held.reserved = held.allocated;
}

void set_device_bytes(size_t bytes) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  total = bytes;
}

size_t device_bytes() {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return total;
}

void* map_host(size_t size, bool is_drive) {
  if (size == 0) size = 1;
  void* made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) throw OutOfMemory("rehearsal: no address space of " + std::to_string(size) + " bytes is left; raise `ulimit -v`");
  const std::lock_guard<std::mutex> lock(memory_mutex);
  mapped[static_cast<char*>(made)] = {size, is_drive};
  return made;
}

void unmap_host(void* address) {
  size_t size;
  {
    const std::lock_guard<std::mutex> lock(memory_mutex);
    const auto found = mapped.find(static_cast<char*>(address));
    if (found == mapped.end()) return;
    size = found->second.size;
    mapped.erase(found);
  }
  munmap(address, size);
}

bool is_mapped(const void* address) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  return at(address) != nullptr;
}

bool is_drive(const void* address) {
  const std::lock_guard<std::mutex> lock(memory_mutex);
  const Mapped* found = at(address);
  return found != nullptr && found->is_drive;
}

}  // namespace rehearsal
