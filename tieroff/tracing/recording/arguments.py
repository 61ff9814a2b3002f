"""What an op is given and returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator


class Arguments:
    """Which tensors an op is given, and which of them it writes."""

    def __init__(self) -> None:
        # By id, since an operator's hash is a call of Python: the operator, and which arguments it writes.
        self._written: dict[int, tuple[Any, tuple[int, ...], tuple[str, ...]]] = {}
        self._counts_within: dict[int, tuple[Any, bool]] = {}

    def of(self, func: Any, args: Any, kwargs: Any) -> list[tuple[torch.Tensor, bool]]:
        """Returns an op's inputs, each with whether it is written."""
        written = self._written.get(id(func))
        if written is None:
            # A higher-order operator has no schema of its own: it writes none of its inputs, as torch asks of such.
            schema = () if isinstance(func, HigherOrderOperator) else func._schema.arguments
            is_written = [a.alias_info is not None and a.alias_info.is_write for a in schema]
            names = tuple(a.name for a, w in zip(schema, is_written, strict=True) if w)
            written = self._written[id(func)] = func, tuple(i for i, w in enumerate(is_written) if w), names
        _, positions, names = written
        out = []
        for i, arg in enumerate(args):
            if isinstance(arg, (torch.Tensor, list, tuple, dict)):
                leaves = (arg,) if isinstance(arg, torch.Tensor) else tensors_in((arg,))
                out += [(leaf, i in positions) for leaf in leaves]
        if kwargs:
            out += [(leaf, name in names) for name, arg in kwargs.items() for leaf in tensors_in((arg,))]
        return out

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an op below the mode that calls this, with the versions of what it writes moved as without a mode.

        [Note: versions under a mode]
        A write moves its tensor's version on the way to a dispatch mode, and what a kernel calls below the mode moves none.
        Ops that write lists (`_foreach_add_`, as every optimizer of torch calls it) leave it to what their kernels call, tensor
        by tensor: they would move no version in a step that is recorded, and autograd would not see the write.
        """
        known = self._counts_within.get(id(func))
        if known is None:
            known = self._counts_within[id(func)] = func, counts_versions_within(func)
        is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(_COUNTS_VERSIONS)
        if not known[1] or not is_excluded:
            return func(*args, **kwargs)
        torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_VERSIONS, False)
        try:
            return func(*args, **kwargs)
        finally:
            torch._C._dispatch_tls_set_dispatch_key_excluded(_COUNTS_VERSIONS, True)


_COUNTS_VERSIONS = torch._C.DispatchKey.ADInplaceOrView


def counts_versions_within(func: Any) -> bool:
    """True for an op that writes tensors in lists and leaves it to its kernel to move their versions."""
    if isinstance(func, HigherOrderOperator):
        return False
    writes_lists = any(
        argument.alias_info is not None and argument.alias_info.is_write and isinstance(argument.type, torch.ListType)
        for argument in func._schema.arguments
    )
    return writes_lists and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView")


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors among the arguments or results of an op; faster than pytree, which asks for every type it knows."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def is_view(func: Any) -> bool:
    """Returns whether an op computes nothing: it runs no kernel that could take scratch."""
    return bool(getattr(func, "is_view", False))
