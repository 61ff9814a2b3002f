"""Linear layers whose frozen weights are packed to four bits each, as bitsandbytes has them for QLoRA.

A weight is NF4: two values per byte, one scale per 64 of them. The scales are packed too, to a byte each, with a scale of
their own per 256. Forward and backward each unpack a whole weight for the time of one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 64
"""Values that share a scale."""
SCALES_BLOCK = 256
"""Scales that share a scale."""
_LEVELS = 16
_BYTE_LEVELS = 256


class PackedLinear(nn.Linear):
    """A linear layer with a packed, frozen weight.

    What describes the weight besides its packed values lies in buffers, which are not saved.
    """

    def __init__(self, in_features: int, out_features: int, bias: nn.Parameter | None, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        count = self.value_count
        scales = -(-count // BLOCK)
        self.weight = nn.Parameter(torch.empty(-(-count // 2), 1, dtype=torch.uint8), requires_grad=False)
        self.register_parameter("bias", bias)
        for name, buffer in (
            ("scales", torch.empty(scales, dtype=torch.uint8)),
            ("scales_of_scales", torch.empty(-(-scales // SCALES_BLOCK))),
            ("scales_levels", torch.empty(_BYTE_LEVELS)),
            ("scales_mean", torch.empty(())),
            ("levels", torch.empty(_LEVELS)),
        ):
            self.register_buffer(name, buffer, persistent=False)

    @property
    def value_count(self) -> int:
        """Values of the unpacked weight."""
        return self.in_features * self.out_features

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the product with the unpacked weight, in the layer's type and then in the input's."""
        bias: torch.Tensor | None = self.bias
        bias = None if bias is None else bias.to(self.dtype)
        out: torch.Tensor = _PackedProduct.apply(input.to(self.dtype), bias, self.weight, self)  # type: ignore[no-untyped-call]
        out = out.to(input.dtype)
        return out.clone()  # as peft's layer does with what a 4-bit one returns

    def unpacked(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the whole weight in the layer's type."""
        scales = _unpack_scales(self.scales, self.scales_of_scales, self.scales_levels)
        scales += self.scales_mean
        whole: torch.Tensor = _unpack(weight, scales, self.levels, [self.out_features, self.in_features], self.dtype)
        return whole


class _PackedProduct(torch.autograd.Function):
    """The product of an input and a packed weight, which gets no gradient. Backward keeps the packed bytes alone."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, layer: PackedLinear
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(weight)
        return F.linear(input, layer.unpacked(weight), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        bias_grad = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad @ ctx.layer.unpacked(weight), bias_grad, None, None


@torch.library.custom_op("tieroff::unpack_scales", mutates_args=())
def _unpack_scales(scales: torch.Tensor, outer: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    blocks = outer.repeat_interleave(SCALES_BLOCK)[: scales.numel()]
    return levels[scales.long()] * blocks


@_unpack_scales.register_fake
def _(scales: torch.Tensor, outer: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return torch.empty(scales.shape, dtype=levels.dtype, device=scales.device)


@torch.library.custom_op("tieroff::unpack_nf4", mutates_args=())
def _unpack(
    packed: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, shape: list[int], dtype: torch.dtype
) -> torch.Tensor:
    count = shape[0] * shape[1]
    values = levels[torch.cat((packed >> 4, packed & 15), dim=1).flatten().long()][:count]
    return (values * scales.repeat_interleave(BLOCK)[:count]).to(dtype).view(shape)


@_unpack.register_fake
def _(packed: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=packed.device)


def pack_layers(model: nn.Module, kept: nn.Module | None, dtype: torch.dtype) -> None:
    """Replaces a model's linear layers by packed ones, but `kept`, as transformers does for a 4-bit checkpoint."""
    for parent, name, layer in list(_linear_layers(model)):
        if layer is not kept:
            shape = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.t().shape
            setattr(parent, name, PackedLinear(shape[1], shape[0], layer.bias, dtype))


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    from transformers.pytorch_utils import Conv1D

    for parent in model.modules():
        for name, layer in parent.named_children():
            if isinstance(layer, (nn.Linear, Conv1D)):
                yield parent, name, layer
