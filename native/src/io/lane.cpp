#include "tieroff/io/lane.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "tieroff/errors.hpp"

namespace tieroff {
namespace {

void end_unclaimed(Transfer& transfer, int error) {
  transfer.fail(error);
  transfer.end_chunks(transfer.drop_unclaimed());
}

constexpr std::size_t kBounceBytesMax = std::size_t{1} << 20;

}  // namespace

std::size_t bounce_bytes(std::size_t chunk_bytes) noexcept { return std::min(chunk_bytes, kBounceBytesMax); }

void Queue::push(TransferPtr transfer) {
  const bool is_shared = transfer->chunk_count() > 1;
  {
    const std::lock_guard lock(mutex_);
    check_open_locked();
    waiting_.push_back(std::move(transfer));
  }
  if (is_shared)
    changed_.notify_all();
  else
    changed_.notify_one();
}

void Queue::check_open() const {
  const std::lock_guard lock(mutex_);
  check_open_locked();
}

void Queue::check_open_locked() const {
  if (close_error_ == ECANCELED) throw StateError("expected an open engine, got one that is closed: make a new one");
  if (close_error_ != 0)
    throw StateError("expected an engine that works, got one that ended with errno " + std::to_string(close_error_) + " (" +
                     std::strerror(close_error_) + "): make a new one");
}

std::optional<bool> Queue::cancel(const TransferPtr& transfer) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find(waiting_.begin(), waiting_.end(), transfer);
  if (found == waiting_.end()) return std::nullopt;
  if (transfer->claimed_count() != 0) return false;
  waiting_.erase(found);
  end_unclaimed(*transfer, ECANCELED);
  return true;
}

void Queue::close(int error) {
  {
    const std::lock_guard lock(mutex_);
    if (close_error_ == 0) close_error_ = error;
    for (const TransferPtr& transfer : waiting_) end_unclaimed(*transfer, close_error_);
    waiting_.clear();
  }
  changed_.notify_all();
}

Claim Queue::try_take() {
  const std::lock_guard lock(mutex_);
  return take_locked();
}

Claim Queue::take() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return close_error_ != 0 || !waiting_.empty(); });
    if (waiting_.empty()) return {};
    if (Claim claim = take_locked(); claim.transfer) return claim;
  }
}

bool Queue::is_closed() const {
  const std::lock_guard lock(mutex_);
  return close_error_ != 0;
}

Claim Queue::take_locked() {
  while (!waiting_.empty()) {
    TransferPtr transfer = waiting_.front();
    if (transfer->error() != 0) {
      waiting_.pop_front();
      transfer->end_chunks(transfer->drop_unclaimed());
      continue;
    }
    const std::size_t chunk = transfer->claim();
    if (transfer->claimed_count() == transfer->chunk_count()) waiting_.pop_front();
    return {std::move(transfer), chunk};
  }
  return {};
}

void Lane::submit(TransferPtr transfer) {
  queue_.push(std::move(transfer));
  wake();
}

void Lane::close() {
  queue_.close(ECANCELED);
  wake();
}

void Lane::count_calls(std::size_t call_count) noexcept {
  std::size_t peak = peak_call_count_.load(std::memory_order_relaxed);
  while (peak < call_count && !peak_call_count_.compare_exchange_weak(peak, call_count, std::memory_order_relaxed)) {
  }
}

}  // namespace tieroff
