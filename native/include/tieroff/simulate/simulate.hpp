// What a plan takes on a machine, in integer nanoseconds: the twin of tests/support/oracles/simulate.py, whose notes
// define it. The two agree to the last digit. Plain data in, plain data out, so that a search calls it as it is.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tieroff {

enum class SimulatedTier : std::uint8_t { kDevice, kHost, kNvme };

inline constexpr std::size_t kLinkCount = 4;  // d2h, h2d, nvme_write, nvme_read: the order of all lists of links

struct SimulatedLink {
  std::int64_t bytes_per_s = 0;  // 0: no such link
  std::int64_t latency_ns = 0;
};

// The host's memory, which transfers and updates share; see [Note: links in the simulator].
struct SimulatedMemory {
  std::int64_t bytes_per_s = 0;         // 0: as much as anything asks for
  std::int64_t update_bytes_per_s = 0;  // what an update reads and writes there while it has the memory to itself; 0: nothing
  std::int32_t host_passes = 1;         // how often a byte between device and host passes it
  std::int32_t nvme_passes = 0;         // and one between device and NVMe; one between host and NVMe does once
};

// Ticks as in a plan: 0 <= issue_at <= n and issue_at <= ready_by <= issue_at + n.
struct SimulatedTransfer {
  SimulatedTier source;
  SimulatedTier target;
  std::int32_t issue_at;
  std::int32_t ready_by;
  std::int32_t rank;  // transfers issued at one tick go in order of rank; equal ones in the order given
  std::int64_t size_bytes;
};

// An op that the CPU runs, in the order given where two are issued at one tick.
struct SimulatedUpdate {
  std::int32_t issue_at;
  std::int32_t ready_by;
  std::int64_t duration_ns;  // with the host's memory to itself
};

// Op `op` runs once more before op `at`, 0 <= op < at < n.
struct SimulatedRepeat {
  std::int32_t op;
  std::int32_t at;
};

// Where an op runs: beside compute, or in it after the communication that it awaits; see [Note: two queues] in core/trace.py.
struct SimulatedQueue {
  bool is_communication;
  std::int32_t awaits;  // an op of communication before it, -1 for none
};

struct SimulationInput {
  std::span<const std::int64_t> op_ns;  // time of each op of the ring on the device: 0 for one that the CPU runs
  std::span<const SimulatedTransfer> transfers{};
  std::span<const SimulatedUpdate> updates{};
  std::span<const SimulatedRepeat> repeats{};
  std::array<SimulatedLink, kLinkCount> links{};
  std::int32_t duplex_share_millionths = 1'000'000;
  bool nvme_shares_host_link = false;
  SimulatedMemory memory{};
  bool has_exclusive_link = false;
  std::int32_t step_count_max = 16;
  std::span<const SimulatedQueue> queues{};  // one per op, or none where all are compute
  bool with_spans = true;                    // without, the vectors of spans stay empty, and a step less may be run
};

struct SimulatedSpan {
  std::int32_t index;  // of the input's op, transfer, update or repeat
  std::int64_t start_ns;
  std::int64_t stop_ns;
};

struct SimulatedStall {
  std::int32_t op;  // the wait is before it; n: at the end of the ring
  std::int64_t duration_ns;
  std::int32_t cause;  // index of the transfer, or the number of transfers and the index of the update; -1: communication
};

// Times of spans count from the start of the last round of the ring that was run, to which stalls and spans belong.
struct SimulationResult {
  std::int64_t step_ns = 0;        // per step: the mean over the cycle, rounded up
  std::int64_t first_step_ns = 0;  // per step of the first round, rounded up
  std::int32_t cycle = 0;          // rounds after which the state repeats; 0: it did not within step_count_max
  std::int64_t recompute_ns = 0;
  std::vector<SimulatedStall> stalls;
  std::vector<SimulatedSpan> ops;
  std::vector<SimulatedSpan> repeats;
  std::vector<SimulatedSpan> transfers;  // in order of issue
  std::vector<SimulatedSpan> updates;    // in order of issue
};

// Throws std::invalid_argument for an index, a tick, a size or a link out of range, and std::overflow_error when the
// steps together could take more than 2^62 ns.
[[nodiscard]] SimulationResult simulate(const SimulationInput& input);

// Bytes of a tensor in a tier over the ops [start, stop) of the ring, 0 <= start < n, start < stop <= start + n.
struct SimulatedResidency {
  SimulatedTier tier;
  std::int32_t start;
  std::int32_t stop;
  std::int64_t size_bytes;
};

struct MemoryInput {
  std::span<const std::int64_t> transient_bytes;  // per op of the ring
  std::span<const SimulatedResidency> residencies{};
  std::span<const SimulatedRepeat> repeats{};
  std::span<const std::int64_t> addresses{};  // one per residency, or none where bytes on the device are added up
};

// Bytes that count at each op, per tier. Throws std::invalid_argument for what is out of range.
[[nodiscard]] std::array<std::vector<std::int64_t>, 3> memory_per_op(const MemoryInput& input);

}  // namespace tieroff
