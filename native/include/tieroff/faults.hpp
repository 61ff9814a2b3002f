// The seam between the engine and the system's calls: every transfer passes here, and tests make it fail on purpose.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace tieroff {

enum class Kind : std::uint8_t { kRead, kWrite, kCopy };

// One rule: of the calls of its kind, the first `after` pass, the next `count` (0: all) are hit, the rest pass.
struct Fault {
  Kind kind = Kind::kRead;
  std::uint64_t after = 0;
  std::uint64_t count = 1;
  int error = 0;                          // fails with this errno
  std::optional<std::size_t> short_bytes = std::nullopt;  // moves and reports no more than this
  bool is_hang = false;                   // blocks until release(), then goes on
  bool is_flip = false;                   // a read that flips one bit of what it read
};

class FaultTable {
 public:
  void inject(const Fault& fault);
  void clear();

  // Lets go of every call that hangs; `for_good`: of those to come as well.
  void release(bool for_good = false);

  // Waits until `count` calls hang at once; false after `timeout_s`.
  [[nodiscard]] bool wait_hanging(std::size_t count, double timeout_s);

  // As preadv, pwritev and memcpy; -1 and errno on failure.
  ssize_t read(int fd, const iovec* parts, int part_count, off_t offset);
  ssize_t write(int fd, const iovec* parts, int part_count, off_t offset);
  ssize_t copy(void* target, const void* source, std::size_t size_bytes);

 private:
  struct Armed {
    Fault fault;
    std::uint64_t seen = 0;
  };

  // The fault that hits the next call of this kind, after having hung for as long as it says.
  std::optional<Fault> next(Kind kind);

  std::atomic<bool> is_armed_{false};  // the only thing that an ordinary run looks at
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Armed> armed_;
  std::uint64_t release_count_ = 0;
  std::size_t hanging_ = 0;
  bool is_released_for_good_ = false;
};

}  // namespace tieroff
