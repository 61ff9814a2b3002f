#include "tieroff/faults.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace tieroff {
namespace {

constexpr std::size_t kBlockBytes = 4096;
constexpr int kMaxParts = 2;

// The same ranges, cut to `limit` bytes in all.
int truncate(const iovec* parts, int part_count, std::size_t limit, std::array<iovec, kMaxParts>& cut) {
  int used = 0;
  for (int i = 0; i < part_count && limit > 0; ++i) {
    cut[static_cast<std::size_t>(used)] = {parts[i].iov_base, std::min(parts[i].iov_len, limit)};
    limit -= cut[static_cast<std::size_t>(used)].iov_len;
    ++used;
  }
  return used;
}

// A short transfer that is true: the bytes beyond it are not moved, up to the block that direct I/O cannot split.
template <typename Call>
ssize_t short_call(const iovec* parts, int part_count, std::size_t short_bytes, Call call) {
  std::array<iovec, kMaxParts> cut{};
  const std::size_t limit = (short_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  const int used = truncate(parts, part_count, limit, cut);
  if (used == 0) return 0;
  const ssize_t moved = call(cut.data(), used);
  return std::min(moved, static_cast<ssize_t>(short_bytes));
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

std::optional<Fault> FaultTable::next(Kind kind) {
  if (!is_armed_.load(std::memory_order_acquire)) return std::nullopt;
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

ssize_t FaultTable::read(int fd, const iovec* parts, int part_count, off_t offset) {
  const auto call = [&](const iovec* ranges, int count) { return preadv(fd, ranges, count, offset); };
  const auto fault = next(Kind::kRead);
  if (!fault) return call(parts, part_count);
  if (fault->error != 0) {
    errno = fault->error;
    return -1;
  }
  if (fault->short_bytes) return short_call(parts, part_count, *fault->short_bytes, call);
  const ssize_t moved = call(parts, part_count);
  if (fault->is_flip && moved > 0) *static_cast<unsigned char*>(parts[0].iov_base) ^= 1U;
  return moved;
}

ssize_t FaultTable::write(int fd, const iovec* parts, int part_count, off_t offset) {
  const auto call = [&](const iovec* ranges, int count) { return pwritev(fd, ranges, count, offset); };
  const auto fault = next(Kind::kWrite);
  if (!fault) return call(parts, part_count);
  if (fault->error != 0) {
    errno = fault->error;
    return -1;
  }
  if (fault->short_bytes) return short_call(parts, part_count, *fault->short_bytes, call);
  return call(parts, part_count);
}

ssize_t FaultTable::copy(void* target, const void* source, std::size_t size_bytes) {
  const auto fault = next(Kind::kCopy);
  if (fault && fault->error != 0) {
    errno = fault->error;
    return -1;
  }
  if (fault && fault->short_bytes) size_bytes = std::min(size_bytes, *fault->short_bytes);
  std::memcpy(target, source, size_bytes);
  return static_cast<ssize_t>(size_bytes);
}

}  // namespace tieroff
