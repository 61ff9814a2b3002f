"""What one call of an aten op touches and computes, as the roofline and the clock both count it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from tieroff.core.machine import Machine
from tieroff.errors import ConfigError

_aten = torch.ops.aten

# Memory that is taken and not written.
_FREE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view}
# These read no more of their first argument than they write.
_LOOKUPS = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}

ATTENTION_TWINS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (_aten._scaled_dot_product_flash_attention, 3),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (_aten._scaled_dot_product_flash_attention_backward, 4),
}
"""The CPU's attention kernels, for which torch has no formula: the GPU's kernel of each, and how many arguments count."""


def expect_rates(machine: Machine) -> None:
    """Returns when a machine says what op times are estimated from.

    Raises:
        ConfigError: the machine says nothing of its arithmetic or its memory.
    """
    needed = ("fp32_flops_per_s", "device_memory_bytes_per_s")
    missing = [key for key in needed if not getattr(machine, key)]
    if missing:
        raise ConfigError(
            f"expected {' and '.join(needed)} in machine {machine.name!r}, from which op times of a model that never ran "
            f"are estimated, but {' and '.join(missing)} is missing: add it (configs/machines has examples), or plan from "
            "the trace of a real step"
        )


def touched_tensors(func: Any, args: Any, kwargs: Any, out: Any) -> list[torch.Tensor] | None:
    """Returns the tensors that an op reads and writes, inputs first; None for an op that does no work on the device."""
    packet = kernel_of(func)
    results = _tensors(out)
    if func.is_view or packet in _FREE or not (results or func._schema.is_mutable):
        return None
    inputs = _tensors((args, kwargs))
    if packet in _LOOKUPS:
        inputs = [*inputs[1:], *results]
    return [*inputs, *results]


def kernel_of(func: Any) -> Any:
    """Returns the packet that an op's figures are known by: of one that writes into its first argument, its twin that does not.

    Torch's formulas know `addmm` and not `addmm_`, whose arithmetic is the same.
    """
    packet = func._overloadpacket
    name: str = packet.__name__
    return getattr(_aten, name[:-1], packet) if name.endswith("_") and not name.endswith("__") else packet


def touched_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the bytes of memory behind these tensors, counted once for each: an expanded one has fewer than its elements."""
    return sum(_memory_bytes(tensor) for tensor in tensors)


def flop_count(packet: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Returns the arithmetic operations of an op by torch's formulas, 0 where it has none."""
    if packet in ATTENTION_TWINS:
        twin, arguments = ATTENTION_TWINS[packet]
        return int(flop_registry[twin](*args[:arguments], out_val=out))
    count: Callable[..., int] | None = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=out)) if count is not None else 0


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_iter(values) if isinstance(leaf, torch.Tensor)]


def _memory_bytes(tensor: torch.Tensor) -> int:
    size_bytes = tensor.numel() * tensor.element_size()
    if tensor.layout is not torch.strided:
        return size_bytes
    return min(size_bytes, tensor.untyped_storage().nbytes())
