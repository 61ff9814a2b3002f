"""What the runtime asks of the layers beside it, which it may not import: recording, prediction and planning.

`tracing` implements Recorder, `planner` implements Foresight and `session` implements PlanSource.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from tieroff.core.machine import Machine
from tieroff.core.plan import Plan
from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Trace

_Answer = TypeVar("_Answer", covariant=True)


@dataclass(frozen=True, slots=True)
class Subject:
    """One tensor that the trace will list.

    Attributes:
        key: the runtime's key for it, under which storages are bound.
        owner: key of the tensor that decides its tier, or None.
        label: what it is, for people, where its name does not say it.
    """

    key: Hashable
    name: str
    size_bytes: int
    kind: TensorClass
    is_persistent: bool = False
    is_movable: bool = True
    owner: Hashable = None
    label: str = ""


class Recorder(Protocol):
    """Watches one step.

    Attributes:
        meta: goes into the trace's own.
        is_on: it watches.
        is_cut: watching ended before the step did, so there is no trace.
    """

    meta: dict[str, str]
    is_on: bool
    is_cut: bool

    @property
    def written_below(self) -> frozenset[Hashable]:
        """Keys of subjects that user code wrote in a lower tier during forward or backward, bypassing the engine."""

    @property
    def written_in_backward(self) -> frozenset[Hashable]:
        """Those of `written_below` that were written before the last backward ended, for example by hooks."""

    def backward_ended(self) -> None:
        """A backward is over: user code runs next."""

    def watch_gradients(self, gradients: Callable[[], Iterable[Any]]) -> None:
        """`gradients` returns those that there are when a backward is over."""

    @property
    def used_gradients(self) -> bool:
        """True when user code used a gradient after a backward, wherever it lay."""

    @property
    def foreign_bytes(self) -> int:
        """Bytes of the parameters that the step read and nobody said anything of: a model that is not wrapped has them."""

    @property
    def scratch_bytes(self) -> int:
        """The most memory that one op took apart from all tensors that were seen."""

    def used_below(self, op: int) -> dict[Hashable, bool]:
        """Returns the keys of subjects that an op used in a lower tier, bypassing the engine, and whether it wrote them."""

    def written(self, keys: set[Hashable]) -> set[Hashable]:
        """Returns those of `keys` whose bytes on the device some op wrote after they had been bound."""

    def start(self) -> None:
        """Begins to watch every op of this thread."""

    def event(self, name: str, phase: str) -> None:
        """A tick: op number n + 1 begins."""

    def bind(self, storage: object, key: Hashable, is_below: bool = False, is_new: bool = False, is_set: bool = False) -> None:
        """This storage holds the bytes of the subject `key`.

        Args:
            is_below: in a lower tier, so it counts nowhere.
            is_new: the engine has just made it; otherwise the program did, when it was first seen.
            is_set: user code gave it to the subject (`p.data = t`): until now it was nobody's, and took room.
        """

    def disown(self, storage: object) -> None:
        """Another engine holds this storage, which counts there and not here, unless it is bound here too."""

    def resizes(self, storage: object) -> None:
        """The program frees and allocates the memory of this storage, as often as it likes, without its death."""

    def made(self, storages: Iterable[object]) -> None:
        """User code has these storages by now, which no op was seen to make: inputs of the next step."""

    def given(self, storages: Iterable[object]) -> None:
        """The engine has just made these for user code, in the running op."""

    def returned(self, storages: Iterable[object], behind: Iterable[object] = ()) -> None:
        """The forward returns these: a name of the program's is given to them now, and held their likes until then.

        Args:
            behind: of leaves of the graph that made them, which the last loss holds until the next one is there.
        """

    def stands(self, storages: Iterable[object]) -> None:
        """These are on the device in all of every step, whether or not an op was seen to use or make them."""

    def read(self, key: Hashable) -> None:
        """The running op reads the subject's bytes on the device, in code that is not watched."""

    def wrote(self, key: Hashable) -> None:
        """The same of code that may have written them."""

    def follow(self, used: Callable[[Any, bool], None]) -> None:
        """Calls `used` with each tensor that an op is about to use whose storage holds a subject, and whether it writes it."""

    def begin_unseen(self, given: Iterable[object] = (), *, makes_first: bool = False) -> None:
        """Code begins whose tensors are not seen one by one; the memory that it takes must be measured.

        Args:
            given: storages that the code gets. What is first seen while it runs is its own, and born here.
            makes_first: events inside tell of what it has made already, as where autograd saves what a compiled graph returned.
        """

    def end_unseen(self, made: Iterable[object] = ()) -> None:
        """That code has ended, and these storages are there now."""

    def begin_user_call(self, kept: Mapping[Hashable, int]) -> None:
        """User code gets tensors that came up from below for this call alone, which count nowhere.

        Args:
            kept: keys of all that it uses or that the program holds by now -> bytes on the device.
        """

    def end_user_call(self) -> None:
        """That call is over."""

    @property
    def beside(self) -> Mapping[int, int]:
        """Op with such calls -> the most bytes beside them, of no subject or of one that the op made; after `finish`."""

    def died(self, key: Hashable) -> None:
        """Nothing can use the subject's bytes any more."""

    def stop(self) -> None:
        """Ends watching; safe to call twice and after an exception."""

    def finish(self, subjects: list[Subject], durations_ns: list[int], name: str) -> Trace:
        """Returns the trace of the watched step."""


