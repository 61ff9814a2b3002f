// The order in which links serve transfers when each takes the one with the nearest deadline first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tieroff {

enum : std::size_t { kD2h = 0, kNvmeWrite = 1, kH2d = 2, kNvmeRead = 3, kLinkCount = 4 };

// A link for the dispatcher, whose clock is approximate: the simulator gives the times of the plan that comes out.
struct DispatchLinks {
  std::array<double, kLinkCount> bytes_per_ns;
  std::array<double, kLinkCount> latency_ns;
  bool nvme_shares_host_link;
  double duplex_share;
};

// One entry per transfer. It can be issued from tick `issue_from` on and must be complete before op `ready_by`, with
// -n <= issue_from <= ready_by <= issue_from + n; the same happens in every step of n ops.
struct DispatchJobs {
  std::span<const std::int64_t> link;
  std::span<const std::int64_t> issue_from;
  std::span<const std::int64_t> ready_by;
  std::span<const std::int64_t> size_bytes;
};

struct Dispatched {
  double step_ns;                        // of the last step run
  std::vector<double> waits_ns;          // per op, of the last step
  std::vector<std::int64_t> served;      // per transfer: its place in the order of service of all links
  std::vector<std::int64_t> start_tick;  // per transfer: tick of its start, counted as `issue_from` is
};

// Runs `step_count` steps of the ring, the transfers of the first as if nothing were under way before it.
// Throws std::invalid_argument for arrays or ticks that make no sense.
Dispatched dispatch(std::span<const std::int64_t> duration_ns, const DispatchJobs& jobs, const DispatchLinks& links,
                    std::size_t step_count);

}  // namespace tieroff
