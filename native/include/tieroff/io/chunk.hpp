// One chunk of a transfer: which calls it takes, its bounce buffer and its checksum. Who makes the calls is an engine's.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tieroff/io/call.hpp"
#include "tieroff/io/faults.hpp"
#include "tieroff/io/transfer.hpp"

namespace tieroff {

using TransferPtr = std::shared_ptr<Transfer>;

// A chunk that somebody has taken upon himself to run, and to end.
struct Claim {
  TransferPtr transfer;  // empty: none
  std::size_t chunk = 0;
};

// Whether all bytes of a read or write go through bounce buffers: its memory is not aligned, or there is none.
[[nodiscard]] bool is_bounced(const Request& request) noexcept;

// Page-aligned memory through which unaligned bytes go. Its pages are taken when they are first used.
class BounceBuffer {
 public:
  explicit BounceBuffer(std::size_t size_bytes);  // throws std::system_error
  ~BounceBuffer();
  BounceBuffer(BounceBuffer&& other) noexcept;
  BounceBuffer(const BounceBuffer&) = delete;
  BounceBuffer& operator=(const BounceBuffer&) = delete;
  BounceBuffer& operator=(BounceBuffer&&) = delete;

  [[nodiscard]] std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_;
  std::size_t size_bytes_;
};

// A chunk of a read or a write, on its way. It makes no call itself: it says which one is next and is told the result.
//
// State      next
// flushing   moving (the flush went well), ended (it failed); only where the request asks for a flush
// moving     moving (some bytes, or interrupted), ended (all bytes, or an error)
// ended      finish() records it in the transfer
class ChunkRun {
 public:
  // Bytes that the chunk sends through a bounce buffer.
  [[nodiscard]] static std::size_t bounced_bytes(const Claim& claim);

  // `bounce` has room for bounced_bytes(), and is this chunk's until it has finished.
  ChunkRun(Claim claim, std::byte* bounce);

  [[nodiscard]] const Request& request() const noexcept { return claim_.transfer->request(); }
  [[nodiscard]] bool has_call() const noexcept { return state_ != State::kEnded; }
  // The next call. A transfer that was short goes on from its last whole block, since direct I/O starts on one.
  [[nodiscard]] Call call() const;
  // The result of that call: bytes, or the negative errno.
  void take(ssize_t result);

  // Records bytes, checksum and error in the transfer and ends the chunk there. Once, after the last call.
  void finish();

 private:
  enum class State : std::uint8_t { kFlushing, kMoving, kEnded };

  [[nodiscard]] std::size_t total_bytes() const noexcept { return straight_bytes_ + bounced_bytes_; }
  void fail(int error);
  void take_moved(std::size_t result);

  Claim claim_;
  State state_;
  std::byte* memory_;            // where the chunk's bytes are, or go to
  std::byte* bounced_;           // the bounce buffer: bytes from straight_bytes_ on
  std::size_t size_bytes_;       // of the chunk, without padding
  std::size_t straight_bytes_;   // go straight between memory and file
  std::size_t bounced_bytes_;    // go through the bounce buffer, padding to the block included
  std::size_t done_bytes_ = 0;   // in whole blocks
  std::size_t moved_bytes_ = 0;  // as the system reports it
  int idle_calls_ = 0;
  int error_ = 0;
  std::uint32_t crc_ = 0;
};

// Copies a chunk from memory to memory, on this thread, and ends it.
void run_copy(const Claim& claim, FaultTable& faults);

}  // namespace tieroff
