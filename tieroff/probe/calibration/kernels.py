"""Measures what a device's kernels reach under sustained load, for the clock of `tieroff plan --model`.

A short burst runs at clocks that a device does not hold, so each kernel runs for seconds, and the last half counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from tieroff.core.machine import Machine

_SIZES = {"cpu": 1024}
_SIZE = 8192
_STREAM_ELEMENTS = 1 << 26
_CPU_STREAM_ELEMENTS = 1 << 24
_CALLS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured; rates are those of one kernel after another, without pause.

    Attributes:
        fp32_flops_per_s, bf16_flops_per_s: of large products of matrices.
        attention_flops_per_s: of fused causal attention in bf16.
        memory_bytes_per_s: read and written by an addition of two tensors.
        kernel_s: time of a kernel that has next to nothing to do.
    """

    fp32_flops_per_s: float
    bf16_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    kernel_s: float

    def machine(self, machine: Machine, device_type: str) -> Machine:
        """Returns a machine with these figures: what was reached are its peaks, of which the clock then takes all."""
        clock = {
            "matmul_fp32": 1.0,
            "matmul_fp32_wide": 1.0,
            "matmul_short": 1.0,
            "attention": min(self.attention_flops_per_s / self.bf16_flops_per_s, 1.0),
            "memory": 1.0,
            "kernel_s": self.kernel_s,
        }
        return replace(
            machine,
            device_type=device_type,
            fp32_flops_per_s=self.fp32_flops_per_s,
            bf16_flops_per_s=self.bf16_flops_per_s,
            device_memory_bytes_per_s=round(self.memory_bytes_per_s),
            clock={**machine.clock, **clock},
        )


def calibrate(device: str, seconds: float) -> Calibration:
    """Returns what a device reaches.

    Args:
        device: such as "cuda" or "cpu".
        seconds: for each of five kernels.
    """
    size = _SIZES.get(device, _SIZE)
    products = [_product_rate(device, size, dtype, seconds) for dtype in (torch.float32, torch.bfloat16)]
    elements = _CPU_STREAM_ELEMENTS if device == "cpu" else _STREAM_ELEMENTS
    left, right = (torch.ones(elements, device=device) for _ in range(2))
    out = torch.empty_like(left)
    stream_s = sustained_s(lambda: torch.add(left, right, out=out), device, seconds)
    tiny = torch.ones(1, device=device)
    kernel_s = sustained_s(lambda: tiny.add_(1), device, seconds)
    return Calibration(
        fp32_flops_per_s=products[0],
        bf16_flops_per_s=products[1],
        attention_flops_per_s=_attention_rate(device, size // 4, seconds),
        memory_bytes_per_s=3 * left.nbytes / stream_s,
        kernel_s=kernel_s,
    )


def sustained_s(run: Callable[[], object], device: str, seconds: float) -> float:
    """Returns the time of one call, from the last half of so many seconds of calls without pause."""
    run()
    _wait(device)
    begin = middle = time.perf_counter()
    count = 0
    while (now := time.perf_counter()) - begin < seconds or not count:
        if now - begin < seconds / 2:
            middle, count = now, 0
        for _ in range(_CALLS_AT_ONCE):
            run()
        _wait(device)
        count += _CALLS_AT_ONCE
    return (time.perf_counter() - middle) / count


def _product_rate(device: str, size: int, dtype: torch.dtype, seconds: float) -> float:
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / sustained_s(lambda: left @ right, device, seconds)


def _attention_rate(device: str, sequence: int, seconds: float) -> float:
    heads, width = 16, 128
    part = torch.ones(2, heads, sequence, width, dtype=torch.bfloat16, device=device)
    flops = 4 * 2 * heads * sequence**2 * width // 2  # two products, of which a causal mask leaves half
    return flops / sustained_s(lambda: F.scaled_dot_product_attention(part, part, part, is_causal=True), device, seconds)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()
