// Copies between the device and the host: they take their link's time, and move no bytes.
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "tensors.hpp"

namespace rehearsal {

namespace {

constexpr size_t kShown = size_t{1} << 20;  // tensors up to here are filled with zeros for the program to read

// Memory that the program may read next: it gets zeros where something else may stand.
void show_zeros(const at::Tensor& host, bool is_unbacked) {
  if (!is_unbacked || host.nbytes() <= kShown) host.zero_();
}

void cross_link(const at::Tensor& to, const at::Tensor& from, bool asks_async) {
  const bool is_out = is_here(from);
  const at::Tensor& host = is_out ? to : from;
  TORCH_CHECK(host.is_cpu(), "tieroff rehearse: expected a copy to or from the host, got one of ", host.device());
  static_cast<void>((is_out ? from : to).storage().data_ptr());  // raises where its memory must not be used
  const void* address = host.storage().data_ptr().get();
  const bool is_unbacked = is_mapped(address), is_on_drive = is_drive(address);
  const Link link = is_on_drive ? (is_out ? kNvmeWrite : kNvmeRead) : (is_out ? kToHost : kToDevice);
  const int64_t stream = current_stream();
  copy(stream, link, static_cast<double>(to.numel()) * static_cast<double>(to.element_size()));
  // Memory that is not pinned passes through the driver's buffers, for which the host waits.
  if (!asks_async || !is_unbacked) synchronize(stream);
  if (!is_out) return;
  if (!is_on_drive && (!asks_async || !is_unbacked)) count_value();
  show_zeros(host, is_unbacked);
}

void call_copy(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::Tensor self = torch::jit::peek(*stack, 0, 3).toTensor();
  const at::Tensor source = torch::jit::peek(*stack, 1, 3).toTensor();
  if (is_here(self) && is_here(source)) return call_kernel(op, stack);
  const bool asks_async = torch::jit::peek(*stack, 2, 3).toBool();
  if (self.numel() > 0) cross_link(self, source, asks_async);
  torch::jit::drop(*stack, 3);
  stack->push_back(self);
}

// A number for the host: a copy of a few bytes that it waits for, of what nobody computed.
at::Scalar local_scalar(const at::Tensor& self) {
  at::Tensor host = at::empty({}, at::TensorOptions().dtype(self.scalar_type()));
  cross_link(host, self, false);
  if (self.scalar_type() == at::kBool) return is_true(self.storage().data_ptr().get());
  return host.item();
}

// As PyTorch chooses on a GPU of the last years, with no backend switched off.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor&, const std::optional<at::Tensor>& mask,
                         double, bool, std::optional<double>, bool) {
  const auto type = query.scalar_type();
  const bool is_short = type == at::kHalf || type == at::kBFloat16;
  constexpr int64_t kWidestHead = 256;
  if (query.dim() != 4 || !(is_short || type == at::kFloat)) return static_cast<int64_t>(at::SDPBackend::math);
  if (is_short && !mask && query.size(-1) <= kWidestHead) return static_cast<int64_t>(at::SDPBackend::flash_attention);
  const bool has_groups = query.size(1) != key.size(1);
  return static_cast<int64_t>(has_groups ? at::SDPBackend::math : at::SDPBackend::efficient_attention);
}

}  // namespace

void choose_attention_as_cuda() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention); }

}  // namespace rehearsal

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&rehearsal::call_copy>());
  m.impl("_local_scalar_dense", rehearsal::local_scalar);
  m.impl("_fused_sdp_choice", rehearsal::choose_attention);
}
