// The simulator on seeded random input, for the compiler's sanitizers: no Python, no expected values but what any
// simulation must hold.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "tieroff/simulate/simulate.hpp"

namespace {

using namespace tieroff;

void expect(bool holds, const char* what, unsigned seed) {
  if (holds) return;
  std::fprintf(stderr, "seed %u: expected %s\n", seed, what);
  std::exit(1);
}

struct Case {
  std::vector<std::int64_t> op_ns;
  std::vector<std::int64_t> transient_bytes;
  std::vector<SimulatedTransfer> transfers;
  std::vector<SimulatedUpdate> updates;
  std::vector<SimulatedRepeat> repeats;
  std::vector<SimulatedResidency> residencies;
  std::vector<std::int64_t> addresses;
  SimulationInput input;
};

class Maker {
 public:
  explicit Maker(unsigned seed) : random_(seed) {}

  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }

  void fill(Case& made) {
    const bool is_large = draw(0, 1) == 1;  // work of more than 64 bits
    const auto n = static_cast<std::int32_t>(draw(1, 12));
    for (std::int32_t op = 0; op < n; ++op) {
      made.op_ns.push_back(draw(0, is_large ? 10'000'000'000 : 60));
      made.transient_bytes.push_back(draw(0, 20));
    }
    const auto window = [&] {
      const auto issue = static_cast<std::int32_t>(draw(0, n));
      return std::pair{issue, issue + static_cast<std::int32_t>(draw(0, n))};
    };
    for (std::int64_t i = draw(0, 30); i > 0; --i) {
      const auto source = draw(0, 2), target = (source + draw(1, 2)) % 3;
      const auto [issue, ready] = window();
      made.transfers.push_back({static_cast<SimulatedTier>(source), static_cast<SimulatedTier>(target), issue, ready,
                                static_cast<std::int32_t>(draw(-3, 40)), draw(1, is_large ? 100'000'000'000 : 100)});
    }
    for (std::int64_t i = draw(0, 3); i > 0; --i) {
      const auto [issue, ready] = window();
      made.updates.push_back({issue, ready, draw(0, 100)});
    }
    for (std::int64_t i = n > 1 ? draw(0, 2) : 0; i > 0; --i) {
      const auto op = static_cast<std::int32_t>(draw(0, n - 2));
      made.repeats.push_back({op, static_cast<std::int32_t>(draw(op + 1, n - 1))});
    }
    for (std::int64_t i = draw(0, 12); i > 0; --i) {
      const auto start = static_cast<std::int32_t>(draw(0, n - 1));
      made.residencies.push_back(
          {static_cast<SimulatedTier>(draw(0, 2)), start, start + static_cast<std::int32_t>(draw(1, n)), draw(1, 100)});
      made.addresses.push_back(draw(0, 200));
    }
    made.input = {.op_ns = made.op_ns, .transfers = made.transfers, .updates = made.updates, .repeats = made.repeats};
    for (auto& link : made.input.links) link = {draw(1'000'000'000, 50'000'000'000), draw(0, 30)};
    made.input.duplex_share_millionths = draw(0, 1) == 1 ? 1'000'000 : 500'000;
    made.input.nvme_shares_host_link = draw(0, 1) == 1;
    made.input.has_exclusive_link = draw(0, 3) == 0;
    if (draw(0, 1) == 1) {
      made.input.memory = {.bytes_per_s = draw(1, 100'000'000'000),
                           .update_bytes_per_s = draw(0, 1) * draw(1, 100'000'000'000),
                           .host_passes = static_cast<std::int32_t>(draw(1, 2)),
                           .nvme_passes = static_cast<std::int32_t>(draw(0, 2))};
    }
  }

 private:
  std::mt19937_64 random_;
};

void test_time(const Case& made, unsigned seed) {
  SimulationInput input = made.input;
  const SimulationResult found = simulate(input);
  std::int64_t own_ns = found.recompute_ns;
  for (const std::int64_t op_ns : made.op_ns) own_ns += op_ns;
  expect(found.step_ns >= own_ns, "a step of at least its compute and recompute", seed);
  expect(found.transfers.size() == made.transfers.size() && found.ops.size() == made.op_ns.size(), "all spans", seed);
  for (const auto& span : found.transfers) expect(0 <= span.start_ns && span.start_ns < span.stop_ns, "a span", seed);
  std::int64_t total_ns = own_ns;
  for (const auto& stall : found.stalls) total_ns += stall.duration_ns;
  if (found.cycle <= 1) {
    expect(found.step_ns == total_ns, "a step of compute and stalls", seed);
  }
  input.with_spans = false;
  const SimulationResult bare = simulate(input);
  expect(bare.step_ns == found.step_ns && bare.cycle == found.cycle && bare.stalls.size() == found.stalls.size() &&
             bare.transfers.empty() && bare.ops.empty(),
         "the same without spans", seed);
}

void test_memory(const Case& made, unsigned seed) {
  MemoryInput input{.transient_bytes = made.transient_bytes, .residencies = made.residencies, .repeats = made.repeats};
  const auto bytes = memory_per_op(input);
  input.addresses = made.addresses;
  const auto placed = memory_per_op(input);
  expect(placed[1] == bytes[1] && placed[2] == bytes[2], "the tiers below as without addresses", seed);
  for (const std::int64_t end : placed[0]) expect(0 <= end && end <= 320, "ends of addresses", seed);
}

template <class Error>
void expect_refused(const SimulationInput& input, const char* what) {
  try {
    (void)simulate(input);
  } catch (const Error&) {
    return;
  }
  expect(false, what, 0);
}

void test_refusals() {
  const std::vector<std::int64_t> op_ns{5, 5};
  std::vector<SimulatedTransfer> transfers{{SimulatedTier::kDevice, SimulatedTier::kHost, 0, 9, 0, 5}};
  SimulationInput input{.op_ns = op_ns, .transfers = transfers};
  input.links[0] = {1, 0};
  expect_refused<std::invalid_argument>(input, "a window beyond the ring to be refused");
  transfers[0].ready_by = 1;
  transfers[0].size_bytes = std::int64_t{1} << 62U;
  expect_refused<std::overflow_error>(input, "a step of centuries to be refused");
  input.links[0] = {0, 0};
  expect_refused<std::invalid_argument>(input, "a link without bandwidth to be refused");
}

}  // namespace

int main() {
  test_refusals();
  for (unsigned seed = 0; seed < 4000; ++seed) {
    Case made;
    Maker(seed).fill(made);
    test_time(made, seed);
    test_memory(made, seed);
  }
}
