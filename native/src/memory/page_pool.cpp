#include "tieroff/memory/page_pool.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

namespace tieroff {

namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
// Each splits the mapping, of which a process may have some 65,000.
constexpr std::size_t kSmallAtMost = 4096;
constexpr int kDontNeedLocked = 24;  // MADV_DONTNEED_LOCKED, since Linux 5.18

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t align_down(std::size_t value, std::size_t unit) { return value / unit * unit; }

std::size_t align_up(std::size_t value, std::size_t unit) { return align_down(value + unit - 1, unit); }

}  // namespace

void Stretches::erase(std::map<std::size_t, std::size_t>::iterator found) {
  by_size_.erase({found->second, found->first});
  by_offset_.erase(found);
}

void Stretches::add(std::size_t offset, std::size_t size_bytes) {
  if (size_bytes == 0) return;
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      size_bytes += before->second;
      erase(before);
    }
  }
  if (next != by_offset_.end() && next->first == offset + size_bytes) {
    size_bytes += next->second;
    erase(next);
  }
  by_offset_.emplace(offset, size_bytes);
  by_size_.emplace(size_bytes, offset);
}

bool Stretches::take(std::size_t size_bytes, std::size_t& offset) {
  const auto found = by_size_.lower_bound({size_bytes, 0});
  if (found == by_size_.end()) return false;
  offset = found->second;
  take_range(offset, size_bytes);
  return true;
}

void Stretches::take_range(std::size_t offset, std::size_t size_bytes) {
  if (size_bytes == 0) return;
  const auto found = std::prev(by_offset_.upper_bound(offset));
  const auto [start, whole] = *found;
  erase(found);
  add(start, offset - start);
  add(offset + size_bytes, start + whole - (offset + size_bytes));
}

Stretches::Stretch Stretches::smallest_with(std::size_t unit_bytes) const {
  for (auto it = by_size_.lower_bound({unit_bytes, 0}); it != by_size_.end(); ++it) {
    const auto [size_bytes, offset] = *it;
    const std::size_t start = align_up(offset, unit_bytes);
    const std::size_t stop = align_down(offset + size_bytes, unit_bytes);
    if (start < stop) return {start, stop - start};
  }
  return {0, 0};
}

std::size_t Stretches::size_at(std::size_t offset) const {
  const auto found = by_offset_.find(offset);
  return found == by_offset_.end() ? 0 : found->second;
}

