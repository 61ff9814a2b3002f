// Autocast: PyTorch's own lists of operators, with one boxed kernel for each way to cast.
#include <ATen/autocast_mode.h>
#include <ATen/SDPBackend.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <array>

#include "kernels.hpp"

namespace sim {

namespace {

using torch::jit::Stack;

c10::IValue cast(const c10::IValue& value, c10::ScalarType type) {
  return with_tensors(value, [&](const at::Tensor& t) { return at::autocast::cached_cast(type, t, kSim); });
}

template <typename Type>
void call_cast(const c10::OperatorHandle& op, Stack* stack, const Type& type) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  const size_t first = stack->size() - op.schema().arguments().size();
  const c10::ScalarType to = type(c10::ArrayRef<c10::IValue>(*stack).slice(first));
  for (size_t i = first; i < stack->size(); i++) (*stack)[i] = cast((*stack)[i], to);
  op.callBoxed(stack);
}

void call_lower(const c10::OperatorHandle& op, Stack* stack) {
  call_cast(op, stack, [](const auto&) { return at::autocast::get_lower_precision_fp_from_device_type(kSim); });
}

void call_fp32(const c10::OperatorHandle& op, Stack* stack) {
  call_cast(op, stack, [](const auto&) { return at::kFloat; });
}

void call_widest(const c10::OperatorHandle& op, Stack* stack) {
  call_cast(op, stack, [](c10::ArrayRef<c10::IValue> given) {
    auto widest = at::autocast::get_lower_precision_fp_from_device_type(kSim);
    for (const auto& value : given)
      with_tensors(value, [&](const at::Tensor& t) {
        widest = at::autocast::prioritize(widest, t, kSim);
        return t;
      });
    return widest;
  });
}

// Sums and the like take the type to compute in as an argument, unless the caller gave one.
void call_fp32_by_argument(const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastPrivateUse1);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  const bool is_cast = (*stack)[first].isTensor() && at::autocast::is_eligible((*stack)[first].toTensor(), kSim);
  for (size_t i = 0; i < arguments.size(); i++)
    if (is_cast && arguments[i].name() == "dtype" && (*stack)[first + i].isNone()) (*stack)[first + i] = c10::IValue(at::kFloat);
  op.callBoxed(stack);
}

std::string joined(const char* name) { return name; }
std::string joined(const char* name, const char* overload) { return std::string(name) + "." + overload; }

int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                         bool, std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

int64_t choose_attention_op(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double,
                            bool, std::optional<double>, bool) {
  return static_cast<int64_t>(at::SDPBackend::math);
}

}  // namespace

}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose_attention)
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) { m.impl("_fused_sdp_choice", sim::choose_attention_op); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define SIM_NAME1(a) sim::joined(#a)
#define SIM_NAME2(a, b) sim::joined(#a, #b)
#define SIM_PICK(_1, _2, pick, ...) pick
#define SIM_NAME(...) SIM_PICK(__VA_ARGS__, SIM_NAME2, SIM_NAME1)(__VA_ARGS__)
#define SIM_CAST(kernel, ...) \
  m.impl(SIM_NAME(__VA_ARGS__).c_str(), torch::CppFunction::makeFromBoxedFunction<&sim::kernel>());
#define SIM_LOWER(...) SIM_CAST(call_lower, __VA_ARGS__)
#define SIM_FP32(...) SIM_CAST(call_fp32, __VA_ARGS__)
#define SIM_FP32_BY_ARGUMENT(...) SIM_CAST(call_fp32_by_argument, __VA_ARGS__)
#define SIM_WIDEST(...) SIM_CAST(call_widest, __VA_ARGS__)
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_BY_ARGUMENT)
  AT_FORALL_PROMOTE(SIM_WIDEST)
}
