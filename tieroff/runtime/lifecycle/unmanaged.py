"""What lies on the device and is nobody's to move: it counts in every step, and people are told why it stays.

[Note: memory apart]
An average of weights that begins late, copies of weights for a penalty, a buffer that fills: no event of a step is new where
they are made, so a plan that does not know them is followed, and the device has more than the budget. Only the allocator tells.
So as a step ends, what it has lent, less what engines have, is compared with what that was as the step was traced. Where a part
of the budget has come since, in two steps one after the other, steps of that kind are traced again: what they use is in the new
trace, and a budget in bytes pays for the rest. Where memory grows all the time, steps are traced again twice at most.

[Note: more in a step]
An update may compute more than the one that was traced, without any new event: RAdam begins to rectify in its sixth, Lookahead
looks back in each fifth. So the allocator's peak is read as a planned step begins, and once it is updated. If it rose, it is of
that step. Where it is above the budget by the same part of it, that is said once, and steps of the kind are traced again, as
above. The peak is never reset for this, since it is the program's to read. What the program keeps since the traced update
(copies for an evaluation, a library's workspace) counts for a budget in bytes, and not for a share. With several models on the
device nothing is said: the peak may be another model's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tieroff.core.buckets import bytes_apart
from tieroff.core.tensor import UNIT_BYTES, Tier
from tieroff.parts import parts_of
from tieroff.runtime.items.offloaded import untouched
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.movable import tensors_in
from tieroff.runtime.step.kinds import Planned, StepKind
from tieroff.runtime.step.mode import PASS
from tieroff.units import format_bytes

log = logging.getLogger("tieroff")

# This part of the budget (1/32) may come after a step was traced; a step is traced again so often for more.
_SHARE, _TIMES_AT_MOST = 32, 2
# Norms that are kept of gradients, new counters: for a model of some KiB that alone is such a part, and no larger step.
_FEW_BYTES = 8 * UNIT_BYTES

_managed: weakref.WeakSet[ManagedModel] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Unmanaged:
    """A plain tensor on the device that the engine does not move.

    Attributes:
        name: for people.
        why: it stays.
        tensor: of a wrapper subclass, one of its parts.
    """

    name: str
    why: str
    tensor: torch.Tensor


def unmanaged(managed: ManagedModel) -> Iterator[Unmanaged]:
    """Yields the parameters, buffers and optimizer state that stay on the device whatever a plan says; none twice."""
    device_type, seen = managed.backend.device.type, set[int]()
    for name, why, tensor in _standing(managed):
        with untouched():
            parts = [*parts_of(tensor)]
        for path, part in parts:
            if part.device.type != device_type or part.layout is not torch.strided:
                continue
            storage = part.untyped_storage()
            if storage._cdata not in seen and storage.nbytes():
                seen.add(storage._cdata)
                yield Unmanaged(f"{path} of {name}" if path else name, why, part)


def _standing(managed: ManagedModel) -> Iterator[tuple[str, str, torch.Tensor]]:
    parameters = dict(managed.model.named_parameters())
    for name, why in managed.unmoved.items():
        if name in parameters:
            yield name, why, parameters[name]
    for name, buffer in managed.model.named_buffers():
        yield name, "a buffer", buffer
    if managed.stepper is not None:
        yield from managed.stepper.state.unmanaged()
    for optimizer in managed.unattached.optimizers():
        why, names = f"state of {type(optimizer).__name__}, which is not attached", managed.executor.homes.names
        for parameter, values in optimizer.state.items():
            if isinstance(values, dict):
                owner = names.get(id(parameter), "a parameter outside the model")
                yield from ((f"{key} of {owner}", why, part) for key, value in values.items() for part in tensors_in(value))


class StateGrowth:
    """Optimizer state that grows while nothing moves, such as a history, which no plan knows.

    Looks at its size after 1, 2, 4, … steps in which nothing moves, since nothing else does. A look takes a while where there
    are thousands of tensors, and what grows is found at the next one.
    """

    def __init__(self, managed: ManagedModel) -> None:
        self._managed = managed
        self._plan: object = None
        self._steps = self._first_bytes = self._grown_bytes = 0
        self._has_told = False

    def of(self, kind: StepKind) -> int:
        """Returns by how many bytes the state has grown while the plan of a kind was followed, as far as was seen."""
        return self._grown_bytes if isinstance(kind.stage, Planned) and kind.stage.plan is self._plan else 0

    def look(self, kind: StepKind) -> None:
        """A step was updated; of one in which nothing moves, and that takes more than its budget, it is said once."""
        stage, stepper = kind.stage, self._managed.stepper
        if not isinstance(stage, Planned) or stepper is None or self._managed.executor.state.mode is not PASS:
            return
        self._steps += 1
        if self._steps & (self._steps - 1):
            return
        state_bytes = self._state_bytes()
        if stage.plan is not self._plan:
            self._plan, self._first_bytes = stage.plan, state_bytes
        self._grown_bytes = state_bytes - self._first_bytes
        budget_bytes, peak_bytes = (of.get(Tier.DEVICE, 0) for of in (stage.plan.budget_bytes, stage.plan.peak_bytes))
        if peak_bytes + self._grown_bytes > budget_bytes and self._grown_bytes > 0 and not self._has_told:
            self._has_told = True
            log.warning(
                "the state of %s has grown by %s since its step was traced: with it, steps in which nothing moves take about "
                "%s of the device, above their budget of %s; a shorter history would hold it",
                type(stepper.optimizer).__name__,
                format_bytes(self._grown_bytes),
                format_bytes(peak_bytes + self._grown_bytes),
                format_bytes(budget_bytes),
            )

    def _state_bytes(self) -> int:
        stepper, device_type = self._managed.stepper, self._managed.backend.device.type
        assert stepper is not None
        sizes: dict[int, int] = {}
        with untouched():  # an evaluation may have offloaded some: to look at them is no use
            for values in stepper.optimizer.state.values():
                for tensor in tensors_in(list(values.values())) if isinstance(values, dict) else ():
                    if tensor.device.type == device_type and tensor.layout is torch.strided:
                        storage = tensor.untyped_storage()
                        sizes[storage._cdata] = max(storage.nbytes(), tensor.numel() * tensor.element_size())
        return sum(sizes.values())


class MemoryApart:
    """Tells when the program has taken so much memory apart from one model's steps; see [Note: memory apart]."""

    def __init__(self, managed: ManagedModel) -> None:
        self._managed = managed
        self._has_told = self._has_told_more = False
        _managed.add(managed)

    def begins(self, kind: StepKind) -> None:
        """A step of this kind is about to begin."""
        is_planned = isinstance(kind.stage, Planned) and not kind.stage.plan.moves_nothing
        kind.apart.before_bytes = self._managed.backend.requested_most() if is_planned else None

    def updated(self, kind: StepKind) -> None:
        """A step of this kind was updated; the program may have the allocator count anew from here on."""
        before_bytes = kind.apart.before_bytes
        most_bytes = self._managed.backend.requested_most() if before_bytes is not None else None
        kind.apart.most_bytes = most_bytes if most_bytes != before_bytes else None

    def had_more(self, kind: StepKind, stage: Planned) -> bool:
        """Returns whether the kind is to be traced again, as a step of it has followed its plan: [Note: more in a step]."""
        known, budget_bytes = kind.apart, stage.plan.budget_bytes.get(Tier.DEVICE, 0)
        if known.most_bytes is None or known.times >= _TIMES_AT_MOST or len(self._here()) > 1:
            return False
        now = self._now()
        if known.traced_bytes is None or now is None:
            return False
        grown_bytes, part_bytes = max(now - known.traced_bytes, 0), budget_bytes // _SHARE
        if grown_bytes > part_bytes:
            return False  # `has_grown` tells of that, after one more step
        beside_bytes = bytes_apart(stage.recorded.trace.meta) + grown_bytes
        asked = self._managed.settings.device_budget
        if asked is None or asked.size_bytes is None:  # a share, or the least: of the step alone
            beside_bytes = max(beside_bytes, now)
        over_bytes = known.most_bytes - beside_bytes - budget_bytes
        if over_bytes <= max(part_bytes, _FEW_BYTES):
            return False
        known.times += 1
        if not self._has_told_more:
            self._has_told_more = True
            log.warning(
                "a planned step had %s of the device at once, %s above its budget of %s, which is more than the step that was "
                "traced (some updates compute more from some step on, some libraries keep a workspace): steps of this kind are "
                "traced and planned again",
                format_bytes(over_bytes + budget_bytes),
                format_bytes(over_bytes),
                format_bytes(budget_bytes),
            )
        return True

    def traced(self, kind: StepKind) -> None:
        """A step of this kind was traced, and is over."""
        kind.apart.traced_bytes, kind.apart.is_grown = self._now(), False

    def has_grown(self, kind: StepKind, stage: Planned) -> bool:
        """Returns whether the kind is to be traced again, now that a step of it which followed its plan is over."""
        known = kind.apart
        if known.traced_bytes is None or known.times >= _TIMES_AT_MOST or (now := self._now()) is None:
            return False
        was_grown, grown_bytes = known.is_grown, now - known.traced_bytes
        budget_bytes = stage.plan.budget_bytes.get(Tier.DEVICE, 0)
        known.is_grown = grown_bytes > budget_bytes // _SHARE
        if not (was_grown and known.is_grown):
            return False
        known.times += 1
        if not self._has_told:
            self._has_told = True
            log.warning(
                "the program has %s more of the device than when its step was traced (copies of weights, data), which its plan "
                "for %s does not know: steps of this kind are traced and planned again",
                format_bytes(grown_bytes),
                format_bytes(budget_bytes),
            )
        return True

    def _now(self) -> int | None:
        """Returns what is lent of the device to others than engines."""
        backend = self._managed.backend
        lent_bytes = backend.allocated_bytes()
        if lent_bytes is None:
            return None
        return lent_bytes - sum(one.executor.device_bytes for one in self._here())

    def _here(self) -> list[ManagedModel]:
        """Returns all that move on this device."""
        return [one for one in _managed if not one.is_closed and one.backend.device == self._managed.backend.device]
