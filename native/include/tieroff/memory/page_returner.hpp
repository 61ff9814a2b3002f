// A thread that keeps mapped file pages from staying resident.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace tieroff {

// Calls madvise(MADV_DONTNEED) on one range every `interval_ns` while it runs. Only for a range that holds nothing but
// shared file mappings and reserved address space: what was written to a shared mapping stays in the file's pages,
// private memory would be lost.
class PageReturner {
 public:
  PageReturner(std::uintptr_t address, std::size_t size_bytes, std::int64_t interval_ns);
  ~PageReturner();  // in a forked child it leaks its state; see [Note: one engine, one process]
  PageReturner(const PageReturner&) = delete;
  PageReturner& operator=(const PageReturner&) = delete;

  void set_interval(std::int64_t interval_ns);
  // Times that the range was given back so far.
  [[nodiscard]] std::uint64_t round_count() const noexcept;
  // errno of the last call, 0 when it succeeded.
  [[nodiscard]] int error() const noexcept;
  // Waits for rounds to reach `count`; false after `timeout_s`.
  [[nodiscard]] bool wait_rounds(std::uint64_t count, double timeout_s);
  // Stops and joins. Idempotent; does nothing in a forked child.
  void close();

 private:
  struct State;

  const pid_t pid_;
  std::unique_ptr<State> state_;
};

}  // namespace tieroff
