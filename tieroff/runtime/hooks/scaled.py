"""Gradients that user code measures and scales while they lie below: what clipping does, without moving them for it.

[Note: clipping what lies below]
A gradient that lies below is of a guarded class, where the recorded step showed that user code scales gradients. So the norm
of one and its product with a number come here. The norm was taken on the device when the gradient was copied out, by the
function that asks for it now. The factor waits until the gradient comes up for its update: [Note: factors that wait] in
items/gradient.py. Any other function gets the bytes as it expects them. A norm counts only while those bytes are what lies
below: not where a version moved since, nor after user code got them, nor while somebody holds an alias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tieroff.runtime.execution.autograd import as_the_engine, current_graph_task
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.items.gradient import Factor, GradientItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import guarded, version_of
from tieroff.runtime.step.recorded import Norm, Recorded

_NORMS: frozenset[Any] = frozenset({torch.linalg.vector_norm, torch._foreach_norm})
_PRODUCTS: frozenset[Any] = frozenset({torch.Tensor.mul_, torch._foreach_mul_})
_ZEROS: frozenset[Any] = frozenset({torch.Tensor.zero_, torch._foreach_zero_})


@dataclass(frozen=True, slots=True)
class _Measured:
    """Norms of what was copied out of a gradient, at a version of it."""

    version: int
    norms: Mapping[Norm, torch.Tensor]


class _Scalars:
    """Keeps numbers of the device, many in one memory: an allocator gives each tensor hundreds of bytes."""

    _COUNT = 64

    def __init__(self) -> None:
        self._rest: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a copy of a tensor of shape [], which nobody writes; the memory lives as long as one of its numbers."""
        rest = self._rest.setdefault((value.device, value.dtype), [])
        if not rest:
            rest += torch.empty(self._COUNT, dtype=value.dtype, device=value.device).unbind()
        return rest.pop().copy_(value)


