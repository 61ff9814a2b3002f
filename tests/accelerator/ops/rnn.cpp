// The fused cells of LSTM and GRU, which PyTorch asks a device for; made of its other operators.
//
// LSTM (Hochreiter and Schmidhuber 1997, with forget gate): i, f, o = sigmoid, g = tanh of the gates;
// c' = f c + i g, h' = o tanh(c'). GRU (Cho et al. 2014): r, z = sigmoid of the gates, n = tanh(n_x + r n_h),
// h' = n + z (h - n).
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "tensors.hpp"

namespace sim {

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Maybe& bias) { return bias && bias->defined() ? gates + *bias : gates; }
Tensor sigmoid_slope(const Tensor& y) { return y * (1 - y); }
Tensor tanh_slope(const Tensor& y) { return 1 - y * y; }
Tensor or_zeros(const Maybe& gradient, const Tensor& like) {
  return gradient && gradient->defined() ? *gradient : at::zeros_like(like);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const Maybe& input_bias, const Maybe& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const Tensor next = f * cell + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Maybe& grad_hidden, const Maybe& grad_cell, const Tensor& cell,
                                                      const Tensor& next, const Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(4, 1);
  const Tensor &i = saved[0], &f = saved[1], &g = saved[2], &o = saved[3];
  const Tensor squashed = next.tanh(), by_hidden = or_zeros(grad_hidden, next);
  const Tensor by_next = or_zeros(grad_cell, next) + by_hidden * o * tanh_slope(squashed);
  const Tensor gates = at::cat({by_next * g * sigmoid_slope(i), by_next * cell * sigmoid_slope(f),
                                by_next * i * tanh_slope(g), by_hidden * squashed * sigmoid_slope(o)},
                               1);
  return {gates, by_next * f, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const Maybe& input_bias, const Maybe& hidden_bias) {
  const auto in = with_bias(input_gates, input_bias).chunk(3, 1), own = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor r = (in[0] + own[0]).sigmoid(), z = (in[1] + own[1]).sigmoid(), n = (in[2] + r * own[2]).tanh();
  return {n + z * (hidden - n), at::cat({r, z, n, hidden, own[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& gradient, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const Tensor &r = saved[0], &z = saved[1], &n = saved[2], &hidden = saved[3], &own = saved[4];
  const Tensor by_z = gradient * (hidden - n) * sigmoid_slope(z);
  const Tensor by_n = gradient * (1 - z) * tanh_slope(n);
  const Tensor by_r = by_n * own * sigmoid_slope(r);
  const Tensor input = at::cat({by_r, by_z, by_n}, 1), recurrent = at::cat({by_r, by_z, by_n * r}, 1);
  return {input, recurrent, gradient * z, has_bias ? input.sum(0) : Tensor(), has_bias ? recurrent.sum(0) : Tensor()};
}

}  // namespace

}  // namespace sim

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", sim::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", sim::lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", sim::gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", sim::gru_cell_backward);
}
