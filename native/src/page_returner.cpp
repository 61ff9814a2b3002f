#include "tieroff/page_returner.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tieroff/service_thread.hpp"

namespace tieroff {

struct PageReturner::State {
  void* address;
  std::size_t size_bytes;
  std::mutex mutex;
  std::condition_variable changed;
  std::int64_t interval_ns;
  std::uint64_t interval_version = 0;
  std::atomic<std::uint64_t> round_count{0};
  std::atomic<int> error{0};
  bool is_stopping = false;
  std::thread thread;

  void run() {
    std::unique_lock lock(mutex);
    while (!is_stopping) {
      const std::uint64_t version = interval_version;
      if (changed.wait_for(lock, std::chrono::nanoseconds(interval_ns),
                           [&] { return is_stopping || interval_version != version; }))
        continue;
      lock.unlock();
      error.store(madvise(address, size_bytes, MADV_DONTNEED) == 0 ? 0 : errno);
      lock.lock();
      round_count.fetch_add(1);
      changed.notify_all();
    }
  }
};

PageReturner::PageReturner(std::uintptr_t address, std::size_t size_bytes, std::int64_t interval_ns)
    : pid_(getpid()), state_(new State{.address = reinterpret_cast<void*>(address),
                                       .size_bytes = size_bytes,
                                       .mutex = {},
                                       .changed = {},
                                       .interval_ns = interval_ns,
                                       .thread = {}}) {
  if (interval_ns <= 0) throw std::invalid_argument("expected an interval above 0");
  state_->thread = start_service_thread("tieroff-pages", [state = state_.get()] { state->run(); });
}

PageReturner::~PageReturner() {
  if (getpid() != pid_) {
    static_cast<void>(state_.release());
    return;
  }
  close();
}

void PageReturner::set_interval(std::int64_t interval_ns) {
  if (interval_ns <= 0) throw std::invalid_argument("expected an interval above 0");
  if (getpid() != pid_) return;
  const std::lock_guard lock(state_->mutex);
  state_->interval_ns = interval_ns;
  ++state_->interval_version;
  state_->changed.notify_all();
}

std::uint64_t PageReturner::round_count() const noexcept { return state_->round_count.load(); }

int PageReturner::error() const noexcept { return state_->error.load(); }

bool PageReturner::wait_rounds(std::uint64_t count, double timeout_s) {
  if (getpid() != pid_) return false;
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                  [&] { return state_->round_count.load() >= count || state_->is_stopping; }) &&
         state_->round_count.load() >= count;
}

void PageReturner::close() {
  if (getpid() != pid_) return;
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_stopping = true;
    state_->changed.notify_all();
  }
  if (state_->thread.joinable()) state_->thread.join();
}

}  // namespace tieroff
