// The engine: threads that move bytes between memory and files, and between memory and memory.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <stdexcept>

#include "tieroff/faults.hpp"
#include "tieroff/transfer.hpp"

namespace tieroff {

// A call at a moment, or in a process, that does not allow it.
class StateError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct EngineOptions {
  std::size_t read_thread_count = 2;
  std::size_t write_thread_count = 2;
  std::size_t chunk_bytes = std::size_t{1} << 20;
};

// [Note: one engine, one process] Its threads exist only in the process that made it. In a forked child every call but
// close() raises StateError, and the threads' state is leaked on purpose: joining or destroying it would wait for
// threads that the child does not have.
class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Queues a transfer; first in, first out per direction. A copy goes to the readers' or the writers' queue.
  std::shared_ptr<Transfer> submit(const Request& request, bool is_for_readers);

  // Takes back a transfer of which nothing was started; it ends with ECANCELED. False if it has started or ended.
  bool cancel(const std::shared_ptr<Transfer>& transfer);

  // What is queued ends with ECANCELED, what has started is waited for, the threads are joined. Idempotent; does
  // nothing in a forked child.
  void close();

  [[nodiscard]] bool is_closed() const;
  [[nodiscard]] const EngineOptions& options() const noexcept { return options_; }
  FaultTable& faults();
  void check_process() const;

 private:
  struct State;

  const EngineOptions options_;
  const pid_t pid_;
  std::unique_ptr<State> state_;
};

// What statx reports for direct I/O on an open file; zeros where it says nothing.
struct DirectAlignment {
  std::size_t memory_bytes = 0;
  std::size_t offset_bytes = 0;
};
[[nodiscard]] DirectAlignment direct_alignment(int fd);

}  // namespace tieroff
