// Factories, views and storages.
#include "tensors.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace rehearsal {

namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

void refuse_pinned(const std::optional<bool>& pin) { TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned"); }

at::Tensor empty_memory_format(c10::IntArrayRef sizes, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                               std::optional<c10::Device>, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  refuse_pinned(pin);
  return at::detail::empty_generic(sizes, &allocator(), kKeys, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> type,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool> pin) {
  refuse_pinned(pin);
  return fresh(sizes, strides, c10::dtype_or_default(type));
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

at::Tensor& set_nothing(at::Tensor& self) { return set_tensor(self, fresh({0}, {1}, self.scalar_type())); }

// Nobody waits for memory here: it is counted as free when its last tensor dies.
void record_stream(at::Tensor&, c10::Stream) {}

// As on CUDA: dense tensors of both may stand in for each other in `.data =`.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& t) { return t.layout() == c10::kStrided && (t.is_cpu() || is_here(t)); };
  return (is_dense(self) && is_dense(from)) || self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

}  // namespace

at::Tensor fresh(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::ScalarType type) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys, type);
}

void resize_storage(c10::StorageImpl& storage, size_t size) {
  storage.set_data_ptr_noswap(allocator().allocate(size));
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

}  // namespace rehearsal

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", rehearsal::empty_memory_format);
  m.impl("empty_strided", rehearsal::empty_strided);
  m.impl("as_strided", rehearsal::as_strided);
  m.impl("view", rehearsal::view);
  m.impl("_reshape_alias", rehearsal::reshape_alias);
  m.impl("unfold", rehearsal::unfold);
  m.impl("is_set_to", rehearsal::is_set_to);
  m.impl("resize_", rehearsal::resize_tensor);
  m.impl("set_", rehearsal::set_nothing);
  m.impl("set_.source_Tensor", rehearsal::set_tensor);
  m.impl("set_.source_Storage", rehearsal::set_storage);
  m.impl("set_.source_Storage_storage_offset", rehearsal::set_storage_offset);
  m.impl("record_stream", rehearsal::record_stream);
  m.impl("_has_compatible_shallow_copy_type", rehearsal::has_compatible_type);
}
