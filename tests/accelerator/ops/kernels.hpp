// Kernels: those of the CPU, queued on a stream of the device.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <map>
#include <string>

#include "tensors.hpp"

namespace sim {

// Replaces each tensor in a value (itself one, or a list of them).
using Replace = std::function<at::Tensor(const at::Tensor&)>;
c10::IValue with_tensors(const c10::IValue& value, const Replace& replace);

// Calls `op`, whose arguments are on top of the stack, on the device. Where a meta kernel tells the results' shapes the
// kernel is queued; else the host waits for it, as it does on CUDA where shapes depend on data.
void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Where the CPU has a kernel of its own, the device uses that and not what PyTorch would compose of others.
void take_kernels_of_cpu();

// By operator: how often the host waited for a kernel to know its results.
std::map<std::string, int64_t> synchronous_operators();

// Copies of pinned memory take up to this long before they move a byte, of real time.
void set_late_links(double seconds);

}  // namespace sim
