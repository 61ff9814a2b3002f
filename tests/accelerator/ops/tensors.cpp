// Factories, views and storages.
#include "tensors.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/contiguous.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

namespace sim {

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor over(c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& geometry) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys, geometry.dtype());
  impl->set_storage_offset(geometry.storage_offset());
  impl->set_sizes_and_strides(geometry.sizes(), geometry.strides());
  at::Tensor made(std::move(impl));
  if (geometry.is_conj()) made._set_conj(true);
  if (geometry.is_neg()) made._set_neg(true);
  if (geometry.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

void refuse_pinned(const std::optional<bool>& pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                               std::optional<c10::Device> device, std::optional<bool> pin,
                               std::optional<c10::MemoryFormat> format) {
  refuse_pinned(pin);
  const c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(sizes, &allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> type,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pin) {
  refuse_pinned(pin);
  return empty_strided_on(device_or_current(device).index(), sizes, strides, c10::dtype_or_default(type));
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef sizes) { return at::native::view(self, sizes); }

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) { return at::native::is_set_to(self, other); }

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                               c10::IntArrayRef strides) {
  TORCH_CHECK(source.device().type() == kSim, "Expected a storage of the device, got one of ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.size() == sizes.size()) impl->set_sizes_and_strides(sizes, strides);
  else impl->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_offset(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, empty_strided_on(self.device().index(), {0}, {1}, self.scalar_type()));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data_ptr().get(), stream_of(stream.device_index(), stream.id()));
}

// As between the host and CUDA: dense tensors of both may stand in for each other in `.data =`.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& t) { return t.layout() == c10::kStrided && (t.is_cpu() || is_sim(t)); };
  return (is_dense(self) && is_dense(from)) || self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

}  // namespace

c10::Device device_or_current(const std::optional<c10::Device>& device) {
  const bool is_named = device && device->has_index();
  return c10::Device(kSim, static_cast<c10::DeviceIndex>(is_named ? device->index() : current_device()));
}

at::Tensor as_host(const at::Tensor& t) {
  const auto& storage = t.storage();
  const c10::Device host(c10::kCPU);
  // `data_ptr` raises where the storage has been told to.
  auto bytes = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                     c10::DataPtr(kernel_view(storage.data_ptr().get()), host), nullptr, false);
  return over(c10::Storage(std::move(bytes)), c10::DispatchKeySet(c10::DispatchKey::CPU), t);
}

at::Tensor as_view(const at::Tensor& base, const at::Tensor& host) { return over(base.storage(), kKeys, host); }

Touch touch_of(const at::Tensor& t, bool is_write) {
  Touch touch{t.storage().data_ptr().get(), {}, is_write};
  const auto item = static_cast<int64_t>(t.element_size());
  Span& span = touch.span;
  if (t.numel() == 0) return touch;
  span.item = item;
  span.low = span.high = t.storage_offset() * item;
  for (int64_t d = 0; d < t.dim(); d++) span.high += (t.size(d) - 1) * t.stride(d) * item;
  span.high += item;
  if (t.is_non_overlapping_and_dense()) return touch;
  for (int64_t d = 0; d < t.dim(); d++) {
    if (t.stride(d) == 0 || t.size(d) == 1) continue;  // the same bytes again
    span.sizes.push_back(t.size(d));
    span.strides.push_back(t.stride(d) * item);
  }
  return touch;
}

at::Tensor empty_strided_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType type) {
  const c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys, type);
}

at::Tensor to_device(const at::Tensor& host, int device, Stream& stream, const char* name) {
  if (!host.defined()) return host;
  const at::Tensor dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
  at::Tensor made = empty_strided_on(device, dense.sizes(), dense.strides(), dense.scalar_type());
  if (dense.is_conj()) made._set_conj(true);
  if (dense.is_neg()) made._set_neg(true);
  if (dense.numel() == 0) return made;
  char* to = kernel_view(made.unsafeGetTensorImpl()->data());
  submit({name, stream, {touch_of(made, true)}},
         [dense, to] { std::memcpy(to, dense.unsafeGetTensorImpl()->data(), dense.nbytes()); });
  return made;
}

void resize_storage(c10::StorageImpl& storage, size_t size) {
  const int device = storage.device().index();
  const c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(device)));
  Stream& stream = current_stream(device);
  const size_t kept = std::min(size, storage.nbytes());
  c10::DataPtr fresh = allocator().allocate(size);
  if (kept > 0) {
    Span span;
    span.high = static_cast<int64_t>(kept);
    char *to = kernel_view(fresh.get()), *from = kernel_view(storage.data_ptr().get());
    submit({"resize", stream, {{fresh.get(), span, true}, {storage.data_ptr().get(), span, false}}},
           [to, from, kept] { std::memcpy(to, from, kept); });
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(size);
}

const at::Tensor& resize_tensor(const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (sizes != self.sizes()) impl->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const auto needed = static_cast<size_t>((self.numel() + self.storage_offset()) * static_cast<int64_t>(self.element_size()));
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && needed > storage->nbytes()) {
    TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
    resize_storage(*storage, needed);
  }
  return self;
}

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty_memory_format);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("as_strided", sim::as_strided);
  m.impl("view", sim::view);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("unfold", sim::unfold);
  m.impl("is_set_to", sim::is_set_to);
  m.impl("resize_", sim::resize_tensor);
  m.impl("set_", sim::set_nothing);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("set_.source_Storage", sim::set_storage);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage_offset);
  m.impl("record_stream", sim::record_stream);
  m.impl("_has_compatible_shallow_copy_type", sim::has_compatible_type);
}

// On CUDA this is a composite, of which autograd makes no node: each takes a number of its thread, and backward goes by them.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", torch::CppFunction::makeFallthrough());
}
