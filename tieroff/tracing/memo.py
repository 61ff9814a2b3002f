"""What ops on fake tensors return, told from equal calls before: a step repeats its layers and rounds, and few kinds of calls.

Most of a dry run is PyTorch's own bookkeeping for fake tensors, about 0.2 ms an op. An op of which the same was seen (the
same function; tensors of the same shapes, strides, types and memory; the same other arguments) is answered from here instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tieroff.tracing.recording.arguments import tensors_in

_UNFIT = frozenset({torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Ops whose effect is more than new tensors: the geometry of an argument, or a result that depends on values."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class _Made:
    """How a tensor among the results is made again.

    Attributes:
        source: of the tensors that the op was given, which one it is, or has the memory of; -1: its memory is new.
        is_same: it is that one.
    """

    source: int
    is_same: bool
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an op: what it was given, as far as results and time depend on it.

    Attributes:
        key: equal for calls whose results have the same geometry.
        tensors: the tensors among the arguments, in order.
    """

    key: Hashable
    tensors: Sequence[FakeTensor]


class Memo:
    """Kinds of calls and what they returned, of one step."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, int]] = {}

    def call_of(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        """Returns the call, None where it may depend on more than this knows of."""
        tensors: list[FakeTensor] = []
        parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        seen: dict[int, int] = {}
        with torch._C.DisableTorchFunction():  # a mode for functions would be asked at every attribute
            if not (_describe(args, parts, tensors) and _describe(kwargs.items(), parts, tensors) and tensors):
                return None
            parts += [seen.setdefault(tensor.untyped_storage()._cdata, i) for i, tensor in enumerate(tensors)]
        return Call(tuple(parts), tensors)

    def find(self, call: Call) -> tuple[Any, int] | None:
        """Returns the results of a call made anew, and its duration in ns; None of a kind not seen before."""
        known = self._known.get(call.key)
        if known is None:
            return None
        made, duration_ns = known
        with torch._C.DisableTorchFunction():
            return _remake(made, call.tensors), duration_ns

    def note(self, call: Call, func: Any, args: Any, kwargs: Any, out: Any, duration_ns: int) -> None:
        """Keeps what a call returned, if it can be made again, and took."""
        if _UNFIT.isdisjoint(func.tags) and self._is_unchanged(call, func, args, kwargs):
            memory = {tensor.untyped_storage()._cdata: position for position, tensor in enumerate(call.tensors)}
            made = _made_of(out, call.tensors, memory)
            fresh = [each.untyped_storage()._cdata for each in tensors_in((out,)) if isinstance(each, FakeTensor)]
            fresh = [each for each in fresh if each not in memory]
            if made is not NotImplemented and len(fresh) == len(set(fresh)):
                self._known[call.key] = made, duration_ns

    def _is_unchanged(self, call: Call, func: Any, args: Any, kwargs: Any) -> bool:
        """Returns whether the arguments still are what they were: an `out` of another size is not."""
        after = self.call_of(func, args, kwargs)
        return after is not None and after.key == call.key


def _describe(values: Iterable[Any], parts: list[Any], tensors: list[FakeTensor]) -> bool:
    """Adds to `parts` what the values are, and to `tensors` those among them; returns False for what cannot be told."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.layout is not torch.strided or value.constant is not None or value.is_neg() or value.is_conj():
                return False
            tensors.append(value)
            parts += (
                *(value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad),
                *(value.untyped_storage().nbytes(), value.fake_device),
            )
        elif kind is list or kind is tuple:
            parts += (kind, len(value))
            if not _describe(value, parts, tensors):
                return False
        elif kind in _PLAIN:
            parts += (kind, value)  # 1, 1.0 and True are equal, and do not promote alike
        else:
            return False
    return True


def _made_of(out: Any, tensors: Sequence[FakeTensor], memory: dict[int, int]) -> Any:
    """Returns how results are made again: a _Made per tensor, in the containers that the op returns; else NotImplemented."""
    if out is None:
        return None
    if type(out) in (list, tuple):
        parts = type(out)(_made_of(each, tensors, memory) for each in out)
        return NotImplemented if any(part is NotImplemented for part in parts) else parts
    if type(out) is not FakeTensor or out.layout is not torch.strided or out.constant is not None:
        return NotImplemented
    if out.is_neg() or out.is_conj() or out.requires_grad:
        return NotImplemented
    position = next((i for i, tensor in enumerate(tensors) if tensor is out), -1)
    storage = out.untyped_storage()
    source = position if position >= 0 else memory.get(storage._cdata, -1)
    made = _Made(source, position >= 0, out.shape, out.stride(), int(out.storage_offset()), out.dtype, out.fake_device)
    is_whole = source >= 0 or (not made.offset and storage.nbytes() == _fresh(made).untyped_storage().nbytes())
    return made if is_whole else NotImplemented


def _remake(made: Any, tensors: Sequence[FakeTensor]) -> Any:
    if made is None:
        return None
    if type(made) is not _Made:
        return type(made)(_remake(each, tensors) for each in made)
    source = tensors[made.source]
    if made.is_same:
        return source
    mode = tensors[0].fake_mode
    element = _fresh(made)
    if made.source >= 0:
        with torch._C._DisableTorchDispatch():
            element.set_(source.untyped_storage(), made.offset, made.size, made.stride)
    return FakeTensor(mode, element, made.device)


def _fresh(made: _Made) -> torch.Tensor:
    """Returns a tensor without memory, of the result's geometry."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(made.size, made.stride, dtype=made.dtype, device="meta")
