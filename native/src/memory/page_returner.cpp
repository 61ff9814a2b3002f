#include "tieroff/memory/page_returner.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "tieroff/io/service_thread.hpp"

namespace tieroff {

namespace {

// [Note: rounds that find nothing] To give back a large range takes a while even when nothing of it is resident, on a core
// that computes otherwise. So a round is left out while the process has no more file pages than right after the last one.
// The kernel may count them with a delay, so every so many rounds one is made all the same.
constexpr int kRoundsLeftOutAtMost = 7;
constexpr long kNoticedPages = 16;

// Counts the file pages of this process.
class FilePages {
 public:
  FilePages() : fd_(open("/proc/self/statm", O_RDONLY | O_CLOEXEC)) {}
  ~FilePages() {
    if (fd_ >= 0) close(fd_);
  }
  FilePages(const FilePages&) = delete;
  FilePages& operator=(const FilePages&) = delete;

  // The third number of statm; -1 where there is none.
  [[nodiscard]] long count() const {
    std::array<char, 128> text{};
    long total = 0;
    long resident = 0;
    long shared = -1;
    if (fd_ < 0 || pread(fd_, text.data(), text.size() - 1, 0) <= 0) return -1;
    return std::sscanf(text.data(), "%ld %ld %ld", &total, &resident, &shared) == 3 ? shared : -1;
  }

 private:
  int fd_;
};

}  // namespace

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
    const FilePages pages;
    long left_pages = -1;
    int left_out = 0;
    std::unique_lock lock(mutex);
    while (!is_stopping) {
      const std::uint64_t version = interval_version;
      if (changed.wait_for(lock, std::chrono::nanoseconds(interval_ns),
                           [&] { return is_stopping || interval_version != version; }))
        continue;
      lock.unlock();
      const long now_pages = pages.count();
      const bool is_empty = now_pages >= 0 && left_pages >= 0 && now_pages <= left_pages + kNoticedPages;
      const bool is_left_out = is_empty && left_out < kRoundsLeftOutAtMost;  // [Note: rounds that find nothing]
      left_out = is_left_out ? left_out + 1 : 0;
      if (!is_left_out) {
        error.store(madvise(address, size_bytes, MADV_DONTNEED) == 0 ? 0 : errno);
        left_pages = pages.count();
      }
      lock.lock();
      if (is_left_out) continue;
      round_count.fetch_add(1);
      changed.notify_all();
    }
  }
};

PageReturner::PageReturner(std::uintptr_t address, std::size_t size_bytes, std::int64_t interval_ns)
    : pid_(getpid()),
      state_(new State{.address = reinterpret_cast<void*>(address),
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
  return state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] {
    return state_->round_count.load() >= count || state_->is_stopping;
  }) && state_->round_count.load() >= count;
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
