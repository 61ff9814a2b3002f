// Sparse tensors of the device: indices and values on it, and the CPU's kernels over them.
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <exception>

#include "cost.hpp"
#include "kernels.hpp"

namespace sim {

namespace {

using at::sparse::get_sparse_impl;

struct SparseCall {
  std::vector<Touch> touches;
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // of the device, and what the kernel sees
  int device = -1;
};

at::Tensor sparse_over(const at::Tensor& like, const at::Tensor& indices, const at::Tensor& values, c10::DispatchKey key) {
  auto impl = c10::make_intrusive<at::SparseTensorImpl>(c10::DispatchKeySet(key), like.dtype());
  impl->resize_(like.sparse_dim(), like.dense_dim(), like.sizes());
  impl->set_indices_and_values_unsafe(indices, values);
  impl->set_coalesced(like.is_coalesced());
  return at::Tensor(std::move(impl));
}

at::Tensor host_argument(const at::Tensor& t, bool is_written, SparseCall* call) {
  if (!is_sim(t)) return t;
  TORCH_CHECK(call->device < 0 || call->device == t.device().index(), "Expected all tensors to be on the same device, got ",
              t.device(), " and sim:", call->device);
  call->device = t.device().index();
  at::Tensor host;
  if (t.is_sparse()) {
    const at::Tensor indices = get_sparse_impl(t)->indices(), values = get_sparse_impl(t)->values();
    call->touches.push_back(touch_of(indices, is_written));
    call->touches.push_back(touch_of(values, is_written));
    host = sparse_over(t, as_host(indices), as_host(values), c10::DispatchKey::SparseCPU);
  } else {
    call->touches.push_back(touch_of(t, is_written));
    host = as_host(t);
  }
  if (is_written) call->written.emplace_back(t, host);
  return host;
}

at::Tensor result_on_device(const at::Tensor& host, int device, Stream& stream, const char* name) {
  if (!host.is_sparse()) return to_device(host, device, stream, name);
  const auto* impl = get_sparse_impl(host);
  return sparse_over(host, to_device(impl->indices(), device, stream, name), to_device(impl->values(), device, stream, name),
                     c10::DispatchKey::SparsePrivateUse1);
}

// Shapes depend on how many elements there are, so that the host waits, as CUDA's kernels have it wait.
void call_sparse(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const char* name = interned(schema.name());
  const auto count = static_cast<std::ptrdiff_t>(schema.arguments().size());
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  SparseCall call;
  torch::jit::Stack host;
  for (size_t i = 0; i < given.size(); i++) {
    const auto* info = schema.arguments()[i].alias_info();
    const bool is_written = info != nullptr && info->isWrite();
    if (given[i].isDevice()) host.emplace_back(c10::Device(c10::kCPU));
    else host.push_back(with_tensors(given[i], [&](const at::Tensor& t) { return host_argument(t, is_written, &call); }));
  }
  const int device = call.device < 0 ? current_device() : call.device;
  const c10::DeviceGuard guard(c10::Device(kSim, static_cast<c10::DeviceIndex>(device)));
  Stream& stream = current_stream(device);
  std::exception_ptr error;
  counters().kernels++;
  counters().synchronous_kernels++;
  submit({name, stream, call.touches, Engine::kCompute, cost_of(name, {}, {})}, [&] {
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      const bool is_sparse_call = std::any_of(host.begin(), host.end(), [](const c10::IValue& value) {
        return value.isTensor() && value.toTensor().defined() && value.toTensor().is_sparse();
      });
      const auto key = is_sparse_call ? c10::DispatchKey::SparseCPU : c10::DispatchKey::CPU;
      op.redispatchBoxed(c10::DispatchKeySet(key), &host);
    } catch (...) {
      error = std::current_exception();
    }
  });
  synchronize(stream);
  if (error) std::rethrow_exception(error);
  for (const auto& [target, seen] : call.written) {
    if (!target.is_sparse()) continue;
    auto* impl = get_sparse_impl(target);
    const auto* made = get_sparse_impl(seen);
    impl->set_indices_and_values_unsafe(to_device(made->indices(), device, stream, name),
                                        to_device(made->values(), device, stream, name));
    impl->set_coalesced(made->coalesced());
  }
  const size_t results = schema.returns().size();
  for (size_t r = 0; r < results; r++) {
    const c10::IValue& value = host[host.size() - results + r];
    const auto* info = schema.returns()[r].alias_info();
    if (info != nullptr && info->isWrite() && !call.written.empty()) stack->push_back(call.written.front().first);
    else
      stack->push_back(with_tensors(value, [&](const at::Tensor& t) { return result_on_device(t, device, stream, name); }));
  }
}

}  // namespace

}  // namespace sim

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::call_sparse>()); }

// What only looks at the parts, and whether they are coalesced, is the same for every device.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
  m.impl("clone", at::native::clone_sparse);
  m.impl("copy_sparse_to_sparse_", at::native::copy_sparse_);
}
