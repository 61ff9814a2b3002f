#include "cost.hpp"

namespace sim {

namespace {

constexpr double kOpsPerProduct = 2;  // a multiplication and an addition

double product_flops(const at::Tensor& left, const at::Tensor& out) {
  return kOpsPerProduct * static_cast<double>(out.numel()) * static_cast<double>(left.size(-1));
}

// Each output element is a sum over the input channels of its group and the kernel's window.
double convolution_flops(const at::Tensor& weight, const at::Tensor& out) {
  return kOpsPerProduct * static_cast<double>(out.numel()) * static_cast<double>(weight.numel()) /
         static_cast<double>(std::max<int64_t>(1, weight.size(0)));
}

double flops_of(const std::string& name, const std::vector<at::Tensor>& in, const std::vector<at::Tensor>& out) {
  if ((name == "aten::mm" || name == "aten::bmm" || name == "aten::mv") && in.size() >= 2 && !out.empty())
    return product_flops(in[0], out[0]);
  if ((name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addmv") && in.size() >= 3 && !out.empty())
    return product_flops(in[1], out[0]);
  if (name == "aten::convolution" && in.size() >= 2 && !out.empty()) return convolution_flops(in[1], out[0]);
  if (name == "aten::convolution_backward" && in.size() >= 3) {
    // One product for each of the two gradients that were asked for, over the elements of the output's gradient.
    double flops = 0;
    for (size_t i = 0; i < std::min<size_t>(2, out.size()); i++)
      if (out[i].defined()) flops += convolution_flops(in[2], in[0]);
    return flops;
  }
  return 0;
}

double bytes_of(const std::vector<at::Tensor>& tensors) {
  double bytes = 0;
  for (const at::Tensor& t : tensors)
    if (t.defined()) bytes += static_cast<double>(t.numel()) * static_cast<double>(t.element_size());
  return bytes;
}

}  // namespace

Cost cost_of(const std::string& name, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs) {
  Cost cost;
  cost.flops = flops_of(name, inputs, outputs);
  cost.bytes = bytes_of(inputs) + bytes_of(outputs);
  cost.is_half = !inputs.empty() && inputs[0].defined() && inputs[0].element_size() == 2;
  return cost;
}

}  // namespace sim
