#include "memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>

#include "pinned.hpp"

namespace sim {

namespace {

constexpr size_t kArena = size_t{64} << 30;  // of addresses; pages come as they are written
constexpr size_t kUnit = 512;                // CUDA's allocator rounds to this too

std::atomic<size_t> total{size_t{8} << 30};

struct Block {
  char* start;
  size_t size, asked;
  Stream* stream;               // whose order its bytes follow
  std::vector<Stream*> others;  // that were recorded as users
  AccessLog log;
  bool is_poisoned = true;
};

// Freed while other streams' users were recorded: it returns when they are done.
struct Deferred {
  Block block;
  std::vector<std::pair<Stream*, int64_t>> tickets;
  Clock clock;
};

struct Device {
  char* base;  // what tensors point to: no page ever stands behind it
  char* view;  // the same bytes for kernels
  std::map<char*, size_t> ranges;  // that no block has
  std::map<char*, Block> live;
  std::map<std::pair<Stream*, size_t>, std::vector<Block>> cached;  // the last one freed is given first
  std::vector<Deferred> deferred;
  Figures figures;
};

char* reserve_addresses(int access) {
  void* start = mmap(nullptr, kArena, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) throw std::runtime_error("sim: expected address space for device memory, mmap failed");
  return static_cast<char*>(start);
}

Device* devices() {
  static auto* all = [] {
    auto* made = new Device[kDevices];
    for (int d = 0; d < kDevices; d++) {
      made[d].base = reserve_addresses(PROT_NONE);
      made[d].view = reserve_addresses(PROT_READ | PROT_WRITE);
      madvise(made[d].view, kArena, MADV_DONTFORK);
      made[d].ranges[made[d].base] = kArena;
    }
    return made;
  }();
  return all;
}

void give_range(Device& device, char* start, size_t size) {
  auto at = device.ranges.emplace(start, size).first;
  const auto next = std::next(at);
  if (next != device.ranges.end() && start + size == next->first) {
    at->second += next->second;
    device.ranges.erase(next);
  }
  if (at == device.ranges.begin()) return;
  const auto previous = std::prev(at);
  if (previous->first + previous->second != at->first) return;
  previous->second += at->second;
  device.ranges.erase(at);
}

char* take_range(Device& device, size_t size) {
  for (auto at = device.ranges.begin(); at != device.ranges.end(); ++at) {
    if (at->second < size) continue;
    char* start = at->first;
    const size_t left = at->second - size;
    device.ranges.erase(at);
    if (left > 0) device.ranges[start + size] = left;
    return start;
  }
  throw OutOfMemory("sim: the addresses of the device are in pieces");
}

void poison(Block& block) {
  char* to = kernel_view(block.start);
  const size_t size = block.size;
  block.stream->push([to, size] { std::memset(to, kPoison, size); });
  block.is_poisoned = true;
}

Access whole(const Block& block, Actor actor, uint64_t step, const Place& place) {
  Span span;
  span.high = static_cast<int64_t>(block.size);
  return {actor, step, true, span, place};
}

// Where all users are ordered before the free, its poison is one more kernel of the block's stream. Where one is not, the
// program may still order it before the block is given again: only then is the pair looked at.
void cache(Device& device, Block&& block, const Clock& known, const Place& place) {
  block.log.forget_ordered(known);
  if (block.log.is_empty()) {
    Clock& clock = clock_of(block.stream->actor);
    clock.set(block.stream->actor, clock.of(block.stream->actor) + 1);
    block.log.note(whole(block, block.stream->actor, clock.of(block.stream->actor), place), clock);
    poison(block);
  } else {
    counters().unordered_frees++;
    block.is_poisoned = false;
  }
  device.cached[{block.stream, block.size}].push_back(std::move(block));
}

void take_back_deferred(Device& device) {
  auto& all = device.deferred;
  for (size_t i = 0; i < all.size();) {
    const bool is_over = std::all_of(all[i].tickets.begin(), all[i].tickets.end(),
                                     [](const auto& one) { return one.first->is_over(one.second); });
    if (!is_over) {
      i++;
      continue;
    }
    Deferred one = std::move(all[i]);
    all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
    cache(device, std::move(one.block), one.clock, {"free"});
  }
}

bool take_cached(Device& device, Stream& stream, size_t size, Block* block) {
  take_back_deferred(device);
  auto& pool = device.cached[{&stream, size}];
  if (pool.empty()) return false;
  *block = std::move(pool.back());
  pool.pop_back();
  return true;
}

bool is_full(const Device& device, size_t size) { return device.figures.reserved + size > total; }

Block carve(Device& device, Stream& stream, size_t size) {
  Block block{take_range(device, size), size, 0, &stream, {}, {}, true};
  std::memset(kernel_view(block.start), kPoison, size);
  device.figures.reserved += static_cast<int64_t>(size);
  device.figures.reserved_peak = std::max(device.figures.reserved_peak, device.figures.reserved);
  return block;
}

void refuse(int index, Device& device, size_t size) {
  device.figures.refusals++;
  throw OutOfMemory("sim out of memory: tried to allocate " + std::to_string(size) + " bytes on sim:" + std::to_string(index) +
                    ", which has " + std::to_string(total) + ", of which " + std::to_string(device.figures.allocated) +
                    " are allocated and " + std::to_string(device.figures.reserved) + " reserved");
}

}  // namespace

int device_at(const void* address) {
  const auto* at = static_cast<const char*>(address);
  for (int d = 0; d < kDevices; d++)
    if (at >= devices()[d].base && at < devices()[d].base + kArena) return d;
  return -1;
}

char* kernel_view(const void* address) {
  if (address == nullptr) return nullptr;
  const int d = device_at(address);
  if (d < 0) throw std::runtime_error("sim: expected the address of device memory");
  return devices()[d].view + (static_cast<const char*>(address) - devices()[d].base);
}

void* allocate(int index, Stream& stream, size_t asked) {
  const size_t size = (asked + kUnit - 1) / kUnit * kUnit;
  Device& device = devices()[index];
  Block block{};
  std::unique_lock<std::recursive_mutex> lock(state_mutex());
  if (!take_cached(device, stream, size, &block)) {
    if (is_full(device, size)) {
      device.figures.retries++;
      lock.unlock();
      empty_cache(index);
      lock.lock();
      if (is_full(device, size)) refuse(index, device, asked);
    }
    block = carve(device, stream, size);
  }
  block.asked = asked;
  char* start = block.start;
  const bool is_poisoned = block.is_poisoned;
  Block& placed = device.live[start] = std::move(block);
  device.figures.allocations++;
  device.figures.allocated += static_cast<int64_t>(size);
  device.figures.allocated_sum += static_cast<int64_t>(size);
  device.figures.requested += static_cast<int64_t>(asked);
  device.figures.allocated_peak = std::max(device.figures.allocated_peak, device.figures.allocated);
  device.figures.requested_peak = std::max(device.figures.requested_peak, device.figures.requested);
  if (!is_poisoned) poison(placed);
  lock.unlock();
  Span span;
  span.high = static_cast<int64_t>(size);
  submit({"allocate", stream, {{start, span, true}}}, nullptr);
  return start;
}

void free_block(void* address) {
  if (is_in_forked_child()) return;
  const int d = device_at(address);
  if (d < 0) return;
  const Place place = here("free");
  Device& device = devices()[d];
  Locked lock(state_mutex());
  const auto found = device.live.find(static_cast<char*>(address));
  if (found == device.live.end()) return;
  Block block = std::move(found->second);
  device.live.erase(found);
  device.figures.frees++;
  device.figures.allocated -= static_cast<int64_t>(block.size);
  device.figures.freed_sum += static_cast<int64_t>(block.size);
  device.figures.requested -= static_cast<int64_t>(block.asked);
  Clock known = clock_of(block.stream->actor);
  known.join(clock_of(host_actor()));
  if (block.others.empty()) {
    cache(device, std::move(block), known, place);
    return;
  }
  Deferred later{std::move(block), {}, known};
  for (Stream* other : later.block.others) {
    later.tickets.emplace_back(other, other->last_ticket());
    later.clock.join(clock_of(other->actor));
  }
  later.block.others.clear();
  device.deferred.push_back(std::move(later));
}

void record_use(void* address, Stream& stream) {
  const int d = device_at(address);
  if (d < 0) return;
  Locked lock(state_mutex());
  const auto found = devices()[d].live.find(static_cast<char*>(address));
  if (found == devices()[d].live.end()) return;
  Block& block = found->second;
  const bool is_known = std::find(block.others.begin(), block.others.end(), &stream) != block.others.end();
  if (block.stream != &stream && !is_known) block.others.push_back(&stream);
}

void empty_cache(int index) {
  // Giving memory back to the driver waits for the device; only then may another stream have it.
  for (Stream* one : streams_of(index)) one->wait(one->last_ticket());
  Device& device = devices()[index];
  Locked lock(state_mutex());
  take_back_deferred(device);
  for (auto& [key, pool] : device.cached)
    for (Block& block : pool) {
      // Poison that was queued just now, or a user that nothing orders, may still write there: such a block stays.
      if (!block.stream->is_over(block.stream->last_ticket())) continue;
      char* view = kernel_view(block.start);
      auto* from = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(view) + kPage - 1) / kPage * kPage);
      auto* to = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(view + block.size) / kPage * kPage);
      if (from < to) madvise(from, static_cast<size_t>(to - from), MADV_DONTNEED);
      give_range(device, block.start, block.size);
      device.figures.reserved -= static_cast<int64_t>(block.size);
      block.start = nullptr;
    }
  for (auto& [key, pool] : device.cached)
    pool.erase(std::remove_if(pool.begin(), pool.end(), [](const Block& one) { return one.start == nullptr; }), pool.end());
}

