// A lane moves the transfers of one direction, first in, first out. An engine has two; what they are made of is the
// difference between one engine and another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>

#include "tieroff/io/chunk.hpp"
#include "tieroff/io/faults.hpp"

namespace tieroff {

// The size of a chunk whose bytes the processor moves, through a bounce buffer or as a copy: no larger than needed to keep
// a drive busy, since it takes memory or holds up what is behind it.
[[nodiscard]] std::size_t bounce_bytes(std::size_t chunk_bytes) noexcept;

// Transfers that have chunks which nobody has claimed.
class Queue {
 public:
  void push(TransferPtr transfer);  // throws StateError once it is closed

  // Takes a transfer out of which nothing was claimed; it ends with ECANCELED. No value where it does not wait here.
  std::optional<bool> cancel(const TransferPtr& transfer);

  // What waits ends with `error`. Idempotent.
  void close(int error);

  // The next chunk, or an empty claim. What is left of transfers that failed is dropped on the way.
  Claim try_take();
  // The same, waiting for one; empty once the queue is closed.
  Claim take();

  [[nodiscard]] bool is_closed() const;
  void check_open() const;  // throws StateError once it is closed

 private:
  Claim take_locked();
  void check_open_locked() const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<TransferPtr> waiting_;
  int close_error_ = 0;  // 0: open
};

// [Note: one engine, one process] A lane's threads exist only in the process that made it. In a forked child nothing may
// join or destroy them, or anything that they wait for: the child closes the descriptors that it inherited, and leaks the
// rest on purpose.
class Lane {
 public:
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void submit(TransferPtr transfer);
  void check_open() const { queue_.check_open(); }  // throws StateError
  std::optional<bool> cancel(const TransferPtr& transfer) { return queue_.cancel(transfer); }

  // What waits ends with ECANCELED; what has started goes on. Idempotent.
  void close();
  // After close(): returns when what has started has ended and the threads have. Idempotent.
  virtual void join() = 0;
  virtual void close_in_child() noexcept {}

  // The most calls that were under way at once, and the bytes that went through bounce buffers.
  [[nodiscard]] std::size_t peak_call_count() const noexcept { return peak_call_count_.load(); }
  [[nodiscard]] std::uint64_t bounced_bytes() const noexcept { return bounced_bytes_.load(); }

 protected:
  explicit Lane(FaultTable& faults) : faults_(faults) {}

  virtual void wake() {}  // the queue has changed; called without its lock

  void count_calls(std::size_t call_count) noexcept;
  void count_bounced(std::size_t size_bytes) noexcept { bounced_bytes_.fetch_add(size_bytes, std::memory_order_relaxed); }

  Queue queue_;
  FaultTable& faults_;

 private:
  std::atomic<std::size_t> peak_call_count_{0};
  std::atomic<std::uint64_t> bounced_bytes_{0};
};

}  // namespace tieroff
