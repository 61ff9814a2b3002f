"""The time of an aten op on a machine that is not at hand: the roofline of its arithmetic and its memory traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tieroff.core.machine import Machine
from tieroff.tracing.op_costs import expect_rates, flop_count, kernel_of, touched_bytes, touched_tensors
from tieroff.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class Roofline:
    """Peak rates of a device; an op takes the longer of its arithmetic and its memory traffic at these.

    Nothing is faster than its roofline, and most ops are slower: launches, caches and unusual shapes are left out.

    Attributes:
        fp32_flops_per_s, bf16_flops_per_s: operations per second of matrix arithmetic, by type.
        memory_bytes_per_s: of the device's own memory.
    """

    fp32_flops_per_s: float
    bf16_flops_per_s: float
    memory_bytes_per_s: int
    is_repeatable: ClassVar[bool] = True

    @classmethod
    def of(cls, machine: Machine) -> Roofline:
        """Returns the roofline of a machine; without a rate for two-byte types they run at that of fp32.

        Raises:
            ConfigError: the machine file lacks its rates of arithmetic or memory.
        """
        expect_rates(machine)
        fp32 = machine.fp32_flops_per_s
        return cls(fp32, machine.bf16_flops_per_s or fp32, machine.device_memory_bytes_per_s)

    def duration_ns(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        """Returns the estimated time of one aten op, in ns."""
        touched = touched_tensors(func, args, kwargs, out)
        if touched is None:
            return 0
        floats = (tensor for tensor in touched if tensor.dtype.is_floating_point)
        is_short = all(tensor.itemsize <= torch.bfloat16.itemsize for tensor in floats)
        flops_per_s = self.bf16_flops_per_s if is_short else self.fp32_flops_per_s
        arithmetic_s = flop_count(kernel_of(func), args, kwargs, out) / flops_per_s
        return round(max(arithmetic_s, touched_bytes(touched) / self.memory_bytes_per_s) * NS_PER_S)
