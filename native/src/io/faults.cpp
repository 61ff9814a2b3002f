#include "tieroff/io/faults.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace tieroff {
namespace {

constexpr std::size_t kBlockBytes = 4096;

// The same call, cut to `limit` bytes in all.
void truncate(Call& call, std::size_t limit) {
  int used = 0;
  for (iovec& part : call.parts) {
    if (used == call.part_count || limit == 0) break;
    part.iov_len = std::min(part.iov_len, limit);
    limit -= part.iov_len;
    ++used;
  }
  call.part_count = used;
}

}  // namespace

void FaultTable::inject(const Fault& fault) {
  const std::lock_guard lock(mutex_);
  armed_.push_back({fault});
  is_armed_.store(true, std::memory_order_release);
}

void FaultTable::clear() {
  const std::lock_guard lock(mutex_);
  armed_.clear();
  is_armed_.store(false, std::memory_order_release);
}

void FaultTable::release(bool for_good) {
  const std::lock_guard lock(mutex_);
  ++release_count_;
  is_released_for_good_ |= for_good;
  changed_.notify_all();
}

bool FaultTable::wait_hanging(std::size_t count, double timeout_s) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return hanging_ >= count; });
}

std::optional<Fault> FaultTable::next_armed(Kind kind) {
  std::unique_lock lock(mutex_);
  std::optional<Fault> hit;
  for (Armed& armed : armed_) {
    if (armed.fault.kind != kind) continue;
    const std::uint64_t index = armed.seen++;
    if (index < armed.fault.after) continue;
    if (armed.fault.count != 0 && index - armed.fault.after >= armed.fault.count) continue;
    if (!hit) hit = armed.fault;
  }
  if (hit && hit->is_hang) {
    const std::uint64_t released = release_count_;
    ++hanging_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return release_count_ != released || is_released_for_good_; });
    --hanging_;
  }
  return hit;
}

ssize_t FaultTable::copy(void* target, const void* source, std::size_t size_bytes) {
  const auto fault = next(Kind::kCopy);
  if (fault && fault->error != 0) return -fault->error;
  if (fault && fault->short_bytes) size_bytes = std::min(size_bytes, *fault->short_bytes);
  std::memcpy(target, source, size_bytes);
  return static_cast<ssize_t>(size_bytes);
}

std::optional<ssize_t> answer(const Fault& fault, Call& call) {
  if (fault.error != 0) return -fault.error;
  if (fault.short_bytes) {
    // A short transfer that is true: the bytes beyond it are not moved, up to the block that direct I/O cannot split.
    truncate(call, (*fault.short_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
    if (call.part_count == 0) return 0;
  }
  return std::nullopt;
}

ssize_t distort(const Fault& fault, const Call& call, ssize_t result) {
  if (result <= 0) return result;
  if (fault.short_bytes) return std::min(result, static_cast<ssize_t>(*fault.short_bytes));
  if (fault.is_flip && call.kind == Kind::kRead) *static_cast<unsigned char*>(call.parts[0].iov_base) ^= 1U;
  return result;
}

}  // namespace tieroff
