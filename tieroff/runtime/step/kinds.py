"""Kinds of steps: a kind is what has one signature, and its stage says how far it is on the way to a plan.

Steps that differ from a kind in smaller inputs only are taken for it once it was recorded (`step/likeness.py`).

| stage     | what its next step is for                        | next stages                                           |
|-----------|--------------------------------------------------|-------------------------------------------------------|
| Recording | every event and tensor is traced                 | Recording, Measuring, Unplanned (never repeats, or    |
|           |                                                  | foreseen before its first step)                       |
| Measuring | the same events again give durations             | Planned; Recording (it differed, or layers now rerun);|
|           |                                                  | Unplanned (as below)                                  |
| Planned   | it runs as planned                               | Planned (a new plan); Recording (it kept leaving it); |
|           |                                                  | Unplanned (its part of the budget shrank, and none    |
|           |                                                  | fits in it)                                           |
| Unplanned | it runs on demand: no plan, and none is made     | Recording (the kind came back; if kinds of the same   |
|           |                                                  | structure say what it needs, a few times)             |
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from tieroff.core.plan import Plan
from tieroff.core.seams import Pending
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.runtime.step.executable import Executable, make_executable
from tieroff.runtime.step.feedback import Feedback
from tieroff.runtime.step.likeness import Turns, is_like_but_for_passes, likeness_of, same_events, saved_bytes
from tieroff.runtime.step.recorded import Recorded

log = logging.getLogger("tieroff")

# Steps that are traced in vain at most, in a row, since one came that saves more.
_SMALLER_AT_MOST = 8


@dataclass(frozen=True, slots=True)
class Recording:
    """The next step is traced."""


@dataclass(frozen=True, slots=True)
class Measuring:
    """The next step gives the durations of what was recorded."""

    recorded: Recorded


@dataclass(frozen=True, slots=True)
class Planned:
    """Steps run as planned.

    Attributes:
        trace: with the durations that were last seen.
        made_for: the trace with the durations that the plan was made for.
    """

    recorded: Recorded
    trace: Trace
    made_for: Trace
    plan: Plan
    executable: Executable

    def predicted(self, trace: Trace, step_ns: int) -> Planned:
        """Returns the same decisions, with durations as seen by now and the step time that is predicted from them."""
        return replace(self, trace=trace, plan=replace(self.plan, step_ns=step_ns))


@dataclass(frozen=True, slots=True)
class Unplanned:
    """Steps do not repeat, are too rare, or are foreseen by others' traces: all of them run on demand."""


Stage = Recording | Measuring | Planned | Unplanned

_NEXT: dict[type[Stage], tuple[type[Stage], ...]] = {
    Recording: (Recording, Measuring, Unplanned),
    Measuring: (Planned, Recording, Unplanned),
    Planned: (Planned, Recording, Unplanned),
    Unplanned: (Recording,),
}


