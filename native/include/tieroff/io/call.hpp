// One call of the system on a file: what it is to do, apart from who makes it and when.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace tieroff {

// What a request or a call does. A request is never a flush: that is a step of a read.
enum class Kind : std::uint8_t { kRead, kWrite, kCopy, kFlush };

struct Call {
  Kind kind = Kind::kRead;
  int fd = -1;
  std::uint64_t offset = 0;  // in the file
  std::size_t size_bytes = 0;
  std::array<iovec, 2> parts{};  // of a read or write: its memory, in order
  int part_count = 0;
};

// Makes the call on this thread; bytes moved (0 for a flush), or the negative errno.
[[nodiscard]] ssize_t make_call(const Call& call);

// Flags with which a flush calls sync_file_range: what is dirty or being written is on the drive when it returns.
extern const unsigned kFlushFlags;

}  // namespace tieroff
