"""What an aten op does: arithmetic of a kind, on a type, and bytes of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tieroff.tracing.op_costs import ATTENTION_TWINS, flop_count, kernel_of, touched_bytes, touched_tensors

_aten = torch.ops.aten

_ATTENTION = {
    *ATTENTION_TWINS,
    *(twin for twin, _ in ATTENTION_TWINS.values()),
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_efficient_attention_backward,
}
_CAUSAL = {
    _aten._scaled_dot_product_flash_attention: 4,
    _aten._scaled_dot_product_flash_attention_backward: 10,
    _aten._scaled_dot_product_efficient_attention: 6,
    _aten._scaled_dot_product_efficient_attention_backward: 12,
}
"""Position of `is_causal` among the arguments: half of the scores are then left out, which torch's formulas do not count."""
_CONVOLUTIONS = {_aten.convolution, _aten.convolution_backward, _aten._convolution}
_SHORT_BYTES = 2

# Kernels that go over their arguments more often than once each, as the fit found: torch's backward of a dropout is three
# kernels, its softmax over long rows reads both arguments twice.
_PASSES = {_aten.native_dropout_backward: 2.8, _aten._softmax_backward_data: 5 / 3}


@dataclass(frozen=True, slots=True)
class Work:
    """One kernel's work.

    Attributes:
        kind: "matmul", "attention", "convolution" or "memory".
        element_bytes: of the first floating-point tensor that it is given: 2 or 4, say.
        flops: operations; 0 for "memory".
        traffic_bytes: what it reads and writes, each byte once for every time that it is touched.
        product: of a matmul the batch, rows, columns and the length of each sum; () otherwise.
    """

    kind: str
    element_bytes: int
    flops: int
    traffic_bytes: float
    product: tuple[int, ...] = ()

    @property
    def is_short(self) -> bool:
        """True for the two-byte types, which have tensor cores on every GPU since 2017."""
        return self.element_bytes <= _SHORT_BYTES


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Work | None:
    """Returns the work of one call of an aten op, None for one that does none on the device."""
    packet = kernel_of(func)
    touched = touched_tensors(func, args, kwargs, out)
    if touched is None:
        return None
    traffic_bytes = touched_bytes(touched) * _PASSES.get(packet, 1)
    element_bytes = next((t.itemsize for t in touched if t.dtype.is_floating_point), 0)
    flops = flop_count(packet, args, kwargs, out)
    product = _product(packet, args)
    kind = "matmul" if product else "memory"
    if packet in _ATTENTION:
        kind, flops = "attention", _scores_flops(packet, args, flops)
    elif packet in _CONVOLUTIONS:
        kind = "convolution"
    elif flops and not product:
        kind, product = "matmul", (1, 0, 0, 0)
    return Work(kind, element_bytes, flops, traffic_bytes, product)


def _product(packet: Any, args: Any) -> tuple[int, ...]:
    """Returns batch, rows, columns and depth of a product of matrices."""
    first = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}.get(packet)
    if first is None:
        return ()
    left, right = args[first], args[first + 1]
    batch = left.shape[0] if left.dim() == 3 else 1
    return int(batch), int(left.shape[-2]), int(right.shape[-1]), int(left.shape[-1])


def _scores_flops(packet: Any, args: Any, flops: int) -> int:
    position = _CAUSAL.get(packet)
    is_causal = position is not None and len(args) > position and args[position] is True
    return flops // 2 if is_causal else flops
