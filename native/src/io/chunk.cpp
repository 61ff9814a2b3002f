#include "tieroff/io/chunk.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "tieroff/io/crc32c.hpp"

namespace tieroff {
namespace {

// Calls in a row that report success and move nothing, after which a file counts as broken.
constexpr int kIdleCallsMax = 16;

constexpr std::size_t align_down(std::size_t value, std::size_t alignment) { return value / alignment * alignment; }
constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

// The chunk's memory; null where it is read for its checksum alone.
std::byte* memory_of(const Claim& claim) {
  std::byte* memory = claim.transfer->request().memory;
  return memory == nullptr ? nullptr : memory + claim.transfer->chunk_offset(claim.chunk);
}

// Bytes of the chunk that the file takes from, or puts into, its memory: whole blocks, if the memory is aligned.
std::size_t straight_bytes_of(const Claim& claim) {
  const Request& request = claim.transfer->request();
  if (is_bounced(request)) return 0;
  return align_down(claim.transfer->chunk_size(claim.chunk), request.block_bytes);
}

}  // namespace

bool is_bounced(const Request& request) noexcept {
  return request.memory == nullptr || reinterpret_cast<std::uintptr_t>(request.memory) % request.memory_alignment != 0;
}

BounceBuffer::BounceBuffer(std::size_t size_bytes) : data_(nullptr), size_bytes_(size_bytes) {
  void* memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a bounce buffer");
  data_ = static_cast<std::byte*>(memory);
}

BounceBuffer::BounceBuffer(BounceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_bytes_(other.size_bytes_) {}

BounceBuffer::~BounceBuffer() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

std::size_t ChunkRun::bounced_bytes(const Claim& claim) {
  const std::size_t size = claim.transfer->chunk_size(claim.chunk);
  return align_up(size, claim.transfer->request().block_bytes) - straight_bytes_of(claim);
}

ChunkRun::ChunkRun(Claim claim, std::byte* bounce)
    : claim_(std::move(claim)),
      state_(claim_.transfer->request().is_flushed_first ? State::kFlushing : State::kMoving),
      memory_(memory_of(claim_)),
      bounced_(bounce),
      size_bytes_(claim_.transfer->chunk_size(claim_.chunk)),
      straight_bytes_(straight_bytes_of(claim_)),
      bounced_bytes_(bounced_bytes(claim_)) {
  const Request& request = claim_.transfer->request();
  if (request.kind != Kind::kWrite) return;
  const std::size_t tail_bytes = size_bytes_ - straight_bytes_;
  std::memcpy(bounced_, memory_ + straight_bytes_, tail_bytes);
  std::memset(bounced_ + tail_bytes, 0, bounced_bytes_ - tail_bytes);
  if (request.with_crc) crc_ = crc32c(bounced_, tail_bytes, crc32c(memory_, straight_bytes_));
}

Call ChunkRun::call() const {
  const Request& request = claim_.transfer->request();
  Call call{.kind = request.kind,
            .fd = request.fd,
            .offset = request.offset + claim_.transfer->chunk_offset(claim_.chunk) + done_bytes_,
            .size_bytes = total_bytes() - done_bytes_};
  if (state_ == State::kFlushing) {
    call.kind = Kind::kFlush;
    return call;
  }
  const auto add = [&call](std::byte* begin, std::size_t size) {
    if (size != 0) call.parts[static_cast<std::size_t>(call.part_count++)] = {begin, size};
  };
  if (done_bytes_ < straight_bytes_) add(memory_ + done_bytes_, straight_bytes_ - done_bytes_);
  const std::size_t skipped = done_bytes_ > straight_bytes_ ? done_bytes_ - straight_bytes_ : 0;
  add(bounced_ + skipped, bounced_bytes_ - skipped);
  return call;
}

void ChunkRun::take(ssize_t result) {
  if (result == -EINTR) return;  // the same call again
  if (result < 0) return fail(static_cast<int>(-result));
  if (state_ == State::kFlushing)
    state_ = State::kMoving;
  else
    take_moved(static_cast<std::size_t>(result));
}

void ChunkRun::take_moved(std::size_t result) {
  const std::size_t before = done_bytes_;
  moved_bytes_ = std::max(moved_bytes_, before + result);
  done_bytes_ = align_down(before + result, claim_.transfer->request().block_bytes);
  if (done_bytes_ >= total_bytes()) {
    state_ = State::kEnded;
  } else if (done_bytes_ > before) {
    idle_calls_ = 0;
  } else if (++idle_calls_ == kIdleCallsMax) {
    fail(EIO);
  }
}

void ChunkRun::fail(int error) {
  error_ = error;
  state_ = State::kEnded;
}

void ChunkRun::finish() {
  const Request& request = claim_.transfer->request();
  const std::size_t done = std::min(moved_bytes_, size_bytes_);
  if (request.kind == Kind::kRead) {
    if (memory_ != nullptr && done > straight_bytes_) std::memcpy(memory_ + straight_bytes_, bounced_, done - straight_bytes_);
    if (request.with_crc && error_ == 0) crc_ = crc32c(memory_ != nullptr ? memory_ : bounced_, size_bytes_);
  }
  claim_.transfer->add(claim_.chunk, done, crc_);
  if (error_ != 0) claim_.transfer->fail(error_);
  claim_.transfer->end_chunks(1);
}

void run_copy(const Claim& claim, FaultTable& faults) {
  Transfer& transfer = *claim.transfer;
  const std::size_t size = transfer.chunk_size(claim.chunk);
  const std::size_t offset = transfer.chunk_offset(claim.chunk);
  std::size_t done = 0;
  int error = 0;
  for (int idle_calls = 0; done < size && error == 0;) {
    const std::size_t position = offset + done;
    const ssize_t result = faults.copy(transfer.request().memory + position, transfer.request().source + position, size - done);
    if (result == -EINTR) continue;
    if (result < 0)
      error = static_cast<int>(-result);
    else if (result == 0 && ++idle_calls == kIdleCallsMax)
      error = EIO;
    else
      done += static_cast<std::size_t>(result);
  }
  transfer.add(claim.chunk, done, 0);
  if (error != 0) transfer.fail(error);
  transfer.end_chunks(1);
}

}  // namespace tieroff
