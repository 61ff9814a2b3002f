// Threads that update tensors in host memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tieroff/update/job.hpp"

namespace tieroff {

// What a job waits for before it reads: opened once, by whoever knows that the bytes are there, or failed.
class UpdateGate {
 public:
  enum class State : int { kShut, kOpen, kFailed };

  UpdateGate();
  ~UpdateGate();
  UpdateGate(const UpdateGate&) = delete;
  UpdateGate& operator=(const UpdateGate&) = delete;

  void open();
  void fail();  // jobs behind it do nothing, and say so
  [[nodiscard]] State state() const noexcept;

 private:
  friend class UpdatePool;
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

// A bucket's update. Its state is one of: waiting for gates, startable, running, done or failed; a failed one wrote nothing.
struct UpdateJob {
  std::vector<UpdatePart> parts;
  std::vector<float*> counters;  // step counters that are raised by one as the job is submitted
};

// [Note: jobs]
// Jobs run in order of submission but for those that wait for a gate, which others pass; two that are under way at once must
// touch different memory. A job is cut into slices, which all threads take from. Submitting raises the counters and keeps the
// job, or throws and has changed nothing: between the two there is no point at which anything can break off.
class UpdatePool {
 public:
  // `cpus`: those that the threads run on; empty: any.
  UpdatePool(std::size_t thread_count, std::vector<int> cpus);
  ~UpdatePool();  // in a forked child it leaks its state; see [Note: one engine, one process]
  UpdatePool(const UpdatePool&) = delete;
  UpdatePool& operator=(const UpdatePool&) = delete;

  // Returns a ticket, above those before. Throws StateError when closed or in a forked child.
  std::uint64_t submit(UpdateJob job, const std::vector<std::shared_ptr<UpdateGate>>& gates);
  // The ticket of the last job that was submitted, 0 before the first.
  [[nodiscard]] std::uint64_t last_ticket() const;
  // True of a job that is done or failed.
  [[nodiscard]] bool is_done(std::uint64_t ticket) const;
  // True of a job that a gate's failure kept from running.
  [[nodiscard]] bool has_failed(std::uint64_t ticket) const;
  // Waits for one job, or for all that were submitted; false after `timeout_s`.
  [[nodiscard]] bool wait(std::uint64_t ticket, double timeout_s);
  [[nodiscard]] bool settle(double timeout_s);
  // Jobs submitted from now on start no sooner than so long after; for tests.
  void delay(std::int64_t delay_ns);
  // Runs what was submitted, and joins the threads; jobs behind shut gates fail. Idempotent; nothing in a forked child.
  void close();

  [[nodiscard]] std::size_t thread_count() const noexcept;
  // Nanoseconds that threads spent in updates, all together, and bytes that those read and wrote.
  [[nodiscard]] std::int64_t busy_ns() const noexcept;
  [[nodiscard]] std::int64_t moved_bytes() const noexcept;

 private:
  struct State;

  const pid_t pid_;
  std::unique_ptr<State> state_;
};

}  // namespace tieroff
