// The seam between the engines and the system's calls: every call passes here, and tests make it fail on purpose.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "tieroff/io/call.hpp"

namespace tieroff {

// One rule: of the calls of its kind, the first `after` pass, the next `count` (0: all) are hit, the rest pass.
struct Fault {
  Kind kind = Kind::kRead;
  std::uint64_t after = 0;
  std::uint64_t count = 1;
  int error = 0;                                          // fails with this errno
  std::optional<std::size_t> short_bytes = std::nullopt;  // moves and reports no more than this
  bool is_hang = false;                                   // blocks until release(), then goes on
  bool is_flip = false;                                   // a read that flips one bit of what it read
};

class FaultTable {
 public:
  void inject(const Fault& fault);
  void clear();

  // Lets go of every call that hangs; `for_good`: of those to come as well.
  void release(bool for_good = false);

  // Waits until `count` calls hang at once; false after `timeout_s`.
  [[nodiscard]] bool wait_hanging(std::size_t count, double timeout_s);

  [[nodiscard]] bool is_armed() const noexcept { return is_armed_.load(std::memory_order_acquire); }

  // The fault that hits the next call of this kind, after having hung for as long as it says. An ordinary run reads one
  // flag here and does nothing else.
  std::optional<Fault> next(Kind kind) { return is_armed() ? next_armed(kind) : std::nullopt; }

  // memcpy; the negative errno on failure.
  ssize_t copy(void* target, const void* source, std::size_t size_bytes);

 private:
  struct Armed {
    Fault fault;
    std::uint64_t seen = 0;
  };

  std::optional<Fault> next_armed(Kind kind);

  std::atomic<bool> is_armed_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Armed> armed_;
  std::uint64_t release_count_ = 0;
  std::size_t hanging_ = 0;
  bool is_released_for_good_ = false;
};

// Before a call that `fault` hits: cuts it short if it says so. What it returns is the call's result, and then the call
// is not made.
[[nodiscard]] std::optional<ssize_t> answer(const Fault& fault, Call& call);

// After such a call: its result as the fault has it.
[[nodiscard]] ssize_t distort(const Fault& fault, const Call& call, ssize_t result);

}  // namespace tieroff
