"""The time of an aten op on a machine that is not at hand: the roofline of its arithmetic and its memory traffic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from tieroff.core.machine import Machine
from tieroff.errors import ConfigError
from tieroff.units import NS_PER_S

_aten = torch.ops.aten

# Memory that is taken and not written.
_FREE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view}
# These read no more of their first argument than they write.
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
# The CPU's attention kernels, for which torch has no formula of their own: those of the GPU's, and how many arguments count.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (_aten._scaled_dot_product_flash_attention, 3),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (_aten._scaled_dot_product_flash_attention_backward, 4),
}


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

    @classmethod
    def of(cls, machine: Machine) -> Roofline:
        """Returns the roofline of a machine; without a rate for two-byte types they run at that of fp32.

        Raises:
            ConfigError: the machine file lacks its rates of arithmetic or memory.
        """
        needed = ("fp32_flops_per_s", "device_memory_bytes_per_s")
        missing = [key for key in needed if not getattr(machine, key)]
        if missing:
            raise ConfigError(
                f"expected {' and '.join(needed)} in machine {machine.name!r}, from which op times of a model that never ran "
                f"are estimated, but {' and '.join(missing)} is missing: add it (configs/machines has examples), or plan from "
                "the trace of a real step"
            )
        fp32 = machine.fp32_flops_per_s
        return cls(fp32, machine.bf16_flops_per_s or fp32, machine.device_memory_bytes_per_s)

    def duration_ns(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        """Returns the estimated time of one aten op, in ns."""
        packet = func._overloadpacket
        results = _tensors(out)
        if func.is_view or packet in _FREE or not (results or func._schema.is_mutable):
            return 0
        inputs = _tensors((args, kwargs))
        if packet in _LOOKUPS:
            inputs = [*inputs[1:], *results]
        size_bytes = sum(_touched_bytes(tensor) for tensor in (*inputs, *results))
        floats = (tensor for tensor in (*inputs, *results) if tensor.dtype.is_floating_point)
        is_short = all(tensor.itemsize <= torch.bfloat16.itemsize for tensor in floats)
        flops_per_s = self.bf16_flops_per_s if is_short else self.fp32_flops_per_s
        arithmetic_s = _flops(packet, args, kwargs, out) / flops_per_s
        return round(max(arithmetic_s, size_bytes / self.memory_bytes_per_s) * NS_PER_S)


def _flops(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    count: Callable[..., int] | None = flop_registry.get(packet)
    if packet in _ATTENTION:
        twin, arguments = _ATTENTION[packet]
        return int(flop_registry[twin](*args[:arguments], out_val=out))
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(values) if isinstance(leaf, torch.Tensor)]


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Returns a tensor's bytes in memory: an expanded one has fewer than its elements would take."""
    size_bytes = tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided:
        return size_bytes
    return min(size_bytes, tensor.untyped_storage().nbytes())
