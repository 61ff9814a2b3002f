// Updates and their threads, for the sanitizers: bits alike for all instruction sets, jobs behind gates, closing with work left.
// Prints what failed and exits 1, else exits 0.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "expect.hpp"
#include "tieroff/errors.hpp"
#include "tieroff/update/pool.hpp"

namespace {

using namespace tieroff;

// Five tensors of one type, filled with numbers that an update meets, and some that are none.
struct Tensors {
  std::array<std::vector<unsigned char>, kTensorsMax> bytes;

  Tensors(UpdateType type, std::int64_t count, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0.0F, 0.01F);
    for (std::size_t t = 0; t < bytes.size(); ++t) {
      const std::size_t size = type == UpdateType::kFloat32 ? 4 : 2;
      bytes[t].resize(static_cast<std::size_t>(count) * size);
      for (std::int64_t i = 0; i < count; ++i) {
        float value = normal(random);
        if (t >= 3) value = value < 0 ? -value : value;
        if (i % 97 == 5) value = 0.0F;
        std::uint32_t bits = 0;
        std::memcpy(&bits, &value, 4);
        if (size == 4)
          std::memcpy(bytes[t].data() + static_cast<std::size_t>(i) * 4, &bits, 4);
        else {
          const auto upper = static_cast<std::uint16_t>(bits >> 16);
          std::memcpy(bytes[t].data() + static_cast<std::size_t>(i) * 2, &upper, 2);
        }
      }
    }
  }

  void give(UpdatePart& part) {
    for (std::size_t t = 0; t < bytes.size(); ++t) part.inputs[t] = part.outputs[t] = bytes[t].data();
  }
};

UpdatePart make_part(UpdateRule rule, Arithmetic arithmetic, UpdateType type, std::int64_t count) {
  UpdatePart part;
  part.rule = rule;
  part.arithmetic = arithmetic;
  part.type = type;
  part.count = count;
  part.decay = rule == UpdateRule::kSgd ? Decay::kGradient : Decay::kParameter;
  part.has_momentum = part.is_nesterov = rule == UpdateRule::kSgd;
  part.has_maximum = rule == UpdateRule::kAdam;
  part.factors = {0.37F};
  part.scalars = {.decay = 0.99, .rate_decay = 1e-5, .step = -1e-3, .first = 0.9, .first_rest = 0.1, .second = 0.999,
                  .second_rest = 0.001, .root_correction = 0.03, .epsilon = 1e-8, .float_step = 1e-3,
                  .float_root_correction = 0.03};
  return part;
}

void test_instruction_sets_agree() {
  constexpr std::int64_t kCount = 1003;  // no multiple of any width
  for (const UpdateType type : {UpdateType::kFloat32, UpdateType::kBfloat16})
    for (int rule = 0; rule < 4; ++rule)
      for (int arithmetic = 0; arithmetic < kArithmetics; ++arithmetic) {
        Tensors expected(type, kCount, 1);
        UpdatePart part = make_part(static_cast<UpdateRule>(rule), static_cast<Arithmetic>(arithmetic), type, kCount);
        expected.give(part);
        update_elements_with("portable", part, 0, kCount);
        for (const char* name : update_instructions()) {
          Tensors found(type, kCount, 1);
          found.give(part);
          update_elements_with(name, part, 0, 400);  // in pieces that begin anywhere
          update_elements_with(name, part, 400, kCount - 400);
          EXPECT(found.bytes == expected.bytes);
        }
      }
}

void test_jobs(std::size_t threads) {
  constexpr std::int64_t kCount = 300'000;
  constexpr std::size_t kJobs = 12;
  std::vector<Tensors> expected;
  std::vector<Tensors> found;
  std::vector<UpdatePart> parts;
  std::vector<float> counters(kJobs, 0.0F);
  for (std::size_t i = 0; i < kJobs; ++i) {
    const UpdateType type = i % 2 == 0 ? UpdateType::kFloat32 : UpdateType::kBfloat16;
    expected.emplace_back(type, kCount, i);
    found.emplace_back(type, kCount, i);
    parts.push_back(make_part(UpdateRule::kAdam, Arithmetic::kContracted, type, kCount));
    expected[i].give(parts[i]);
    update_elements(parts[i], 0, kCount);
    found[i].give(parts[i]);
  }
  const auto gate = std::make_shared<UpdateGate>();
  const auto broken = std::make_shared<UpdateGate>();
  UpdatePool pool(threads, {0, 1});
  std::vector<std::uint64_t> tickets;
  for (std::size_t i = 0; i < kJobs; ++i) {
    std::vector<std::shared_ptr<UpdateGate>> gates;
    if (i % 3 == 0) gates.push_back(gate);
    if (i == 6) gates.push_back(broken);
    tickets.push_back(pool.submit({{parts[i]}, {&counters[i]}}, gates));
  }
  EXPECT(pool.wait(tickets[1], 60.0));
  EXPECT(!pool.is_done(tickets[0]));
  std::thread opener([&] {
    gate->open();
    broken->fail();
  });
  EXPECT(pool.settle(60.0));
  opener.join();
  for (std::size_t i = 0; i < kJobs; ++i) {
    EXPECT(pool.is_done(tickets[i]) && pool.has_failed(tickets[i]) == (i == 6));
    EXPECT((found[i].bytes == expected[i].bytes) == (i != 6));
    EXPECT(counters[i] == 1.0F);
  }
}

void test_close_with_work_left() {
  constexpr std::int64_t kCount = 500'000;
  Tensors first(UpdateType::kFloat32, kCount, 1);
  Tensors second(UpdateType::kFloat32, kCount, 1);
  UpdatePart part = make_part(UpdateRule::kSgd, Arithmetic::kPlain, UpdateType::kFloat32, kCount);
  UpdatePart other = part;
  first.give(part);
  second.give(other);
  UpdatePool pool(2, {});
  pool.delay(std::int64_t{60} * 1'000'000'000);
  const auto late = pool.submit({{part}, {}}, {});
  const auto gated = pool.submit({{other}, {}}, {std::make_shared<UpdateGate>()});
  const auto empty = pool.submit({{}, {}}, {});
  pool.close();
  EXPECT(pool.is_done(late) && !pool.has_failed(late));
  EXPECT(pool.has_failed(gated) && !pool.has_failed(empty));
  EXPECT(first.bytes != second.bytes);
  bool is_refused = false;
  try {
    static_cast<void>(pool.submit({{part}, {}}, {}));
  } catch (const StateError&) {
    is_refused = true;
  }
  EXPECT(is_refused && pool.last_ticket() == empty);
}

}  // namespace

int main() {
  test_instruction_sets_agree();
  test_jobs(1);
  test_jobs(4);
  test_close_with_work_left();
  return failures.load() == 0 ? 0 : 1;
}
