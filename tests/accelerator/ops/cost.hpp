// What a kernel has to compute and to move, by its operator.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "../device/clock.hpp"

namespace sim {

// `inputs` are all tensors among the arguments, in order. Only matrix products and convolutions count as arithmetic; all
// else is bound by the memory that it reads and writes.
Cost cost_of(const std::string& name, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

}  // namespace sim