@dataclass(frozen=True)
class Ran:
    """What the last step that followed a plan did; a newer plan may wait for its first step.

    Attributes:
        make_timeline: returns what it did when; thousands of objects, so it is called when somebody asks.
    """

    trace: Trace
    plan: Plan
    make_timeline: Callable[[], Timeline]

    @functools.cached_property
    def timeline(self) -> Timeline:
        """What the step did when."""
        return self.make_timeline()


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of the planner.

    Attributes:
        take: takes the answer, for which it waits, and does what follows from it.
    """

    pending: Pending[object]
    take: Callable[[], None]


@dataclass(slots=True)
class Apart:
    """What the program has on the device apart from a kind of step; see [Note: memory apart] in lifecycle/unmanaged.py.

    Attributes:
        traced_bytes: as it was traced; None where nobody says.
        times: it was traced again for what had come since.
        is_grown: so was the last step that was looked at.
        before_bytes: the most that were asked of the allocator at once, before the step that runs; None where nobody says.
        most_bytes: in that step, once it is updated; None, too, where it had not more than those before it.
    """

    traced_bytes: int | None = None
    times: int = 0
    is_grown: bool = False
    before_bytes: int | None = None
    most_bytes: int | None = None


class StepKind:
    """One kind of step.

    Attributes:
        apart: see there.
        asked: what is under way about this kind; void once it is in another stage.
        is_passed_through: gradients flow through it to another model, which may be all that is updated after it.
        stage: see the table of the module; `advance` changes it.
        recorded: what its last recorded step showed, or None.
        planned: the last plan of this kind, or None; kept while the kind is traced again.
        ran: see there; None before the first planned step.
        retraces: how often it was traced.
        foreseen: steps that it still runs on demand, by what traces of other kinds say, before it is traced itself.
        left: where one left its plan last, what was expected there and what came.
        mismatches: steps in a row that left their plan.
        overs: steps in a row that followed their plan and took more than its budget.
        was_over: it was traced again for that, though the plan knew all tensors; it is not again.
        passes_vary: passes without gradients come in some of its steps only: they make no events.
        turn: the likeness of its steps, if it is of those that come by turns; else None.
        turns: of all steps that begin as its steps do; see [Note: turns] in step/likeness.py.
        most_bytes: what was saved in the largest of the steps that were not measured, for it was more than in the traced one.
        smaller: steps in a row that were traced since, and saved less.
        differed: the op from which on two of its steps in a row differed last, "" while none did.
        strangers: steps with smaller inputs that were taken for steps of this kind, and were not like them.
        feedback: what planned steps showed of the plan.
    """

    __slots__ = (
        "apart",
        "asked",
        "differed",
        "feedback",
        "foreseen",
        "is_passed_through",
        "left",
        "mismatches",
        "most_bytes",
        "overs",
        "passes_vary",
        "planned",
        "ran",
        "recorded",
        "retraces",
        "smaller",
        "stage",
        "strangers",
        "turn",
        "turns",
        "was_over",
    )

    def __init__(self, *, is_passed_through: bool = False) -> None:
        self.is_passed_through, self.passes_vary, self.was_over = is_passed_through, False, False
        self.stage: Stage = Recording()
        self.recorded: Recorded | None = None
        self.planned: Planned | None = None
        self.ran: Ran | None = None
        self.retraces = self.mismatches = self.foreseen = self.strangers = self.overs = 0
        self.most_bytes = self.smaller = 0
        self.left: tuple[int, str, str] | None = None
        self.feedback, self.apart = Feedback(), Apart()
        self.turn: int | None = None
        self.turns = Turns()
        self.asked: Asked | None = None
        self.differed = ""

    def came(self, likeness: int) -> bool:
        """A step with such events ran on demand; returns False for one that is traced out of turn: another was foreseen."""
        is_in_turn = True
        if self.turn is not None and isinstance(self.stage, Recording):
            is_in_turn = self.turns.name(self.turn, likeness)
            self.turn = likeness if is_in_turn else self.turn
        self.turns.note(likeness)
        return is_in_turn

    def trace_again(self, keys: Sequence[Hashable], recorded: Recorded) -> None:
        """The step to be measured had other events than the traced one, which waits where its like may be about to come."""
        if self.turns.awaits(recorded.likeness):
            return
        self.differed = recorded.trace.ops[same_events(keys, recorded.keys)].name
        log.info("two steps in a row differed from op %s on: the step is traced again", self.differed)
        self.passes_vary = self.passes_vary or is_like_but_for_passes(keys, recorded.keys)
        if likeness_of(keys) == recorded.likeness:
            self.most_bytes = max(self.most_bytes, saved_bytes(keys))
        self.advance(Recording())

    def awaits_larger(self, keys: Sequence[Hashable]) -> bool:
        """A step was traced; returns whether the next one is to be, too, for this one is smaller than others of its kind.

        Where sizes depend on values (masked positions that are gathered, packed sequences), what was planned for a small step
        suits few others. Where sizes take turns, small ones might come each time that one is traced.
        """
        is_small = saved_bytes(keys) < self.most_bytes and self.smaller < _SMALLER_AT_MOST
        self.smaller = self.smaller + 1 if is_small else 0
        if is_small:
            log.info("a step before it has saved more: the next one is traced")
        return is_small

    def give_up(self) -> None:
        """Steps of this kind were traced often and never came again; it is said, unless they only seemed to take turns."""
        level = logging.WARNING if self.turn is None else logging.INFO
        where = f" (two in a row differed from op {self.differed} on, as where layers are skipped at random)"
        log.log(
            level,
            "steps of this model do not repeat%s: they run with transfers on demand (right, but slower)",
            where if self.differed else "",
        )
        self.advance(Unplanned())

    def advance(self, stage: Stage) -> None:
        """Enters a stage.

        Raises:
            StateError: the stage cannot follow the one that the kind is in.
        """
        if type(stage) not in _NEXT[type(self.stage)]:
            before, after = type(self.stage).__name__, type(stage).__name__
            raise StateError(f"a kind of step cannot go from {before} to {after}; this is a bug in tieroff")
        self.stage, self.asked = stage, None
        if isinstance(stage, Measuring):
            self.recorded = stage.recorded
        elif isinstance(stage, Planned):
            self.planned = stage

    def adopt(self, recorded: Recorded, trace: Trace, plan: Plan) -> None:
        """Adopts a plan, made for this trace of what was recorded, for the next step of this kind."""
        self.feedback.plan_count += 1
        self.advance(Planned(recorded, trace, trace, plan, make_executable(plan, trace, recorded)))

    @property
    def trace(self) -> Trace | None:
        """The last trace, with the newest durations."""
        if isinstance(self.stage, Planned):
            return self.stage.trace
        return self.recorded.trace if self.recorded is not None else None

    @property
    def moves_nothing(self) -> bool:
        """True when its plan leaves everything on the device."""
        return isinstance(self.stage, Planned) and self.stage.plan.moves_nothing
