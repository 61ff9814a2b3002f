#include "tieroff/chunk.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "tieroff/crc32c.hpp"

namespace tieroff {
namespace {

// Calls in a row that report success and move nothing, after which a file counts as broken.
constexpr int kIdleCallsMax = 16;

struct Outcome {
  std::size_t done_bytes = 0;
  int error = 0;
};

constexpr std::size_t align_down(std::size_t value, std::size_t alignment) { return value / alignment * alignment; }
constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

// A chunk's bytes in memory: first those that go straight, then those that go through the bounce buffer.
struct Parts {
  std::byte* straight;
  std::size_t straight_bytes;
  std::byte* bounced;
  std::size_t bounced_bytes;

  [[nodiscard]] std::size_t size_bytes() const { return straight_bytes + bounced_bytes; }

  // What is left after the first `done_bytes`.
  int remaining(std::size_t done_bytes, std::array<iovec, 2>& ranges) const {
    std::size_t count = 0;
    if (done_bytes < straight_bytes) ranges[count++] = {straight + done_bytes, straight_bytes - done_bytes};
    const std::size_t skipped = done_bytes > straight_bytes ? done_bytes - straight_bytes : 0;
    if (skipped < bounced_bytes) ranges[count++] = {bounced + skipped, bounced_bytes - skipped};
    return static_cast<int>(count);
  }
};

// Moves all of `parts`, continuing short transfers from the last whole block, since direct I/O starts on one.
Outcome move_parts(const Request& request, std::uint64_t offset, const Parts& parts, FaultTable& faults) {
  std::size_t done = 0;
  std::size_t moved = 0;  // as the system reports it; `done` is that in whole blocks
  for (int idle_calls = 0; done < parts.size_bytes();) {
    std::array<iovec, 2> ranges{};
    const int count = parts.remaining(done, ranges);
    const auto position = static_cast<off_t>(offset + done);
    const ssize_t result = request.kind == Kind::kRead ? faults.read(request.fd, ranges.data(), count, position)
                                                       : faults.write(request.fd, ranges.data(), count, position);
    if (result < 0) {
      if (errno == EINTR) continue;
      return {moved, errno};
    }
    const std::size_t before = done;
    moved = std::max(moved, done + static_cast<std::size_t>(result));
    done = align_down(done + static_cast<std::size_t>(result), request.block_bytes);
    if (done > before)
      idle_calls = 0;
    else if (++idle_calls == kIdleCallsMax)
      return {moved, EIO};
  }
  return {done, 0};
}

int flush_range(const Request& request, std::uint64_t offset, std::size_t size_bytes) {
  constexpr unsigned kAll = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  const int result = sync_file_range(request.fd, static_cast<off_t>(offset), static_cast<off_t>(size_bytes), kAll);
  return result == 0 ? 0 : errno;
}

Outcome run_file_chunk(const Transfer& transfer, std::size_t chunk, const BounceBuffer& bounce, FaultTable& faults,
                       std::uint32_t& crc) {
  const Request& request = transfer.request();
  const std::size_t size = transfer.chunk_size(chunk);
  const std::uint64_t offset = request.offset + transfer.chunk_offset(chunk);
  const bool is_discarded = request.memory == nullptr;
  std::byte* memory = is_discarded ? bounce.data() : request.memory + transfer.chunk_offset(chunk);
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(memory) % request.memory_alignment == 0 && !is_discarded;
  const std::size_t straight = is_aligned ? align_down(size, request.block_bytes) : 0;
  const Parts parts{memory, straight, bounce.data(), align_up(size, request.block_bytes) - straight};

  if (request.kind == Kind::kWrite) {
    std::memcpy(parts.bounced, memory + straight, size - straight);
    std::memset(parts.bounced + (size - straight), 0, parts.size_bytes() - size);
    if (request.with_crc)
      crc = crc32c(parts.bounced, size - straight, crc32c(memory, straight));
  } else if (request.is_flushed_first) {
    if (const int error = flush_range(request, offset, parts.size_bytes()); error != 0) return {0, error};
  }
  Outcome outcome = move_parts(request, offset, parts, faults);
  outcome.done_bytes = std::min(outcome.done_bytes, size);
  if (request.kind == Kind::kRead) {
    if (outcome.done_bytes > straight && !is_discarded)
      std::memcpy(memory + straight, parts.bounced, outcome.done_bytes - straight);
    if (request.with_crc && outcome.error == 0) crc = crc32c(memory, size);
  }
  return outcome;
}

Outcome run_copy_chunk(const Transfer& transfer, std::size_t chunk, FaultTable& faults) {
  const std::size_t size = transfer.chunk_size(chunk);
  const std::size_t offset = transfer.chunk_offset(chunk);
  Outcome outcome;
  for (int idle_calls = 0; outcome.done_bytes < size;) {
    const std::size_t position = offset + outcome.done_bytes;
    const ssize_t result = faults.copy(transfer.request().memory + position, transfer.request().source + position,
                                       size - outcome.done_bytes);
    if (result < 0 && errno == EINTR) continue;
    if (result < 0) return {outcome.done_bytes, errno};
    outcome.done_bytes += static_cast<std::size_t>(result);
    if (result == 0 && ++idle_calls == kIdleCallsMax) return {outcome.done_bytes, EIO};
  }
  return outcome;
}

}  // namespace

BounceBuffer::BounceBuffer(std::size_t size_bytes) : data_(nullptr), size_bytes_(size_bytes) {
  void* memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a bounce buffer");
  data_ = static_cast<std::byte*>(memory);
}

BounceBuffer::BounceBuffer(BounceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(other.size_bytes_) {}

BounceBuffer::~BounceBuffer() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

void run_chunk(Transfer& transfer, std::size_t chunk, const BounceBuffer& bounce, FaultTable& faults) {
  std::uint32_t crc = 0;
  const Outcome outcome = transfer.request().kind == Kind::kCopy
                              ? run_copy_chunk(transfer, chunk, faults)
                              : run_file_chunk(transfer, chunk, bounce, faults, crc);
  transfer.add(chunk, outcome.done_bytes, crc);
  if (outcome.error != 0) transfer.fail(outcome.error);
}

}  // namespace tieroff
