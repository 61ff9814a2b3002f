"""What the rehearsed device asks once for each kind of call: its time, and its results where no meta kernel says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from tieroff.core.machine import Machine
from tieroff.tracing.clock.model import Clock

_SCALAR_TYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    8: torch.complex32,
    9: torch.complex64,
    10: torch.complex128,
    11: torch.bool,
    15: torch.bfloat16,
}
"""By the number that PyTorch's C++ gives each, in which form arguments come here."""


class Costs:
    """Answers for the device of one machine.

    Raises:
        ConfigError: the machine says nothing of its arithmetic or its memory.
    """

    def __init__(self, machine: Machine) -> None:
        self._clock = Clock.of(machine)

    def duration_ns(self, name: str, overload: str, arguments: Sequence[Any], results: Sequence[Any]) -> int:
        """Returns the time of one call with these meta tensors, in ns; 0 for one that does no work on the device."""
        func = _operator(name, overload)
        args, kwargs = _as_called(func, arguments)
        return self._clock.duration_ns(func, args, kwargs, results[0] if len(results) == 1 else tuple(results))

    def decomposed(self, name: str, overload: str, arguments: Sequence[Any]) -> Any:
        """Returns the meta tensors that an operator without a meta kernel gives.

        Raises:
            NotImplementedError: nobody knows.
        """
        func = _operator(name, overload)
        known = decomposition_table.get(func)
        if known is None:
            raise NotImplementedError(
                f"tieroff rehearse: PyTorch does not know the shape of what {func} returns without running it; "
                "keep this operator off the device, or leave it out of the rehearsed script"
            )
        args, kwargs = _as_called(func, arguments)
        return known(*args, **kwargs)


def _operator(name: str, overload: str) -> Any:
    namespace, _, base = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _as_called(func: Any, arguments: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments as Python gives them: those that have a name only by name, types as types."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for declared, value in zip(func._schema.arguments, arguments, strict=True):
        if isinstance(value, int) and "ScalarType" in str(declared.real_type):
            value = _SCALAR_TYPES.get(value, torch.float32)
        if declared.kwarg_only:
            kwargs[declared.name] = value
        else:
            args.append(value)
    return args, kwargs