Figures figures_of(int device) {
  Locked lock(state_mutex());
  return devices()[device].figures;
}

void restart_peaks(int device) {
  Locked lock(state_mutex());
  Figures& figures = devices()[device].figures;
  figures.allocated_peak = figures.allocated;
  figures.requested_peak = figures.requested;
  figures.reserved_peak = figures.reserved;
}

void set_total(size_t bytes) { total = bytes; }
size_t total_bytes() { return total; }

Held held_at(const void* address) {
  const int d = device_at(address);
  if (d < 0) return pinned_at(address);
  auto& live = devices()[d].live;
  auto found = live.upper_bound(const_cast<char*>(static_cast<const char*>(address)));
  if (found == live.begin()) return {};
  Block& block = std::prev(found)->second;
  if (address >= block.start + block.size) return {};
  return {&block.log, block.start, block.size, true};
}

std::string describe(const Held& held) {
  const std::string size = std::to_string(held.size) + " bytes";
  return held.is_device ? "a block of " + size + " of device memory" : size + " of pinned memory";
}

void forget_accesses() {
  Locked lock(state_mutex());
  for (int d = 0; d < kDevices; d++) {
    Device& device = devices()[d];
    for (auto& [start, block] : device.live) block.log.clear();
    for (auto& [key, pool] : device.cached)
      for (Block& block : pool) block.log.clear();
  }
  forget_pinned_accesses();
}

}  // namespace sim
