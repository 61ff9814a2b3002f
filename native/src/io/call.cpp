#include "tieroff/io/call.hpp"

#include <fcntl.h>

#include <cerrno>

namespace tieroff {

const unsigned kFlushFlags = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;

ssize_t make_call(const Call& call) {
  const auto offset = static_cast<off_t>(call.offset);
  ssize_t result = -1;
  switch (call.kind) {
    case Kind::kRead:
      result = preadv(call.fd, call.parts.data(), call.part_count, offset);
      break;
    case Kind::kWrite:
      result = pwritev(call.fd, call.parts.data(), call.part_count, offset);
      break;
    case Kind::kFlush:
      result = sync_file_range(call.fd, offset, static_cast<off_t>(call.size_bytes), kFlushFlags);
      break;
    case Kind::kCopy:
      return -EINVAL;  // no call of the system
  }
  return result < 0 ? -errno : result;
}

}  // namespace tieroff
