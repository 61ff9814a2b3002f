// Tensors of the device, and kernels that only say what shapes their results have.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "memory.hpp"

namespace rehearsal {

constexpr auto kDevice = c10::DeviceType::CUDA;

c10::DeviceAllocator& allocator();
inline c10::Device the_device() { return c10::Device(kDevice, 0); }
inline bool is_here(const at::Tensor& t) { return t.defined() && t.device().type() == kDevice; }

at::Tensor fresh(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType type);
void resize_storage(c10::StorageImpl& storage, size_t size);
const at::Tensor& resize_tensor(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format);
void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void take_kernels_of_cuda();
const at::Generator& default_generator();
at::Generator new_generator();

}  // namespace rehearsal
