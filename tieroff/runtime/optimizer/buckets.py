"""The buckets of an optimizer: which of its parameters are updated together.

[Note: parameters on one memory] After `a.data = b.data` an update writes the same bytes for both. In one call, as `foreach`
does it, both are decayed before both get their step; one after the other they are rounded otherwise. So parameters that share
memory are in one bucket, and so are those that have a tensor of their state in common. Whether any do is looked at in each
update, since nothing tells.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from tieroff.core.buckets import buckets_of
from tieroff.runtime.items.offloaded import PLAIN, address_of, guarded
from tieroff.runtime.movable import local_of
from tieroff.runtime.optimizer.known import TRIED, Known, known_of
from tieroff.runtime.optimizer.trial import Trial

log = logging.getLogger("tieroff")

_TRIAL_BYTES = 1 << 20  # of parameters that a trial may copy beyond the largest bucket


class Buckets:
    """The parameters of an optimizer in update order, in lists of bounded size; one list while it is not known to be right.

    Attributes:
        known: why the optimizer may be stepped in parts; None: it is stepped whole.
        begins_with_closure: it calls a closure once, before it updates, and does not use what that gives.
        current: what `all` returned last.
        position: id of a parameter -> its place in the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, is_replaced: bool) -> None:
        """Decides by what the optimizer is; where that does not say it, `settle` decides at the first update.

        Args:
            optimizer: the user's.
            is_replaced: this instance has a `step` of its own.
        """
        self._optimizer = optimizer
        self._ids: tuple[int, ...] | None = None
        self._shared: tuple[tuple[int, ...], ...] = ()  # positions of parameters that share memory
        self.current: list[list[torch.Tensor]] = []
        self.position: dict[int, int] = {}
        # By id of one of `current`: how many parameters each group had, and those of the bucket in each.
        self._parts: dict[int, tuple[list[int], list[list[torch.Tensor]]]] = {}
        self._together: dict[tuple[int, ...], list[torch.Tensor]] = {}  # by numbers of those of `current`
        self._has_tried_closures = False
        self.known: Known | None = None if is_replaced else known_of(optimizer)
        self._is_settled = self.begins_with_closure = self.known is not None and self.known is not TRIED
        if is_replaced:
            self._is_whole("its step was replaced on the instance")
        elif self.known is None and _builds_on_another(type(optimizer)):
            self._is_whole("it builds on the step of another optimizer")

    @property
    def is_split(self) -> bool:
        """True when the optimizer may be stepped in parts."""
        return self.known is not None

    @property
    def is_trusted(self) -> bool:
        """True when that is known of its class, and was not only tried."""
        return self.known is not None and self.known is not TRIED

    @property
    def is_read(self) -> bool:
        """True when its code was read, so that it is known how it updates; see `Known.is_read`."""
        return self.known is not None and self.known.is_read

    def all(self) -> list[list[torch.Tensor]]:
        """Returns the buckets of the parameters that the optimizer has now."""
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        ids = tuple(map(id, params))
        shared = _on_one_memory(params) + _with_one_state(params, self._optimizer.state) if self.is_split else ()
        if ids != self._ids or shared != self._shared:
            ranges = buckets_of([local_bytes(p) for p in params]) if self.is_split else [range(len(params))]
            self.current = [[params[position] for position in bucket] for bucket in _joined(ranges, shared)]
            self._ids, self._shared = ids, shared
            self.position = {key: position for position, key in enumerate(ids)}
            self._parts, self._together = {}, {}
        return self.current

    def together(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Returns the parameters of some of `current`, which are updated in one call."""
        key = tuple(numbers)
        if key not in self._together:
            self._together[key] = [param for number in numbers for param in self.current[number]]
        return self._together[key]

    def parts_of(self, bucket: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Returns the parameters of a bucket in each group of the optimizer."""
        groups = self._optimizer.param_groups
        counts = [len(group["params"]) for group in groups]
        known = self._parts.get(id(bucket))
        if known is None or known[0] != counts:
            wanted = {id(param) for param in bucket}
            known = (counts, [[param for param in group["params"] if id(param) in wanted] for group in groups])
            if any(bucket is one for one in (*self.current, *self._together.values())):
                self._parts[id(bucket)] = known
        return [part.copy() for part in known[1]]

    def settle(self, value_of: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tries an optimizer that nobody knows, once it is about to make its first update.

        Args:
            value_of: returns where a tensor of it has its value now.
            args: of its `step`.
            kwargs: of its `step`.
        """
        if self._is_settled or not self._has_gradients():
            return
        reason = self._trial(value_of).why_not(args, kwargs)
        if reason:
            self._is_whole(reason)
            return
        self.known, self._is_settled, self._ids = TRIED, True, None

    def settle_closures(self, value_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Tries an optimizer that was stepped whole with a closure, and has the gradients of that: the next may go in parts."""
        if self._has_tried_closures or (self._is_settled and not self.is_split) or not self._has_gradients():
            return
        self._has_tried_closures = True
        if self._trial(value_of).begins_with_closure():
            self.settle(value_of, (), {})
            self.begins_with_closure = self.is_split

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for group in self._optimizer.param_groups for p in group["params"])

    def _trial(self, value_of: Callable[[torch.Tensor], torch.Tensor]) -> Trial:
        sizes = [local_bytes(p) for group in self._optimizer.param_groups for p in group["params"]]
        largest_bytes = max(sum(sizes[part.start : part.stop]) for part in buckets_of(sizes))
        return Trial(self._optimizer, raw_step(self._optimizer), value_of, largest_bytes + _TRIAL_BYTES)

    def _is_whole(self, reason: str) -> None:
        self._is_settled = True
        log.warning(
            "%s is stepped whole (%s), so all its parameters, their gradients and their state have to fit the device at once; "
            "where it updates each parameter by itself, say so with tieroff.per_parameter",
            type(self._optimizer).__name__,
            reason,
        )


class Narrowed:
    """The groups of an optimizer while `step` runs on a part of its parameters: the same objects, with shorter lists."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._whole: list[tuple[dict[str, Any], list[torch.Tensor]]] = []

    def narrow(self, parts: list[list[torch.Tensor]]) -> None:
        """Leaves these parameters in the groups; see `Buckets.parts_of`."""
        self._whole = [(group, group["params"]) for group in self._optimizer.param_groups]  # first: see `restore`
        for (group, _), part in zip(self._whole, parts, strict=True):
            group["params"] = part

    def restore(self) -> None:
        """Gives the groups all their parameters back; does no harm when they have them."""
        for group, params in self._whole:
            group["params"] = params
        self._whole = []


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns the optimizer class's `step` without the wrapper that fires the hooks."""
    return _without_hooks(type(optimizer).step)


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `step` without the wrapper that torch puts in its place in each class, also of one that is inherited."""
    own: Callable[..., Any] = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return own


def _on_one_memory(params: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Returns the positions of parameters that lie on the same memory; of what lies below, each has its own."""
    addresses = [_address_on_device(p) for p in params]
    if len(set(addresses)) + addresses.count(0) == len(addresses) + (0 in addresses):
        return ()
    positions: dict[int, list[int]] = {}
    for position, address in enumerate(addresses):
        if address:
            positions.setdefault(address, []).append(position)
    return tuple(tuple(found) for found in positions.values() if len(found) > 1)


def _address_on_device(parameter: torch.Tensor) -> int:
    """Returns where a parameter's memory on the device begins; 0 of one that lies below, or has no address."""
    if type(parameter) in PLAIN:
        return parameter.data_ptr() if parameter.layout is torch.strided else 0
    item = guarded(parameter)  # it may be up: user code that uses it goes through the guard all the same
    return address_of(parameter) if item is not None and item.is_lifted else 0


def _with_one_state(params: Sequence[torch.Tensor], state: Any) -> tuple[tuple[int, ...], ...]:
    """Returns the positions of parameters that have a tensor of their state in common, with an element for each of theirs.

    Others that are shared are tables, which nothing writes (bitsandbytes' maps of 8-bit numbers).
    """
    entries = chain.from_iterable(map(dict.values, (values for values in state.values() if isinstance(values, dict))))
    held = [id(value) for value in entries if isinstance(value, torch.Tensor)]
    if len(set(held)) == len(held):
        return ()
    positions: dict[int, list[int]] = {}
    for position, param in enumerate(params):
        values = state.get(param)
        for value in values.values() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor) and value.shape == param.shape:
                positions.setdefault(id(value), []).append(position)
    return tuple(tuple(found) for found in positions.values() if len(found) > 1)


def _joined(ranges: Sequence[range], shared: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns buckets of positions; those that hold parameters on the same memory are one."""
    buckets = [list(part) for part in ranges]
    number_of = {position: number for number, bucket in enumerate(buckets) for position in bucket}
    for positions in shared:
        first, *others = sorted({number_of[position] for position in positions})
        for number in others:
            number_of.update(dict.fromkeys(buckets[number], first))
            buckets[first] += buckets[number]
            buckets[number] = []
    return [sorted(bucket) for bucket in buckets if bucket]


def local_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes that a tensor has on this rank."""
    tensor = local_of(tensor)
    return tensor.numel() * tensor.element_size()


def _builds_on_another(kind: type) -> bool:
    """Returns whether a class has a `step` and inherits one that may be called by it, whose hooks would fire in each bucket."""
    steps = (base.__dict__["step"] for base in kind.__mro__[:-1] if "step" in base.__dict__)
    return len({_without_hooks(step) for step in steps if not _is_abstract(step)}) > 1


def _is_abstract(step: Any) -> bool:
    """Returns whether a method calls nothing: that of torch's class, or of a library's base class."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return code is not None and not code.co_freevars and set(code.co_names) <= {"NotImplementedError"}
