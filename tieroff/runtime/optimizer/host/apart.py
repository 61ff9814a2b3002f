"""What arithmetics make of numbers, and which of them numbers that are nothing special tell apart."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from tieroff.updates.arithmetic import candidates
from tieroff.updates.rule import Rule, typical

# Two arithmetics of bf16 differ in 2 elements of a million at least, or in none that was ever seen. A model too small to meet
# such an element is too small to gain from the CPU's updates.
_ELEMENTS = 1 << 20
_SEED = 0
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def results_of(rule: Rule, arithmetic: str, type_name: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns what an update of flat tensors of the host would write: the parameter, then state."""
    results = [tensor if index == 1 else torch.empty_like(tensor) for index, tensor in enumerate(inputs)]
    addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (inputs, results)]
    rule.part(arithmetic, type_name, inputs[0].numel(), *addresses).run()
    return [tensor for index, tensor in enumerate(results) if index != 1]


def count_that_differs(one: torch.Tensor, other: torch.Tensor) -> int:
    """Returns how many elements have other bits; what is no number equals what is none, whatever its bits."""
    as_bits = torch.int32 if one.dtype is torch.float32 else torch.int16
    differs = (one.view(as_bits) != other.view(as_bits)) & ~(one.isnan() & other.isnan())
    return int(differs.count_nonzero())


def told_apart(rule: Rule, type_name: str, one: str, other: str) -> bool:
    """True where two arithmetics give other bits for numbers that are nothing special, be it of one element."""
    return frozenset((one, other)) in _pairs(rule.kind, type_name)


@functools.cache
def _pairs(kind: tuple[str, str, tuple[str, ...]], type_name: str) -> frozenset[frozenset[str]]:
    rule = typical(*kind)
    inputs = [tensor.to(_TYPES[type_name]) for tensor in _numbers(rule.tensor_count)]
    results = {name: results_of(rule, name, type_name, inputs) for name in candidates(rule)}
    return frozenset(
        frozenset((one, other))
        for one, other in itertools.combinations(results, 2)
        if max(map(count_that_differs, results[one], results[other])) > 0
    )


def _numbers(tensor_count: int) -> list[torch.Tensor]:
    """Returns a parameter, a gradient, and state that gradients like it have made."""
    seeded = torch.Generator().manual_seed(_SEED)
    parameter, gradient, first = (torch.randn(_ELEMENTS, generator=seeded) * scale for scale in (2e-2, 1e-3, 1e-3))
    squares = [torch.rand(_ELEMENTS, generator=seeded) * 1e-6 for _ in range(2)]
    return [parameter, gradient, *([first, *squares] if tensor_count > 3 else [first.abs()])][:tensor_count]
