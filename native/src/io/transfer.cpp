#include "tieroff/io/transfer.hpp"

#include <algorithm>
#include <chrono>
#include <ctime>
#include <utility>

#include "tieroff/io/crc32c.hpp"

namespace tieroff {

std::int64_t monotonic_ns() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

Transfer::Transfer(const Request& request, std::size_t chunk_bytes, std::shared_ptr<Signal> signal)
    : request_(request),
      chunk_bytes_(chunk_bytes),
      chunk_count_((request.size_bytes + chunk_bytes - 1) / chunk_bytes),
      signal_(std::move(signal)),
      chunk_crcs_(request.with_crc ? chunk_count_ : 0),
      unfinished_count_(chunk_count_) {}

std::size_t Transfer::claim() noexcept {
  if (claimed_count_ == 0) start_ns_.store(monotonic_ns(), std::memory_order_release);
  return claimed_count_++;
}

std::size_t Transfer::drop_unclaimed() noexcept { return chunk_count_ - std::exchange(claimed_count_, chunk_count_); }

void Transfer::add(std::size_t chunk, std::size_t done_bytes, std::uint32_t crc) noexcept {
  done_bytes_.fetch_add(done_bytes, std::memory_order_acq_rel);
  if (request_.with_crc) chunk_crcs_[chunk] = crc;
}

void Transfer::fail(int error) noexcept {
  int none = 0;
  error_.compare_exchange_strong(none, error, std::memory_order_acq_rel);
}

void Transfer::end_chunks(std::size_t count) {
  // acq_rel: whoever ends the last chunk sees what the other threads added.
  if (count == 0 || unfinished_count_.fetch_sub(count, std::memory_order_acq_rel) != count) return;
  if (request_.with_crc) {
    crc_ = chunk_crcs_[0];
    for (std::size_t chunk = 1; chunk < chunk_count_; ++chunk)
      crc_ = crc32c_combine(crc_, chunk_crcs_[chunk], chunk_size(chunk));
  }
  stop_ns_.store(monotonic_ns(), std::memory_order_release);
  {
    // Under the lock, so that nobody who has just found it unfinished misses the call.
    const std::lock_guard lock(signal_->mutex);
    is_done_.store(true, std::memory_order_release);
  }
  signal_->ended.notify_all();
}

std::size_t Transfer::chunk_size(std::size_t chunk) const noexcept {
  return std::min(chunk_bytes_, request_.size_bytes - chunk_offset(chunk));
}

bool Transfer::wait(std::int64_t timeout_ns) const {
  if (is_done()) return true;
  std::unique_lock lock(signal_->mutex);
  return signal_->ended.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return is_done(); });
}

std::optional<std::uint32_t> Transfer::crc() const noexcept {
  if (!request_.with_crc || !is_done() || error() != 0) return std::nullopt;
  return crc_;
}

}  // namespace tieroff
