#include "tieroff/memory/process_pool.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#include "tieroff/memory/interpose.hpp"

namespace tieroff {

namespace {

std::atomic<PagePool*> the_pool{nullptr};
std::atomic<std::size_t> threshold_bytes{SIZE_MAX};

// In place of posix_memalign.
int allocate(void** memory, std::size_t alignment_bytes, std::size_t size_bytes) {
  static const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (size_bytes >= threshold_bytes.load(std::memory_order_relaxed) && alignment_bytes <= page_bytes) {
    if (void* found = the_pool.load()->allocate(size_bytes); found != nullptr) {
      *memory = found;
      return 0;
    }
  }
  return posix_memalign(memory, alignment_bytes, size_bytes);
}

// In place of free.
void release(void* memory) {
  if (PagePool* pool = the_pool.load(std::memory_order_relaxed); pool != nullptr && pool->owns(memory))
    pool->release(memory);
  else
    std::free(memory);
}

}  // namespace

PagePool& process_pool(std::size_t reserved_bytes, bool has_huge_pages) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (the_pool.load() == nullptr) {
    the_pool.store(new PagePool(reserved_bytes, has_huge_pages));
    const auto in_child = [] {
      the_pool.load()->unlock_in_child();
      serve_from(SIZE_MAX);
    };
    pthread_atfork([] { the_pool.load()->lock_to_fork(); }, [] { the_pool.load()->unlock(); }, in_child);
  }
  return *the_pool.load();
}

bool serve_library(const char* library) {
  // First free: nothing of the pool's must ever reach another one.
  return interpose(library, "free", reinterpret_cast<void*>(&std::free), reinterpret_cast<void*>(&release)) > 0 &&
         interpose(library, "posix_memalign", reinterpret_cast<void*>(&posix_memalign), reinterpret_cast<void*>(&allocate)) > 0;
}

void serve_from(std::size_t size_bytes) noexcept { threshold_bytes.store(size_bytes); }

}  // namespace tieroff
