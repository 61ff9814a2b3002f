// A simulation's input made ready to run: rates for all that can move at once, and what to do at each tick.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "tieroff/simulate/simulate.hpp"

namespace tieroff::simulation {

using Wide = unsigned __int128;

inline constexpr std::int64_t kNsPerS = 1'000'000'000;
inline constexpr std::int64_t kMillion = 1'000'000;
inline constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
inline constexpr std::size_t kD2h = 0, kH2d = 1, kNvmeWrite = 2;
inline constexpr std::size_t kCpu = kLinkCount;  // the lane of updates
inline constexpr std::size_t kLaneCount = kLinkCount + 1;
inline constexpr std::uint64_t kNarrow = ~std::uint64_t{0};

inline std::int64_t ceil_div(Wide value, std::int64_t by) {
  const auto divisor = static_cast<std::uint64_t>(by);
  if (value <= kNarrow - divisor) {  // 64-bit division is several times faster
    return static_cast<std::int64_t>((static_cast<std::uint64_t>(value) + divisor - 1) / divisor);
  }
  return static_cast<std::int64_t>((value + divisor - 1) / divisor);
}

// Rates in bytes per second for all that can move beside each other; see [Note: links in the simulator].
class Rates {
 public:
  explicit Rates(const SimulationInput& in) : memory_(in.memory) {
    for (std::size_t side = 0; side < 2; ++side) {
      const std::int64_t host = in.links[kD2h + side].bytes_per_s;
      const std::int64_t nvme = in.links[kNvmeWrite + side].bytes_per_s;
      for (const bool is_beside : {false, true}) {
        const std::int64_t left = in.nvme_shares_host_link && is_beside ? host - std::min(nvme, host / 2) : host;
        const auto share = static_cast<Wide>(left) * static_cast<Wide>(in.duplex_share_millionths) / kMillion;
        host_[side][is_beside][0] = std::max<std::int64_t>(left, 1);
        host_[side][is_beside][1] = std::max<std::int64_t>(static_cast<std::int64_t>(share), 1);
        const std::int64_t carried = host > 0 ? host : nvme;
        const std::int64_t limit = is_beside ? carried - carried / 2 : carried;
        nvme_[side][is_beside] = std::max<std::int64_t>(in.nvme_shares_host_link ? std::min(nvme, limit) : nvme, 1);
        nvme_alone_[side] = nvme;
      }
    }
  }

  // `moving` has a bit per link whose bytes move; that of an NVMe link counts only transfers that touch the device.
  [[nodiscard]] std::int64_t of(std::size_t link, bool touches, unsigned moving) const {
    const std::size_t side = link & 1U;
    if (link >= kNvmeWrite) return touches ? nvme_[side][moving >> side & 1U] : nvme_alone_[side];
    return host_[side][moving >> (kNvmeWrite + side) & 1U][moving >> (1 - side) & 1U];
  }

  // That of an update with the host's memory to itself, in whatever unit its work is.
  [[nodiscard]] std::int64_t of_update() const { return std::max<std::int64_t>(memory_.update_bytes_per_s, 1); }

  // How often a byte of a transfer passes the host's memory.
  [[nodiscard]] std::int64_t passes(std::size_t link, bool touches) const {
    if (link < kNvmeWrite) return memory_.host_passes;
    return touches ? memory_.nvme_passes : 1;
  }
  [[nodiscard]] std::int64_t passes_of_update() const { return memory_.update_bytes_per_s > 0 ? 1 : 0; }

  [[nodiscard]] bool exceeds_memory(Wide wanted) const {
    return memory_.bytes_per_s > 0 && wanted > static_cast<Wide>(memory_.bytes_per_s);
  }

  // What is left of a rate where all that moves wants so many bytes per second of the host's memory.
  [[nodiscard]] std::int64_t within_memory(std::int64_t rate, Wide wanted) const {
    if (!exceeds_memory(wanted)) return rate;
    const Wide left = static_cast<Wide>(rate) * static_cast<Wide>(memory_.bytes_per_s) / wanted;
    return std::max<std::int64_t>(static_cast<std::int64_t>(left), 1);
  }

  // With everything moving that there can be.
  [[nodiscard]] std::int64_t least(std::size_t link, bool touches) const {
    const std::int64_t rate = of(link, touches, 0xFU);
    return passes(link, touches) > 0 ? within_memory(rate, most_wanted()) : rate;
  }
  [[nodiscard]] std::int64_t least_of_update() const {
    return passes_of_update() > 0 ? within_memory(of_update(), most_wanted()) : of_update();
  }

 private:
  [[nodiscard]] Wide most_wanted() const {
    auto wanted = static_cast<Wide>(of_update());
    for (std::size_t link = 0; link < kLinkCount; ++link) {
      for (const bool touches : {false, true}) {
        wanted += static_cast<Wide>(of(link, touches, 0)) * static_cast<Wide>(passes(link, touches));
      }
    }
    return wanted;
  }

  SimulatedMemory memory_;
  std::int64_t host_[2][2][2];  // by side, NVMe traffic beside, other direction busy
  std::int64_t nvme_[2][2];     // by side, host traffic beside
  std::int64_t nvme_alone_[2];
};

// Lists of items, one per tick, back to back in one array.
class Lists {
 public:
  Lists() = default;
  // `entries` are (tick, item), in the order in which a list holds them.
  Lists(std::size_t tick_count, const std::vector<std::pair<std::int32_t, std::int32_t>>& entries)
      : begin_(tick_count + 1), items_(entries.size()) {
    for (const auto& entry : entries) ++begin_[static_cast<std::size_t>(entry.first) + 1];
    std::partial_sum(begin_.begin(), begin_.end(), begin_.begin());
    std::vector<std::uint32_t> next(begin_.begin(), begin_.end() - 1);
    for (const auto& entry : entries) items_[next[static_cast<std::size_t>(entry.first)]++] = entry.second;
  }

  [[nodiscard]] std::span<const std::int32_t> at(std::size_t tick) const {
    return {items_.data() + begin_[tick], begin_[tick + 1] - begin_[tick]};
  }

 private:
  std::vector<std::uint32_t> begin_;
  std::vector<std::int32_t> items_;
};

// A transfer or an update, which follow all transfers in one numbering.
struct Item {
  std::int64_t latency_ns = 0;
  std::int64_t alone_ns = 0;    // all it takes when nothing else moves
  Wide work = 0;                // bytes times ns per second; of an update, ns times its rate
  std::uint8_t lane = 0;        // the link that it waits for, kCpu for the CPU
  std::uint8_t link = 0;
  bool touches_device = false;
  bool crosses = false;  // awaited in the round after the one of its issue
};

// Each item has two slots, for its jobs of even and of odd rounds: of a third one it would have to wait for the first.
struct Job {
  std::int64_t start_ns = 0;
  std::int64_t stop_ns = 0;  // kNever: not done yet
};

inline std::size_t item_of(std::uint32_t slot) { return slot >> 1; }

// What to do at each tick, in this order, and the items themselves.
struct Program {
  Lists issue_first, await_first, issue, await_last, repeats;
  std::vector<Item> items;
  bool is_shared = false;  // two lanes that can slow each other are in use

  // Throws what simulate() does.
  Program(const SimulationInput& in, const Rates& rates);

 private:
  void add_items(const SimulationInput& in, const Rates& rates);
};

// Throws std::invalid_argument for what is out of range in the input.
void check(const SimulationInput& in);

}  // namespace tieroff::simulation