PagePool::PagePool(std::size_t reserved_bytes, bool has_huge_pages)
    : reserved_bytes_(align_up(reserved_bytes, kHugePageBytes)), has_huge_pages_(has_huge_pages) {
  const std::size_t mapped_bytes = reserved_bytes_ + kHugePageBytes;
  void* memory = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
  base_ = align_up(reinterpret_cast<std::uintptr_t>(memory), kHugePageBytes);
  // Where the system has no huge pages, small ones do. Where it gives them to everybody, a pool without them says so.
  madvise(memory, mapped_bytes, has_huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  madvise(memory, mapped_bytes, MADV_DONTDUMP);  // a core dump that is piped would be as long as the address space
  clean_.add(0, reserved_bytes_);
}

void* PagePool::allocate(std::size_t size_bytes) noexcept {
  if (size_bytes > reserved_bytes_) return nullptr;
  size_bytes = align_up(std::max<std::size_t>(size_bytes, 1), page_bytes());
  const std::lock_guard lock(mutex_);
  try {
    std::size_t offset = 0;
    if (kept_.take(size_bytes, offset)) {
      kept_bytes_ -= size_bytes;
    } else {
      offset = take_fresh(size_bytes);
    }
    in_use_.emplace(offset, size_bytes);
    in_use_bytes_ += size_bytes;
    return reinterpret_cast<void*>(base_ + offset);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// A fault in a huge page of which nothing is in use brings all of it: what the request leaves of its last one is kept, where
// the limit allows. Where it does not, that page is to be of small ones.
std::size_t PagePool::take_fresh(std::size_t size_bytes) {
  make_room(size_bytes);
  std::size_t offset = 0;
  if (!clean_.take(size_bytes, offset)) throw std::bad_alloc();
  if (!has_huge_pages_) return offset;
  const std::size_t stop = offset + size_bytes;
  const std::size_t last = align_down(stop, kHugePageBytes);
  const std::size_t tail_bytes = align_up(stop, kHugePageBytes) - stop;
  std::size_t whole_until = last;
  if (tail_bytes > 0 && last >= offset && clean_.size_at(stop) >= tail_bytes) {
    if (in_use_bytes_ + kept_bytes_ + size_bytes + tail_bytes <= limit_bytes_) {
      clean_.take_range(stop, tail_bytes);
      kept_.add(stop, tail_bytes);
      kept_bytes_ += tail_bytes;
      whole_until += kHugePageBytes;
    } else {
      make_small(last);
    }
  }
  for (auto it = small_.lower_bound(offset); it != small_.end() && *it < whole_until; it = small_.erase(it))
    advise(*it, MADV_HUGEPAGE);
  return offset;
}

void PagePool::make_small(std::size_t offset) {
  if (small_.size() == kSmallAtMost && !small_.contains(offset)) return;
  small_.insert(offset);
  advise(offset, MADV_NOHUGEPAGE);
}

void PagePool::advise(std::size_t offset, int advice) {
  madvise(reinterpret_cast<void*>(base_ + offset), kHugePageBytes, advice);  // nothing but speed and exactness hangs on it
}

void PagePool::release(void* memory) noexcept {
  const std::lock_guard lock(mutex_);
  const std::size_t offset = reinterpret_cast<std::uintptr_t>(memory) - base_;
  const auto found = in_use_.find(offset);
  if (found == in_use_.end()) return;  // freed twice, or never given: nothing that could be made better here
  const std::size_t size_bytes = found->second;
  in_use_.erase(found);
  in_use_bytes_ -= size_bytes;
  try {
    kept_.add(offset, size_bytes);
    kept_bytes_ += size_bytes;
    make_room(0);
  } catch (const std::bad_alloc&) {
    // Lost to the pool for good; its memory is not lost to the system.
    madvise(reinterpret_cast<void*>(base_ + offset), size_bytes, MADV_DONTNEED);
  }
}

void PagePool::set_limit(std::size_t limit_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  limit_bytes_ = limit_bytes;
  try {
    make_room(0);
  } catch (const std::bad_alloc&) {
    // More stays than should, until the next call.
  }
}

void PagePool::lock_to_fork() noexcept {
  mutex_.lock();
  try {
    give_back(kept_bytes_, page_bytes());  // parent and child would both pay for what nobody uses
  } catch (const std::bad_alloc&) {
    // Then both have it.
  }
}

void PagePool::unlock_in_child() noexcept {
  limit_bytes_ = 0;
  mutex_.unlock();
}

PagePool::Usage PagePool::usage() noexcept {
  const std::lock_guard lock(mutex_);
  return {in_use_bytes_, kept_bytes_};
}

void PagePool::make_room(std::size_t more_bytes) {
  // Whole huge pages first: taking a part of one splits it, and what is left of it is of small pages.
  for (const std::size_t unit_bytes : {has_huge_pages_ ? kHugePageBytes : page_bytes(), page_bytes()}) {
    const std::size_t total_bytes = in_use_bytes_ + kept_bytes_ + more_bytes;
    if (total_bytes > limit_bytes_) give_back(std::min(total_bytes - limit_bytes_, kept_bytes_), unit_bytes);
  }
}

void PagePool::give_back(std::size_t want_bytes, std::size_t unit_bytes) {
  while (want_bytes > 0) {
    auto [offset, size_bytes] = kept_.smallest_with(unit_bytes);
    if (size_bytes == 0) return;
    size_bytes = std::min(size_bytes, align_up(want_bytes, unit_bytes));
    void* const memory = reinterpret_cast<void*>(base_ + offset);
    if (madvise(memory, size_bytes, MADV_DONTNEED) != 0 && madvise(memory, size_bytes, kDontNeedLocked) != 0) return;
    if (has_huge_pages_ && unit_bytes < kHugePageBytes) {
      // The system puts a huge page that has holes together again, in its own time, unless it may not.
      for (std::size_t page = align_down(offset, kHugePageBytes); page < offset + size_bytes; page += kHugePageBytes)
        if (page < offset || page + kHugePageBytes > offset + size_bytes) make_small(page);
    }
    kept_.take_range(offset, size_bytes);
    kept_bytes_ -= size_bytes;
    clean_.add(offset, size_bytes);
    want_bytes -= std::min(want_bytes, size_bytes);
  }
}

}  // namespace tieroff
