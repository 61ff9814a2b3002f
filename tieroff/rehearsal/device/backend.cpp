// What PyTorch asks of a device: streams and events, allocators, generators, hooks. It is the "cuda" of builds that have none.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "tensors.hpp"

namespace rehearsal {

namespace {

using c10::DeviceIndex;

Event& of(void* event) { return *static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return the_device();
  }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "invalid device ordinal: a rehearsal has one device, got ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream wrap(int64_t stream) { return c10::Stream(c10::Stream::UNSAFE, the_device(), stream); }
  c10::Stream getStream(c10::Device) const override { return wrap(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return wrap(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return wrap(new_stream()); }
  c10::Stream getNewStream(c10::Device, int) const override { return wrap(new_stream()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return wrap(exchange_stream(stream.id())); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream.id()); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream.id()); }
  void synchronizeDevice(const DeviceIndex) const override { synchronize_all(); }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    rehearsal::record(rehearsal::of(*event), stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_event(stream.id(), rehearsal::of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || rehearsal::of(event).time_ns <= now_ns(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(rehearsal::of(event));
  }
  double elapsedTime(void* start, void* stop, const DeviceIndex) const override {
    constexpr double kNsPerMs = 1e6;
    return static_cast<double>(rehearsal::of(stop).time_ns - rehearsal::of(start).time_ns) / kNsPerMs;
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_block, the_device()};
    try {
      void* address = rehearsal::allocate(size);
      return {address, address, &free_block, the_device()};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    const Figures all = figures();
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto set = [](auto& stat, int64_t now, int64_t peak, int64_t up, int64_t down) {
      stat[0].current = now;
      stat[0].peak = peak;
      stat[0].allocated = up;
      stat[0].freed = down;
    };
    set(stats.allocated_bytes, all.allocated, all.peak, all.allocated_sum, all.freed_sum);
    set(stats.active_bytes, all.allocated, all.peak, all.allocated_sum, all.freed_sum);
    set(stats.requested_bytes, all.allocated, all.peak, all.allocated_sum, all.freed_sum);
    set(stats.reserved_bytes, all.reserved, all.reserved_peak, all.reserved_peak, 0);
    set(stats.allocation, all.allocations - all.frees, 0, all.allocations, all.frees);
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { restart_peaks(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    return {device_bytes() - static_cast<size_t>(figures().reserved), device_bytes()};
  }
};

DeviceMemory device_memory;

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = map_host(size, false);
    return {address, address, &unmap_host, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unmap_host; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void* address, void*, c10::Stream) override { return is_mapped(address); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;

constexpr uint64_t kDefaultSeed = 67280421310721;  // PyTorch's own
constexpr int64_t kStateBytes = 16;                // as CUDA's: the seed, and an offset

// It has a seed to be asked for; nothing is drawn.
struct Generator final : c10::GeneratorImpl {
  Generator() : GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  uint64_t seed_value = kDefaultSeed, offset = 0;

  void set_current_seed(uint64_t seed) override { seed_value = seed; }
  void set_offset(uint64_t to) override { offset = to; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return seed_value; }
  uint64_t seed() override { return seed_value; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.numel() == kStateBytes, "expected ", kStateBytes, " bytes on the host as a generator's state");
    const auto* from = static_cast<const uint64_t*>(state.data());
    seed_value = from[0];
    offset = from[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({kStateBytes}, at::kByte);
    auto* to = static_cast<uint64_t*>(state.mutable_data_ptr());
    to[0] = seed_value;
    to[1] = offset;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator;
    copy->seed_value = seed_value;
    copy->offset = offset;
    return copy;
  }
};

}  // namespace

c10::DeviceAllocator& allocator() { return device_memory; }
REGISTER_ALLOCATOR(kDevice, &device_memory)

at::Generator new_generator() { return at::make_generator<Generator>(); }

const at::Generator& default_generator() {
  static const auto* one = new at::Generator(new_generator());
  return *one;
}

struct CUDAHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* address) const override { return is_mapped(address); }
  c10::Device getDeviceFromPtr(void*) const override { return the_device(); }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }
  void deviceSynchronize(DeviceIndex) const override { synchronize_all(); }
};

}  // namespace rehearsal

namespace rehearsal {

// PyTorch looks for CUDA's hooks once, as it is imported, and keeps an object that says no to everything. There is no way to
// give it another one, so ours takes its place, in its memory.
void take_hooks() {
  static_assert(sizeof(CUDAHooks) == sizeof(at::CUDAHooksInterface), "the hooks must fit into the place of PyTorch's own");
  auto* kept = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  if (!kept->hasCUDA()) new (kept) CUDAHooks;
  at::setHostAllocator(kDevice, &pinned_memory);
}

}  // namespace rehearsal