class Foresight(Protocol):
    """Predicts which tensors a step without a plan uses next. A wrong prediction costs time, never a wrong number."""

    def begin(self) -> None:
        """A step begins."""

    def used(self, key: Hashable) -> None:
        """Forward uses a parameter."""

    def saved(self, key: Hashable) -> None:
        """Autograd saved a tensor for backward, which may be saved several times."""

    def wanted(self, key: Hashable) -> None:
        """Backward uses a saved tensor."""

    def ahead(self) -> Iterator[Hashable]:
        """Yields the keys predicted to be used next, nearest first, each once."""


class Fit(Enum):
    """How a plan suits the device budget, whose part for this model may have changed since the plan was made."""

    SUITS = auto()
    ROOMIER = auto()  # there is more room now, worth another plan
    ABOVE = auto()  # it needs more than there is now: no step may follow it


@dataclass(frozen=True, slots=True)
class Made:
    """A plan that was made.

    Attributes:
        index: of the trace that it is for, of those that were given.
        forecast: the step time under the plan, and a lower bound under any plan, in ns; None for a plan of the user's.
    """

    index: int
    plan: Plan
    forecast: tuple[int, int] | None


class Pending(Protocol[_Answer]):
    """An answer that may still be under way."""

    @property
    def is_due(self) -> bool:
        """True when it is to be taken: it is there, or the step that begins waits for it."""

    def take(self) -> _Answer:
        """Returns the answer, for which it waits.

        Raises:
            TieroffError: there is none; the methods of `PlanSource` say which.
        """


class PlanSource(Protocol):
    """Makes the plans of one wrapped model, for the machine and the budgets of this process.

    Rates are the bytes per second that each link was seen to move beside compute; {} while nothing is known.
    """

    def recorder(self) -> Recorder:
        """Returns the recorder of the next step, from which a plan is to be made."""

    def plan(self, traces: Sequence[Trace], rates: dict[str, float], *, updates_on_host: bool = False) -> Pending[Made]:
        """Asks for a plan of the first of these traces of a step that fits, for links of these rates.

        Args:
            updates_on_host: the CPU may run ops of the optimizer: it was proven to make the same updates.

        Its `take` raises:
            InfeasiblePlanError: some op does not fit in the device budget with everything else moved out.
            TraceMismatchError: the user gave a plan, and it is of another step.
        """

    def can_move(self, trace: Trace) -> bool:
        """Returns False for a step of which no plan moves anything: its tensors are all small, or there is no tier below."""

    def lacks_for_updates(self, trace: Trace) -> str | None:
        """Returns what keeps plans of this step from having the CPU update, "" for nothing; None where it would not pay."""

    def bring_back(self, trace: Trace, op: int, used: Mapping[int, bool]) -> Trace:
        """Returns the trace with tensors on the device that user code used in an op while they were below.

        Args:
            op: index of the op.
            used: index of a tensor -> whether user code wrote it there.
        """

    def fit(self, plan: Plan | None) -> Fit:
        """Returns how a plan suits the device budget now, when a step that follows it is about to begin.

        Args:
            plan: of the step; None: it runs without.
        """

    def forecast(self, plan: Plan, trace: Trace, rates: dict[str, float]) -> Pending[tuple[int, int] | None]:
        """Asks for the step time under a plan, and a lower bound under any plan, in ns; None for a plan of the user's."""

    def leaves_room(self, size_bytes: int) -> bool:
        """Returns whether a model of which no step is known may have all of itself, which is so large, on the device."""

    def spare_bytes(self, trace: Trace) -> int:
        """Returns the bytes of the device budget that no op of this step, or of those asked about before, needs; >= 0."""

    def machine_at(self, rates: dict[str, float]) -> Machine | None:
        """Returns the machine that a plan for these rates is made for; None where the user gave the plan."""

    def machine_of(self, trace: Trace) -> Machine | None:
        """Returns the machine that this trace was last planned for; None if there is none."""

    def close(self) -> None:
        """No plan is wanted any more."""
