// The engines: they move bytes between memory and files, and between memory and memory.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "tieroff/io/faults.hpp"
#include "tieroff/io/lane.hpp"
#include "tieroff/io/ring_lane.hpp"
#include "tieroff/io/transfer.hpp"

namespace tieroff {

// What every engine does; its lanes do it. In a forked child every call but close() raises StateError, see
// [Note: one engine, one process].
class Engine {
 public:
  virtual ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a transfer; first in, first out per direction. A copy goes to the readers' or the writers' lane.
  std::shared_ptr<Transfer> submit(const Request& request, bool is_for_readers);

  // Takes back a transfer of which nothing was started; it ends with ECANCELED. False if it has started or ended.
  bool cancel(const std::shared_ptr<Transfer>& transfer);

  // Waits until all that was submitted before has ended, also where nobody holds the transfer; false after `timeout_ns`.
  bool settle(std::int64_t timeout_ns);

  // What is queued ends with ECANCELED, what has started is waited for, the threads are joined. Idempotent; in a forked
  // child it closes the descriptors that it inherited.
  void close();

  [[nodiscard]] bool is_closed() const;
  [[nodiscard]] std::size_t chunk_bytes() const noexcept { return chunk_bytes_; }
  // As in Lane; the most of both lanes, and their sum.
  [[nodiscard]] std::size_t peak_call_count() const;
  [[nodiscard]] std::uint64_t bounced_bytes() const;
  FaultTable& faults();
  void check_process() const;

 protected:
  using MakeLane = std::function<std::unique_ptr<Lane>(bool is_for_readers, FaultTable& faults)>;

  // Throws std::invalid_argument for a chunk size that is no power of two from 4096 to 1 GiB.
  Engine(std::size_t chunk_bytes, const MakeLane& make_lane);

 private:
  struct State;

  const std::size_t chunk_bytes_;
  const pid_t pid_;
  std::unique_ptr<State> state_;
};

struct ThreadOptions {
  std::size_t read_thread_count = 2;
  std::size_t write_thread_count = 2;
  std::size_t chunk_bytes = std::size_t{1} << 20;
};

// Threads of its own for each direction, with a call each.
class ThreadEngine final : public Engine {
 public:
  explicit ThreadEngine(const ThreadOptions& options);
  [[nodiscard]] const ThreadOptions& options() const noexcept { return options_; }

 private:
  const ThreadOptions options_;
};

// One io_uring and one thread for each direction, with many calls each.
class RingEngine final : public Engine {
 public:
  explicit RingEngine(const RingOptions& options);  // throws std::system_error where ring_refusal() is not 0
  [[nodiscard]] const RingOptions& options() const noexcept { return options_; }

 private:
  const RingOptions options_;
};

// What statx reports for direct I/O on an open file; zeros where it says nothing.
struct DirectAlignment {
  std::size_t memory_bytes = 0;
  std::size_t offset_bytes = 0;
};
[[nodiscard]] DirectAlignment direct_alignment(int fd);

}  // namespace tieroff
