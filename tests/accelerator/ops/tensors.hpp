// Tensors of the device, and what kernels see in their place.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "../device/memory.hpp"

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

c10::DeviceAllocator& allocator();
c10::Device device_or_current(const std::optional<c10::Device>& device);

inline bool is_sim(const at::Tensor& t) { return t.defined() && t.device().type() == kSim; }

// A strided tensor of the host over the same bytes, as kernels see them; raises what the storage says when it has none.
at::Tensor as_host(const at::Tensor& t);
// A tensor of the device over `base`'s storage, with the geometry of a host tensor over the same bytes.
at::Tensor as_view(const at::Tensor& base, const at::Tensor& host);
Touch touch_of(const at::Tensor& t, bool is_write);

at::Tensor empty_strided_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType type);
// A tensor of the device with the values that `host` has when the stream gets there.
at::Tensor to_device(const at::Tensor& host, int device, Stream& stream, const char* name);
const at::Tensor& resize_tensor(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format);
// Gives a storage another size; what it held up to there is kept.
void resize_storage(c10::StorageImpl& storage, size_t size);

}  // namespace sim
