// Memory in whole pages that stays with the process when it is freed, up to a limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace tieroff {

// Stretches of [0, size), none of which overlaps or touches another, by place and by size.
class Stretches {
 public:
  using Stretch = std::pair<std::size_t, std::size_t>;  // (offset, size)

  void add(std::size_t offset, std::size_t size_bytes);
  // Takes `size_bytes` from the start of the smallest stretch that has as many; false where none has.
  bool take(std::size_t size_bytes, std::size_t& offset);
  // Takes a range that lies within one stretch.
  void take_range(std::size_t offset, std::size_t size_bytes);
  // The smallest stretch that holds a whole aligned unit, cut down to whole units; {0, 0} where none does.
  [[nodiscard]] Stretch smallest_with(std::size_t unit_bytes) const;
  // Bytes of the stretch that begins exactly at `offset`; 0 where none does.
  [[nodiscard]] std::size_t size_at(std::size_t offset) const;

 private:
  void erase(std::map<std::size_t, std::size_t>::iterator found);

  std::map<std::size_t, std::size_t> by_offset_;
  std::set<std::pair<std::size_t, std::size_t>> by_size_;
};

// [Note: freed memory that stays] Memory fresh from the system is zeroed page by page as it is first touched, which can take
// longer than what a tensor op then does with it. What was freed is given again instead, its content undefined. It stays
// resident meanwhile, so a limit holds for what is in use and what is kept together: before fresh pages are given, as many
// kept ones go back to the system as the limit demands. What is in use alone may exceed it.
//
// Thread-safe. A forked child has a copy, which works.
class PagePool {
 public:
  struct Usage {
    std::size_t in_use_bytes;
    std::size_t kept_bytes;
  };

  // Reserves address space, no memory; never given back, since tensors may outlive everything. Throws std::system_error.
  PagePool(std::size_t reserved_bytes, bool has_huge_pages);
  ~PagePool() = delete;
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Whole pages, page-aligned; nullptr when the address space is used up.
  [[nodiscard]] void* allocate(std::size_t size_bytes) noexcept;
  // Gives back what `allocate` gave.
  void release(void* memory) noexcept;
  [[nodiscard]] bool owns(const void* memory) const noexcept {
    return reinterpret_cast<std::uintptr_t>(memory) - base_ < reserved_bytes_;
  }
  void set_limit(std::size_t limit_bytes) noexcept;
  [[nodiscard]] Usage usage() noexcept;

  // Before a fork and after it (see pthread_atfork): nothing is kept then, and a child keeps nothing.
  void lock_to_fork() noexcept;
  void unlock() noexcept { mutex_.unlock(); }
  void unlock_in_child() noexcept;

 private:
  [[nodiscard]] std::size_t take_fresh(std::size_t size_bytes);
  void make_small(std::size_t offset);
  void advise(std::size_t offset, int advice);
  void make_room(std::size_t more_bytes);
  void give_back(std::size_t want_bytes, std::size_t unit_bytes);

  std::mutex mutex_;
  std::uintptr_t base_ = 0;
  std::size_t reserved_bytes_;
  const bool has_huge_pages_;
  std::size_t limit_bytes_ = 0;
  std::size_t in_use_bytes_ = 0;
  std::size_t kept_bytes_ = 0;
  Stretches kept_;                                       // free, and resident for all that is known
  Stretches clean_;                                      // free, and not resident
  std::set<std::size_t> small_;                          // offsets of huge pages that are to be of small ones
  std::unordered_map<std::size_t, std::size_t> in_use_;  // offset -> size
};

}  // namespace tieroff
