// A lane of one thread that keeps many calls under way through an io_uring.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "tieroff/io/lane.hpp"

namespace tieroff {

struct RingOptions {
  std::size_t queue_depth = 8;   // calls under way at once, 1 to 1024
  std::size_t bounce_count = 4;  // chunks at once whose memory is not aligned
  std::size_t chunk_bytes = std::size_t{8} << 20;
};

// The errno with which this build or this kernel refuses an io_uring, 0 where it has one. ENOSYS in a build without
// liburing.
[[nodiscard]] int ring_refusal() noexcept;

// Throws std::system_error where ring_refusal() is not 0.
[[nodiscard]] std::unique_ptr<Lane> make_ring_lane(const std::string& name, const RingOptions& options, FaultTable& faults);

}  // namespace tieroff
