"""Updates of an optimizer's buckets in host memory, where a plan has them and a proof allows them.

[Note: updates in host memory]
A bucket that the plan has the CPU update is submitted in `optimizer.step()`: its parameters, gradients and state lie below,
options and counters are read, and one call of the native pool raises the counters and keeps the job. From there on its tensors
are UPDATING (items/residency.py): whoever wants their bytes waits, in `Traffic.settle` or in the fetch. `step` returns before.

What it finds otherwise than that (something on the device that somebody holds, a bucket that was not proven, options that are
tensors) has the step leave its plan, and the device updates as ever. Nothing has been changed by then.

Memory below that somebody else holds, as a `state_dict()`, stays as it is: the job writes to a new place.
An exception may come between any two lines. So what follows from a submission is noted before it, and done again by `restore`:
whether it was submitted the pool tells, and what was done already the items do.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tieroff.core.buckets import fills_vectors
from tieroff.core.tensor import Tier
from tieroff.errors import StoreError
from tieroff.runtime.backend.base import TRANSFER_TIMEOUT_S
from tieroff.runtime.backend.place import HomePlace
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.forked import settle_before_forks
from tieroff.runtime.items.gradient import ZERO, GradientItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import owners_of
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import LOWER
from tieroff.runtime.optimizer.buckets import Buckets
from tieroff.runtime.optimizer.host.capture import COUNTER, Asked, asked, capture, counts
from tieroff.runtime.optimizer.host.evidence import Evidence
from tieroff.runtime.optimizer.host.job import Job
from tieroff.runtime.settings import Settings
from tieroff.runtime.step.mode import PLANNED
from tieroff.updates.native import _native
from tieroff.updates.pool import make_pool

_PLAIN_ITEMS = frozenset({ParameterItem, GradientItem, HomeItem})


class NotBelowError(Exception):
    """Why a bucket is updated on the device this time.

    Attributes:
        is_expected: it is, so that people need not hear of it.
    """

    def __init__(self, why: str, *, is_expected: bool = False) -> None:
        super().__init__(why)
        self.is_expected = is_expected


@dataclass(frozen=True, slots=True)
class _Counted:
    """A counter on the device.

    Attributes:
        version: before the update counted; of one that is over, after.
        count: with the update.
        update: the number of that among the optimizer's.
    """

    tensor: torch.Tensor
    version: int
    count: float
    update: int

    def is_of(self, tensor: torch.Tensor, update: int) -> bool:
        """True where this is still what the counter says: fused kernels move no version, but make updates."""
        return self.tensor is tensor and self.version == tensor._version and self.update == update


@dataclass(slots=True)
class _Submission:
    """What one call of the pool takes, and what follows from it."""

    ticket: int
    parts: list[_native.UpdatePart] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)  # of counters in host memory
    counters: list[_Counted] = field(default_factory=list)
    items: list[HomeItem] = field(default_factory=list)
    moves: list[tuple[HomeItem, HomePlace]] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)  # whose versions tell that they were written
    left: list[torch.Tensor] = field(default_factory=list)  # that stay on the device


class HostUpdates:
    """Submits buckets, and compares updates of the device with those that the CPU would make.

    Attributes:
        evidence: whether updates may be made below.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, buckets: Buckets, context: StepContext, settings: Settings) -> None:
        self._optimizer: Any = optimizer
        self._buckets, self._context = buckets, context
        self.evidence = Evidence(optimizer, may_be=settings.updates_on_host and buckets.is_trusted, exact=settings.exact)
        self._pool: _native.UpdatePool | None = None
        self._pending: _Submission | None = None
        self._updates: dict[int, _Counted] = {}  # by id of the counter
        self._failed_at = 0  # the update in which a bucket was found above last
        self._read: dict[int, tuple[torch.Tensor, float]] = {}  # by id, numbers of the device that were read in this update
        self._pid = os.getpid()
        settle_before_forks(self)

    # -- on the device: comparing --------------------------------------------------------------------------------------

    @contextmanager
    def compared(self, bucket: list[torch.Tensor]) -> Iterator[None]:
        """Inside, the device updates a bucket, all of which is there."""
        if not self.evidence.is_wanted:
            yield
            return
        homes, captures = self._context.homes, []
        for group, parameters in zip(self._optimizer.param_groups, self._buckets.parts_of(bucket), strict=True):
            for parameter in parameters:
                if homes.parameter(parameter) is None or parameter.grad is None:
                    continue  # not below, ever: the CPU has no part in it
                if not fills_vectors(parameter.numel()):
                    continue  # the device's, in every plan
                found = capture(self._optimizer, group, parameter)
                if found is not None:
                    captures.append(found)
                elif self._optimizer.state.get(parameter):
                    self.evidence.refuse(f"no kernel makes its updates of {parameter.dtype} with these options")
                    break
        store, clock = self._context.traffic.stores[Tier.HOST], self._context.clock
        with self.evidence.compared(captures, store.capacity_bytes - store.used_bytes):
            clock.resume()  # what is copied and compared is no compute of the step
            yield
            clock.pause()

    # -- in host memory ------------------------------------------------------------------------------------------------

    def is_planned(self, number: int) -> bool:
        """True for a bucket that the plan has the CPU update."""
        planned = self._context.runner.planned
        return self._context.state.mode is PLANNED and planned is not None and number in planned.executable.host_buckets

    def submit(self, bucket: list[torch.Tensor]) -> list[torch.Tensor]:
        """Submits the update of a bucket, whose tick began.

        Returns:
            Its parameters that never lie below, as they are too small, which the device is to update.

        Raises:
            NotBelowError: it cannot be made below; nothing has changed.
        """
        if self.evidence.begins_again():
            raise NotBelowError("the CPU's updates are compared with the device's again", is_expected=True)
        self._pool = pool = self._pool or make_pool(self._context.traffic.backend.near_cpus)
        try:
            submission = self._prepared(bucket, pool.last_ticket + 1)
        except NotBelowError as why:
            if not why.is_expected:
                self._note_failure(str(why))
            raise
        self._pending = submission
        pool.submit(submission.parts, [], submission.addresses)
        self._finish(pool, submission)
        return submission.left

    def _note_failure(self, why: str) -> None:
        """What kept a bucket from being updated below in two updates in a row, will: plans are made without such from here."""
        if self._failed_at == self.evidence.updates - 1:
            self.evidence.refuse(why)
        self._failed_at = self.evidence.updates

    def _prepared(self, bucket: list[torch.Tensor], ticket: int) -> _Submission:
        optimizer = self._optimizer
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            raise NotBelowError("a GradScaler has the optimizer scale gradients")
        submission = _Submission(ticket)
        for group, parameters in zip(optimizer.param_groups, self._buckets.parts_of(bucket), strict=True):
            for parameter in parameters:
                if parameter.grad is not None and self._context.homes.parameter(parameter) is None:
                    submission.left.append(parameter)
                elif parameter.grad is not None:
                    self._add(submission, group, parameter)
        return submission

    def _add(self, submission: _Submission, group: Mapping[str, Any], parameter: torch.Tensor) -> None:
        homes, state = self._context.homes, self._optimizer.state.get(parameter) or {}
        item = homes.parameter(parameter)
        gradient = homes.gradients.get(item.position) if item is not None else None
        if item is None or gradient is None or gradient.tensor is not parameter.grad:
            raise NotBelowError("a gradient is not under the engine's care")
        count = item.size_bytes // item.dtype.itemsize
        if not fills_vectors(count):
            raise NotBelowError(f"{item.name} has {count} elements, of which kernels may round the last ones otherwise")
        found = asked(self._optimizer, group, state, item.dtype, self._count(submission, parameter, state))
        if found is not None and self.evidence.meets(found.kind):
            raise NotBelowError(f"the update of {item.name} has options with which none was compared", is_expected=True)
        arithmetic = self.evidence.arithmetic_of(found.kind) if found is not None else None
        if found is None or arithmetic is None:
            raise NotBelowError(f"no kernel is proven for the update of {item.name}")
        items = [item, gradient, *self._state_items(parameter, state, found)]
        inputs, outputs = [], []
        for one in items:
            self._bring_below(one, item)
            inputs.append(one.lower_address)
            outputs.append(one.lower_address if one is gradient else self._place_to_write(submission, one))
        factors = [*self._factors(gradient)]
        submission.parts.append(found.rule.part(arithmetic, found.type_name, count, inputs, outputs, factors))
        submission.items += items
        if not group.get("fused"):
            submission.written.append(parameter)

    def _state_items(self, parameter: torch.Tensor, state: Mapping[str, Any], found: Asked) -> list[HomeItem]:
        items = [self._context.homes.states.get((id(parameter), key)) for key in found.state]
        known = [item for item, key in zip(items, found.state, strict=True) if item is not None and item.tensor is state[key]]
        if len(known) != len(items):
            raise NotBelowError("optimizer state is not under the engine's care")
        return known

    def _bring_below(self, item: HomeItem, like: HomeItem) -> None:
        """Has an item lie in host memory alone, with its latest value, and no copy of it under way."""
        traffic, place = self._context.traffic, item.place
        if type(item) not in _PLAIN_ITEMS or item.outer is not None or item.readers:
            raise NotBelowError(f"{item.name} is a part of other tensors")
        if (item.dtype, item.size, item.stride) != (like.dtype, like.size, like.stride):
            raise NotBelowError(f"{item.name} lies otherwise than {like.name}")
        traffic.settle(item)
        item.refresh(traffic)
        if item.device is not None:
            if item.is_held:
                raise NotBelowError(f"the program holds memory of {item.name}")
            item.leave(traffic)
            place = item.place
        if item.state is not LOWER or not isinstance(place, HomePlace) or place.tier is not Tier.HOST:
            raise NotBelowError(f"{item.name} is not in host memory")
        place.end_transfers()

    def _place_to_write(self, submission: _Submission, item: HomeItem) -> int:
        """Returns where the new value goes: where the old one lies, or elsewhere while somebody else holds that."""
        if item.lower is not None and owners_of(item.lower) <= 1:
            return item.lower_address
        try:
            place = HomePlace(self._context.traffic.stores[Tier.HOST], item.size_bytes)
        except StoreError as error:
            raise NotBelowError(f"the program holds memory of {item.name}, and there is no room for another: {error}") from None
        submission.moves.append((item, place))
        return place.home.address

    def _factors(self, gradient: GradientItem) -> Iterator[float]:
        """Yields what the gradient is multiplied by first; see [Note: factors that wait] in items/gradient.py."""
        waiting, lower = gradient.waiting, gradient.lower
        if waiting is None or lower is None:
            return
        for factor in waiting.left_of(lower, waiting.below_version):
            if factor is ZERO:
                raise NotBelowError(f"{gradient.name} was set to 0 since backward", is_expected=True)
            if isinstance(factor, torch.Tensor) and factor.dtype is not gradient.dtype:
                raise NotBelowError(f"{gradient.name} is multiplied by a number of another type")
            yield self._number(factor)

    def _number(self, factor: torch.Tensor | float) -> float:
        """Returns a factor; that of the device is read once in an update, since the host waits for all that was given to it."""
        if not isinstance(factor, torch.Tensor):
            return float(factor)
        known = self._read.get(id(factor))
        if known is None:
            known = self._read[id(factor)] = factor, float(factor)
        return known[1]

    def update_ended(self) -> None:
        """All buckets were updated."""
        self._read.clear()
        self.evidence.update_ended()

    # -- counters of updates -------------------------------------------------------------------------------------------

    def _count(self, submission: _Submission, parameter: torch.Tensor, state: Mapping[str, Any]) -> float:
        """Returns how many updates a parameter had, and has the submission count one more."""
        counter = state.get(COUNTER)
        if not counts(self._optimizer):
            return 0.0
        if not isinstance(counter, torch.Tensor) or counter.dtype is not torch.float32 or counter.numel() != 1:
            raise NotBelowError("updates are counted in another type than float32")
        item = self._context.homes.states.get((id(parameter), COUNTER))
        if item is not None and item.tensor is counter:
            self._bring_below(item, item)
            assert item.lower is not None
            if owners_of(item.lower) > 1:
                raise NotBelowError(f"the program holds memory of {item.name}")
            submission.addresses.append(item.lower_address)
            return float(item.lower)
        if counter.device.type == "cpu":
            submission.addresses.append(counter.data_ptr())
            return float(counter)
        known = self._updates.get(id(counter))  # to ask the device would have the host wait for it
        is_known = known is not None and known.is_of(counter, self.evidence.updates - 1)
        count = known.count if known is not None and is_known else float(counter)
        submission.counters.append(_Counted(counter, counter._version, count + 1, self.evidence.updates))
        return count

    # -- what follows --------------------------------------------------------------------------------------------------

    def _finish(self, pool: _native.UpdatePool, submission: _Submission) -> None:
        """Does what follows from a submission, as far as it was not done."""
        traffic = self._context.traffic
        job = Job(pool, submission.ticket)
        for item, place in submission.moves:
            if item.place is not None and item.place is not place:
                item.place.note(job)  # which reads there
                traffic.register_memory(item.lie_in(place))
                item.place = place
        torch.autograd.graph.increment_version(submission.written)  # as the optimizer's own ops would
        for item in submission.items:
            if item.updating is None:
                item.note()
                traffic.update(item, job)
        left = [counted for counted in submission.counters if counted.tensor._version == counted.version]
        if left:
            torch._foreach_add_([counted.tensor for counted in left], 1.0)
        for counted in submission.counters:
            self._updates[id(counted.tensor)] = replace(counted, version=counted.tensor._version)
        traffic.counts.host_updates += 1
        self._pending = None

    def restore(self) -> None:
        """After an exception: a submission counts whole or not at all, and no job runs any more.

        Raises:
            StoreError: jobs do not end.
        """
        pool, submission = self._pool, self._pending
        if pool is not None and submission is not None and pool.last_ticket >= submission.ticket:
            for item in submission.items:
                item.updating, item.state = None, LOWER  # wherever it was on its way from there
            self._finish(pool, submission)
        self._pending = None
        self.settle()

    def settle(self) -> None:
        """Blocks the host until no job runs.

        Raises:
            StoreError: one does not end.
        """
        is_own = self._pid == os.getpid()  # the parent has waited before it forked a child
        if self._pool is not None and is_own and not self._pool.settle(TRANSFER_TIMEOUT_S):
            raise StoreError(
                f"expected updates in host memory to end within {TRANSFER_TIMEOUT_S:g} s, they still run; the machine may be "
                "overloaded",
                errno=errno.ETIMEDOUT,
            )

    def close(self) -> None:
        """Ends the threads, after their jobs."""
        if self._pool is not None:
            self._pool.close()
