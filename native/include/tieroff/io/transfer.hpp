// One transfer: what was asked, how far it is, and what came out.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "tieroff/io/call.hpp"

namespace tieroff {

// CLOCK_MONOTONIC in nanoseconds.
[[nodiscard]] std::int64_t monotonic_ns() noexcept;

struct Request {
  Kind kind = Kind::kCopy;
  int fd = -1;
  std::uint64_t offset = 0;           // in the file
  std::byte* memory = nullptr;        // of a read: null reads for the checksum alone
  const std::byte* source = nullptr;  // of a memory copy
  std::size_t size_bytes = 0;
  std::size_t block_bytes = 4096;       // offset and length in the file are multiples of this
  std::size_t memory_alignment = 4096;  // memory that is not aligned to this goes through a bounce buffer
  bool with_crc = false;
  bool is_flushed_first = false;  // a read of a range that is also mapped: write its dirty pages back before
};

// Wakes those who wait. Apart from the transfer, so that no transfer owns anything that blocks when it is destroyed in
// a forked child (destroying a condition variable waits for its waiters, which the child does not have).
struct Signal {
  std::mutex mutex;
  std::condition_variable ended;
};

// State      chunks claimed   next
// queued     0                running (first claim), ended (cancelled or closed: ECANCELED)
// running    > 0              ended (all claimed chunks ended; after a failure the rest is never claimed)
// ended      -                none; the engine touches its memory no more
class Transfer {
 public:
  Transfer(const Request& request, std::size_t chunk_bytes, std::shared_ptr<Signal> signal);

  const Request& request() const noexcept { return request_; }

  // Claiming: by the owner of the queue's lock only.
  [[nodiscard]] std::size_t chunk_count() const noexcept { return chunk_count_; }
  [[nodiscard]] std::size_t claimed_count() const noexcept { return claimed_count_; }
  std::size_t claim() noexcept;
  // Gives up every chunk that is not claimed and returns how many; they are to be ended with end_chunks().
  std::size_t drop_unclaimed() noexcept;

  // By the thread that ran the chunk.
  void add(std::size_t chunk, std::size_t done_bytes, std::uint32_t crc) noexcept;
  void fail(int error) noexcept;  // the first error stays
  void end_chunks(std::size_t count);

  [[nodiscard]] std::size_t chunk_offset(std::size_t chunk) const noexcept { return chunk * chunk_bytes_; }
  [[nodiscard]] std::size_t chunk_size(std::size_t chunk) const noexcept;

  [[nodiscard]] bool is_done() const noexcept { return is_done_.load(std::memory_order_acquire); }
  // Waits until it has ended; false after `timeout_ns`.
  bool wait(std::int64_t timeout_ns) const;

  [[nodiscard]] std::uint64_t done_bytes() const noexcept { return done_bytes_.load(std::memory_order_acquire); }
  [[nodiscard]] int error() const noexcept { return error_.load(std::memory_order_acquire); }
  [[nodiscard]] std::int64_t start_ns() const noexcept { return start_ns_.load(std::memory_order_acquire); }
  [[nodiscard]] std::int64_t stop_ns() const noexcept { return stop_ns_.load(std::memory_order_acquire); }
  // Of the whole tensor, once it has ended well and if it was asked for.
  [[nodiscard]] std::optional<std::uint32_t> crc() const noexcept;

 private:
  const Request request_;
  const std::size_t chunk_bytes_;
  const std::size_t chunk_count_;
  const std::shared_ptr<Signal> signal_;
  std::size_t claimed_count_ = 0;  // under the queue's lock
  std::vector<std::uint32_t> chunk_crcs_;
  std::uint32_t crc_ = 0;
  std::atomic<std::size_t> unfinished_count_;
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<int> error_{0};
  std::atomic<std::int64_t> start_ns_{0};
  std::atomic<std::int64_t> stop_ns_{0};
  std::atomic<bool> is_done_{false};
};

}  // namespace tieroff
