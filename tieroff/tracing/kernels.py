"""The kernels that an accelerator runs where the CPU runs others, for a step on fake tensors.

Fake tensors lie on the CPU, since torch without an accelerator has no autograd for any other device. Where torch
chooses by device, this mode chooses as it does on CUDA: attention that keeps no scores in memory, dropout and
root-mean-square norms in one kernel. Optimizers update their parameters together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_aten = torch.ops.aten
_FLASH_HEAD_MAX = 256
_FLASH_HEAD_MULTIPLE = 8


class DeviceKernels(TorchFunctionMode):
    """While it is active, functions with a kernel of their own on accelerators call that one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = _KERNELS.get(func)
        chosen = kernel(*args, **(kwargs or {})) if kernel is not None else None
        return func(*args, **(kwargs or {})) if chosen is None else chosen


def run_backward(loss: torch.Tensor) -> None:
    """Runs backward from a loss of one number, as `loss.backward()` does.

    That one puts a mode for functions aside while it runs, and layers that run again in backward would have other kernels
    than in forward. So the engine is called at once.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def use_device_updates(optimizer: torch.optim.Optimizer) -> None:
    """Makes a torch optimizer without an explicit choice update all parameters together, its default on accelerators."""
    for group in optimizer.param_groups:
        if group.get("foreach", True) is None and not group.get("fused") and not group.get("differentiable"):
            group["foreach"] = True


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Returns what torch's fused attention gives, None where CUDA has no fused kernel for these arguments either."""
    width = query.shape[-1]
    if query.dim() != 4 or width != value.shape[-1] or query.layout is not torch.strided:
        return None
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if is_half and attn_mask is None and width <= _FLASH_HEAD_MAX and not width % _FLASH_HEAD_MULTIPLE:
        found = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)
        return found[0]  # type: ignore[no-any-return]
    if enable_gqa and query.shape[1] != key.shape[1]:
        return None
    bias = attn_mask
    if bias is not None and bias.dtype is torch.bool:  # as torch does: the kernel adds its mask
        bias = torch.zeros(bias.shape, dtype=query.dtype, device=query.device).masked_fill_(~bias, -math.inf)
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    saves_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    found = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, saves_sums, dropout_p, is_causal, scale=scale
    )
    return found[0]  # type: ignore[no-any-return]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor | None:
    if not training or not 0 < p < 1 or inplace:
        return None
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor | None:
    """Returns a norm of the same traffic and the same saved tensors; on the CPU torch takes `_fused_rms_norm` apart."""
    if weight is None or weight.dtype is not input.dtype:
        return None
    return torch.native_layer_norm(input, normalized_shape, weight, None, eps or 0.0)[0]


_KERNELS: dict[Any, Callable[..., torch.Tensor | None]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
}
