// What PyTorch asks of a backend: devices, streams and events, allocators, hooks.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "../ops/random.hpp"
#include "../ops/tensors.hpp"
#include "../device/pinned.hpp"

namespace sim {

namespace {

using c10::DeviceIndex;

DeviceIndex index_of(c10::Device device) { return device_or_current(device).index(); }
Stream& of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }
const EventPtr& of(void* event) { return *static_cast<EventPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return {kSim, static_cast<DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) set_current_device(device.index());
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  static c10::Stream wrap(const Stream& stream) {
    return c10::Stream(c10::Stream::UNSAFE, {kSim, static_cast<DeviceIndex>(stream.device)}, stream.id);
  }
  c10::Stream getStream(c10::Device device) const override { return wrap(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return wrap(stream_of(index_of(device), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return wrap(new_stream(index_of(device))); }
  c10::Stream getNewStream(c10::Device device, int) const override { return wrap(new_stream(index_of(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int64_t old = exchange_stream(stream.device_index(), stream.id());
    return wrap(stream_of(stream.device_index(), old));
  }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(of(stream)); }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device < 0 ? current_device() : device); }

  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<EventPtr*>(event); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device ", static_cast<int>(device),
                " does not match recording stream's device ", static_cast<int>(stream.device_index()), ".");
    if (*event == nullptr) *event = new EventPtr(std::make_shared<Event>());
    sim::record(sim::of(*event), sim::of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    if (sim::of(event)->device != stream.device_index()) counters().cross_device_waits++;
    wait_event(sim::of(stream), sim::of(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_over(sim::of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize(sim::of(event));
  }
  double elapsedTime(void* start, void* stop, const DeviceIndex) const override {
    return elapsed_ms(sim::of(start), sim::of(stop));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get_context(), sim::of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const int device = current_device();
    const c10::Device place(kSim, static_cast<DeviceIndex>(device));
    if (size == 0) return {nullptr, nullptr, &free_block, place};
    try {
      void* address = sim::allocate(device, current_stream(device), size);
      return {address, address, &free_block, place};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t size) const override {
    Stream& stream = current_stream(device_at(to));
    Span span;
    span.high = static_cast<int64_t>(size);
    char *target = kernel_view(to), *source = kernel_view(from);
    submit({"copy", stream, {{to, span, true}, {from, span, false}}}, [=] { std::memcpy(target, source, size); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; device++) empty_cache(device);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_use(data.get_context(), of(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const Figures figures = figures_of(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto set = [](auto& stat, int64_t current, int64_t peak, int64_t up, int64_t down) {
      stat[0].current = current;
      stat[0].peak = peak;
      stat[0].allocated = up;
      stat[0].freed = down;
    };
    set(stats.allocated_bytes, figures.allocated, figures.allocated_peak, figures.allocated_sum, figures.freed_sum);
    set(stats.active_bytes, figures.allocated, figures.allocated_peak, figures.allocated_sum, figures.freed_sum);
    set(stats.requested_bytes, figures.requested, figures.requested_peak, 0, 0);
    set(stats.reserved_bytes, figures.reserved, figures.reserved_peak, figures.reserved_peak, 0);
    set(stats.allocation, figures.allocations - figures.frees, 0, figures.allocations, figures.frees);
    stats.num_ooms = figures.refusals;
    stats.num_alloc_retries = figures.retries;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { restart_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {total_bytes() - static_cast<size_t>(figures_of(device).reserved), total_bytes()};
  }
};

DeviceMemory device_memory;

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    void* address = allocate_pinned(size);
    return {address, address, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  // A block is kept while copies of it are under way, whatever is recorded; nothing is cached.
  bool record_event(void* address, void*, c10::Stream) override { return is_pinned(address, 1); }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.allocated_bytes.current = static_cast<int64_t>(pinned_bytes());
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device()); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto old = getCurrentDevice();
    set_current_device(device);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address, 1); }
  c10::Device getDeviceFromPtr(void* address) const override {
    return {kSim, static_cast<DeviceIndex>(device_at(address))};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device < 0 ? current_device() : device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), size);
  }
};

}  // namespace

c10::DeviceAllocator& allocator() { return device_memory; }
REGISTER_ALLOCATOR(kSim, &device_memory)

void register_hooks() {
  static auto* hooks = new Hooks;
  at::setHostAllocator(kSim, &pinned_memory);
  at::RegisterPrivateUse1HooksInterface(hooks);
}

}  // namespace sim
