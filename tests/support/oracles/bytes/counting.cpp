// An allocator that counts what torch's CPU tensors take, whoever makes them: operators, kernels' scratch, compiled code.
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

thread_local int aside = 0;  // > 0: what this thread allocates is no part of the program that is counted

class Count {
 public:
  void add(std::int64_t size_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_ += size_bytes;
    peak_ = std::max(peak_, live_);
  }

  void take(void* data, std::int64_t size_bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sizes_[data] = size_bytes;
    live_ += size_bytes;
    peak_ = std::max(peak_, live_);
  }

  void give_back(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(data);
    if (found != sizes_.end()) {
      live_ -= found->second;
      sizes_.erase(found);
    }
  }

  std::int64_t live() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return live_;
  }

  std::int64_t peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return peak_;
  }

  void begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    peak_ = live_;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, std::int64_t> sizes_;
  std::int64_t live_ = 0, peak_ = 0;
};

// Never destroyed: tensors die after every static object of this library.
Count& count() {
  static Count* const the = new Count();
  return *the;
}

void free_counted(void* data) {
  count().give_back(data);
  c10::free_cpu(data);
}

class Counting final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    void* const data = c10::alloc_cpu(size_bytes);
    if (data != nullptr && aside == 0) {
      count().take(data, static_cast<std::int64_t>(size_bytes));
    }
    return {data, data, &free_counted, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }

  void copy_data(void* target, const void* source, std::size_t size_bytes) const override {
    default_copy_data(target, source, size_bytes);
  }
};

}  // namespace

extern "C" {
void bytes_install() {
  static Counting* const the = new Counting();
  c10::SetCPUAllocator(the, 100);
}
std::int64_t bytes_live() { return count().live(); }
std::int64_t bytes_peak() { return count().peak(); }
void bytes_begin() { count().begin(); }
void bytes_add(std::int64_t size_bytes) { count().add(size_bytes); }
void bytes_aside(int change) { aside += change; }
}
