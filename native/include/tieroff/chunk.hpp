// Runs one chunk of a transfer: system calls, bounce buffer, checksum.
#pragma once

#include <cstddef>

#include "tieroff/transfer.hpp"

namespace tieroff {

// A thread's own page-aligned memory, through which unaligned bytes go.
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

// Moves the chunk and records its bytes, its checksum and, if it failed, its errno in the transfer. The caller ends it.
void run_chunk(Transfer& transfer, std::size_t chunk, const BounceBuffer& bounce, FaultTable& faults);

}  // namespace tieroff