class ScaledGradients:
    """Answers functions of user code that measure or scale gradients which lie below.

    Attributes:
        asked: norms that user code took of each gradient in the step that is traced; none of one that it only scaled.
        is_on: gradients that lie below are guarded.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self.asked: dict[Hashable, set[Norm]] = {}
        self.is_on = False
        self._wanted: Mapping[Hashable, frozenset[Norm]] = {}
        self._measured: dict[Hashable, _Measured] = {}
        self._scalars = _Scalars()

    def begin(self, recorded: Recorded | None) -> None:
        """A step begins; `recorded`: what is known of its kind."""
        self.asked, self._measured, self._scalars = {}, {}, _Scalars()
        self._wanted = recorded.norms if recorded is not None else {}
        self.is_on = bool(self._wanted) or self._context.state.record.recorder is not None

    def watches(self, item: GradientItem) -> bool:
        """True when this gradient is guarded while it is shown below; a rank's part of one is not: norms are of the whole."""
        return self.is_on and item.outer is None

    def leaves(self, item: GradientItem) -> None:
        """A gradient is about to be copied out: takes the norms that user code will ask for."""
        wanted = self._wanted.get(item.key)
        if not wanted or item.value is None or item.tensor is None:
            return  # the program may have dropped it since: cleared between forward and backward, say
        with self._context.clock.computing(), as_the_engine():
            norms = {norm: self._scalars.keep(norm.of(item.value)) for norm in wanted}
        self._measured[item.key] = _Measured(version_of(item.living), norms)

    def used(self, item: HomeItem) -> None:
        """User code gets the bytes of a gradient, which it may write past every version."""
        self._measured.pop(item.key, None)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Answers a norm or a product of gradients that lie below, or has them set to 0.

        Returns:
            What the function returns, in a tuple; None: it is another function, or none of these gradients can be left below.
        """
        if function in _ZEROS and len(args) == 1 and not kwargs:
            return self._later(function, args, self._waits_with_zero)
        if kwargs or len(args) != 2:
            return None
        if function in _NORMS and isinstance(args[1], (int, float)):
            return self._norms(function, args[0], float(args[1]))
        if function in _PRODUCTS and _is_number(args[1]):
            # One copy for all of a call, which whoever needs the number reads once.
            factor = functools.cache(lambda: self._as_it_is(args[1]))
            return self._later(function, args, lambda tensor: self._waits(tensor, factor))
        return None

    def _norms(self, function: Any, what: Any, order: float) -> tuple[Any] | None:
        norm = Norm(is_listed=isinstance(what, (list, tuple)), order=order)
        tensors = list(what) if norm.is_listed else [what]
        answers = [self._norm(item, norm) if (item := self._below(tensor)) is not None else None for tensor in tensors]
        if all(answer is None for answer in answers):
            return None
        if not norm.is_listed:
            return (answers[0],)
        rest = [tensor for tensor, answer in zip(tensors, answers, strict=True) if answer is None]
        others = iter(function(rest, order) if rest else ())
        return ([next(others) if answer is None else answer for answer in answers],)

    def _norm(self, item: GradientItem, norm: Norm) -> torch.Tensor | None:
        if item.waiting is not None:
            return None
        recorder = self._context.state.record.recorder
        if recorder is not None:
            self.asked.setdefault(item.key, set()).add(norm)
        known = self._measured.get(item.key)
        if known is not None and known.version == version_of(item.living) and norm in known.norms:
            return known.norms[norm].clone()
        with self._context.state.lock, as_the_engine():
            value = self._norm_of(item, norm)
        if recorder is not None:  # each takes room of its own, and what is computed of it is the step's
            recorder.given([value.untyped_storage()])
        return value

    def _norm_of(self, item: GradientItem, norm: Norm) -> torch.Tensor:
        traffic = self._context.traffic
        if item.is_shown_below and item.lower is not None:
            return norm.of(item.lower)
        traffic.want(item)
        value = norm.of(item.valid_value)
        item.leave(traffic)
        return value

    def _later(self, function: Any, args: tuple[Any, ...], waits: Callable[[Any], bool]) -> tuple[Any] | None:
        what, *rest = args
        is_listed = isinstance(what, (list, tuple))
        tensors = list(what) if is_listed else [what]
        others = [tensor for tensor in tensors if not waits(tensor)]
        if len(others) == len(tensors):
            return None
        if others:
            function(others, *rest)
        return (None if is_listed else what,)

    def _as_it_is(self, factor: Any) -> Factor:
        """Returns a number as it is now: whether a tensor was written since the last call, no version would say."""
        return self._scalars.keep(factor.detach()) if isinstance(factor, torch.Tensor) else factor

    def _waits(self, tensor: Any, factor: Callable[[], Factor]) -> bool:
        item = self._below(tensor)
        if item is None or not item.dtype.is_floating_point:
            return False
        if current_graph_task() != -1:
            return False  # a hook's, which writes: in a step with another plan the gradient is on the device then
        with self._context.state.lock, as_the_engine():
            if self._context.state.record.recorder is not None:
                self.asked.setdefault(item.key, set())
            item.wait_with(factor())
        return True

    def _waits_with_zero(self, tensor: Any) -> bool:
        item, is_recorded = self._below(tensor), self._context.state.record.recorder is not None
        if item is None or item.is_shown_below or item.device is not None or is_recorded or current_graph_task() != -1:
            return False
        with self._context.state.lock, as_the_engine():
            self.used(item)
            item.wait_with_zero()
        return True

    def _below(self, tensor: object) -> GradientItem | None:
        item = guarded(tensor)
        if not isinstance(item, GradientItem) or item.guard is not self._context.guard:
            return None  # another model's engine sees to it
        if item.outer is not None or item.living.requires_grad:
            return None  # autograd would have to see the call
        return item if item.may_wait() else None


def _is_number(factor: Any) -> bool:
    """True for what a floating-point tensor may be multiplied by in place, whatever it holds."""
    if isinstance(factor, torch.Tensor):
        return type(factor) is torch.Tensor and factor.dim() == 0 and factor.is_floating_point() and not factor.requires_grad
    return isinstance(factor, (int, float)) and not isinstance(factor, bool)
