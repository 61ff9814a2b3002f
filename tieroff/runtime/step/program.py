"""A program: one kind of step (one signature), from its recorded events to the plan that runs it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from tieroff.core.plan import Plan
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.runtime.step.feedback import Feedback


class Phase(Enum):
    """How far a program is."""

    RECORD = auto()  # the next step of this kind is traced
    MEASURE = auto()  # the next one gives durations
    PLANNED = auto()  # a plan runs
    FREE = auto()  # its steps do not repeat: no plan, and none is tried for


class Mode(Enum):
    """What the executor is doing.

    | mode     | when                                         | parameters, activations, optimizer                    |
    |----------|----------------------------------------------|-------------------------------------------------------|
    | IDLE     | outside training steps (inference, closed)   | fetched when read, dropped soon after                 |
    | DEMAND   | a step is recorded or measured, or has left  | everything leaves as soon as it can, and is fetched   |
    |          | the recorded sequence, or steps do not       | when it is wanted; but for recorded and measured      |
    |          | repeat                                       | steps as far as there is room, see on_demand.py       |
    | PLANNED  | events match the program's                   | as the plan says, tick by tick                        |
    | PASS     | the plan moves nothing                       | untouched                                             |
    """

    IDLE = auto()
    DEMAND = auto()
    PLANNED = auto()
    PASS = auto()


@dataclass(frozen=True, slots=True)
class TickActions:
    """What to do at one tick, as indices of tensors: first releases, then copies out, then copies in."""

    releases: tuple[int, ...]
    outs: tuple[int, ...]
    ins: tuple[int, ...]


@dataclass
class Program:
    """What is known of one kind of step.

    Attributes:
        signature: of the step's first input.
        keys: the events in order; an op begins with each.
        names: the same for people.
        activations: ordinal of a saved storage -> (trace index, size).
        trace, made_for: what the plan is for, with the durations that were last seen, and with those that it was made for.
        actions: per tick, derived from the plan.
        ran: trace and plan of the last step that ran as planned, and what it did; a newer plan may wait for its first.
        births: per op, bytes of activations and gradients that come to life in it.
        mismatches: steps in a row that left the sequence.
        retraces: how often it was traced again.
        feedback: what planned steps showed of the plan.
        update_at: tick at which the update begins; that of the step's end when it has none.
        stays_after_backward: tensors that the plan has on the device when the update begins, of those that it moves; and the
            gradients that it has there until then.
        used_below: gradients that user code used in the recorded step after backward, and whether it wrote them.
        leaves_gradients: the recorded step's update took all gradients as one backward made them: user code used none.
        scratch_bytes: the most memory that an op of the recorded step took for itself.
        written_by_hooks: gradients that user code wrote in backward after they had arrived. They are copied when they have to
            leave, and come back for the update: no version need show a write, and hooks of any parameter can make it.
        written: keys of parameters that forward or backward itself writes, in ways that a version may not show.
    """

    signature: Hashable
    phase: Phase = Phase.RECORD
    keys: list[Hashable] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    trace: Trace | None = None
    made_for: Trace | None = None
    plan: Plan | None = None
    ran: tuple[Trace, Plan, Timeline] | None = None
    index: dict[Hashable, int] = field(default_factory=dict)
    actions: list[TickActions] = field(default_factory=list)
    births: list[int] = field(default_factory=list)
    tiers: dict[int, Tier] = field(default_factory=dict)
    mismatches: int = 0
    retraces: int = 0
    feedback: Feedback = field(default_factory=Feedback)
    update_at: int = -1
    stays_after_backward: frozenset[int] = frozenset()
    used_below: dict[int, bool] = field(default_factory=dict)
    leaves_gradients: bool = False
    scratch_bytes: int = 0
    written_by_hooks: frozenset[int] = frozenset()
    written: frozenset[Hashable] = frozenset()

    def adopt(self, plan: Plan) -> None:
        """Makes the plan what the next step of this kind runs."""
        assert self.trace is not None
        self.plan, self.made_for = plan, self.trace
        self.feedback.plan_count += 1
        self.tiers = {r.tensor: r.tier for r in plan.residencies if r.tier is not Tier.DEVICE}
        self.actions = _actions(plan, set(self.tiers), self.written_by_hooks, update_of(self.keys))
        self._bring_back_for_update(plan)
        self.births = _births(self.trace)
        self.phase = Phase.PLANNED

    def _bring_back_for_update(self, plan: Plan) -> None:
        """Parameters and gradients may have to leave at the end of backward, since user code runs then.

        Those that the plan has on the device when the update begins come back at that tick, where they are not there.
        """
        assert self.trace is not None
        self.stays_after_backward = frozenset()
        count = len(self.keys)
        update = self.update_at = update_of(self.keys)
        if update == count:
            return
        kind = {i: tensor.kind for i, tensor in enumerate(self.trace.tensors)}
        there = [
            r for r in plan.residencies if r.tier is Tier.DEVICE and r.tensor in self.tiers and r.start < update <= r.stop
        ]
        kinds = (TensorClass.PARAMETER, TensorClass.GRADIENT)
        back = tuple(r.tensor for r in there if r.stop > update and kind[r.tensor] in kinds)
        gradients = {r.tensor for r in there if kind[r.tensor] is TensorClass.GRADIENT}
        self.stays_after_backward = frozenset({*back, *gradients})
        actions = self.actions[update]
        self.actions[update] = replace(actions, ins=(*back, *actions.ins))

    @property
    def moves_nothing(self) -> bool:
        """True when the plan leaves everything on the device."""
        return self.plan is not None and self.plan.moves_nothing


def update_of(keys: list[Hashable]) -> int:
    """Returns the tick at which the update begins; the number of ticks when there is none."""
    return next((i for i, key in enumerate(keys) if isinstance(key, tuple) and key[0] == "bucket"), len(keys))


def sums_no_gradients(trace: Trace, keys: list[Hashable]) -> bool:
    """Returns whether each gradient of a step comes new from one backward."""
    arrived = [key for key in keys if isinstance(key, tuple) and key[0] in ("grad", "accumulate")]
    is_new = all(tensor.kind is not TensorClass.GRADIENT or not tensor.is_persistent for tensor in trace.tensors)
    is_summed = len({position for _, position in arrived}) < len(arrived)
    return is_new and not is_summed


def _actions(plan: Plan, moved: set[int], written_by_hooks: frozenset[int], update: int) -> list[TickActions]:
    count = plan.op_count
    releases: list[list[int]] = [[] for _ in range(count + 1)]
    outs: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]
    ins: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]
    for residency in plan.residencies:
        if residency.tier is Tier.DEVICE and residency.tensor in moved and residency.stop < count:
            releases[residency.stop].append(residency.tensor)
    for transfer in plan.transfers:
        if transfer.tensor in written_by_hooks and (transfer.source is Tier.DEVICE or transfer.issue_at % count < update):
            continue  # copied as it leaves, and brought back by the update
        per_tick = ins if transfer.target is Tier.DEVICE else outs
        per_tick[transfer.issue_at % count].append((transfer.rank, transfer.tensor))
    return [
        TickActions(
            tuple(releases[i]), tuple(t for _, t in sorted(outs[i])), tuple(t for _, t in sorted(ins[i]))
        )
        for i in range(count)
    ]  # fmt: skip


def _births(trace: Trace) -> list[int]:
    """Returns per op the bytes of tensors that are not persistent and first exist in it."""
    births = [0] * len(trace.ops)
    first: dict[int, int] = {}
    for i, op in enumerate(trace.ops):
        for tensor in (*op.reads, *op.writes):
            first.setdefault(tensor, i)
    for tensor, value in enumerate(trace.tensors):
        if value.is_persistent:
            continue
        starts = [first[tensor]] if tensor in first else []
        starts += [value.holds[0][0]] if value.holds else []
        if starts:
            births[min(starts)] += value.size_bytes
    return births
