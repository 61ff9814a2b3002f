#include "random.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_to_copy.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cstring>

#include "tensors.hpp"

namespace sim {

namespace {

constexpr uint64_t kDefaultSeed = 67280421310721;  // PyTorch's own
constexpr size_t kStateBytes = 16;

// A counter instead of a state, as devices have it: the seed, and how many kernels have drawn.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(int device)
      : GeneratorImpl({kSim, static_cast<c10::DeviceIndex>(device)}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  uint64_t seed_value = kDefaultSeed, drawn = 0;

  void set_current_seed(uint64_t seed) override {
    seed_value = seed;
    drawn = 0;
  }
  void set_offset(uint64_t offset) override { drawn = offset; }
  uint64_t get_offset() const override { return drawn; }
  uint64_t current_seed() const override { return seed_value; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_value;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.numel() == static_cast<int64_t>(kStateBytes), "expected ", kStateBytes,
                " bytes on the host as a generator's state");
    const auto* from = static_cast<const uint64_t*>(state.data());
    seed_value = from[0];
    drawn = from[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({static_cast<int64_t>(kStateBytes)}, at::kByte);
    auto* to = static_cast<uint64_t*>(state.mutable_data_ptr());
    to[0] = seed_value;
    to[1] = drawn;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_value = seed_value;
    copy->drawn = drawn;
    return copy;
  }
};

// SplitMix64's finalizer (Steele, Lea, Flood 2014): neighbouring seeds and counts give unrelated streams.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The host's kernel draws from the host's own generator, which it cannot be given otherwise.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (input.numel() == 0) return {input, at::empty_like(input)};
  if (train.has_value() && !*train) return {at::_to_copy(input), at::ones_like(input, at::kBool)};
  if (p == 1) return {at::zeros_like(input), at::zeros_like(input, at::kBool)};
  const at::Tensor mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {at::mul(input, mask).mul_(1 / (1 - p)), mask};
}

}  // namespace

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int d = 0; d < kDevices; d++) made->push_back(new_generator(d));
    return made;
  }();
  return all->at(device);
}

at::Generator new_generator(int device) { return at::make_generator<Generator>(device); }

void seed_all(uint64_t seed) {
  for (int d = 0; d < kDevices; d++) {
    at::Generator generator = default_generator(d);
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

at::Generator draw_from(const at::Generator& generator) {
  auto* own = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  const std::lock_guard<std::mutex> lock(own->mutex_);
  return at::detail::createCPUGenerator(mixed(own->seed_value + 0x9e3779b97f4a7c15ULL * ++own->drawn));
}

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("native_dropout", sim::native_dropout); }
