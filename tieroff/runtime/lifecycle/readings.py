"""Readings: figures of steps that have ended, taken from the device when somebody asks, or when the next step has ended too.

The host runs ahead of a device; reading how long the step took that was issued last would make it wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from tieroff.core.history import StepFigures
from tieroff.core.plan import Plan
from tieroff.core.timeline import Timeline
from tieroff.runtime.backend.stamp import Time, clock_ns
from tieroff.runtime.lifecycle.figures import figures_of
from tieroff.runtime.lifecycle.measured import timeline_of
from tieroff.runtime.lifecycle.planning import Observed, StepPlanning
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.step.kinds import Planned, Ran, StepKind
from tieroff.runtime.step.mode import PLANNED
from tieroff.runtime.step.stats import Stats

# Steps whose figures are kept.
_HISTORY_STEPS = 4096

Watcher = Callable[[Stats, Plan | None], None]


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step that has ended, and what gives its figures.

    Attributes:
        stage: the plan that it followed, or None.
        begun: its begin.
    """

    kind: StepKind
    stage: Planned | None
    number: int
    begun: Time
    figures: Callable[[], Stats]
    timeline: Callable[[], Timeline] | None


class Readings:
    """The figures of one step after another.

    Attributes:
        watchers: called with the figures of every step and the plan of its kind.
    """

    def __init__(self, managed: ManagedModel, planning: StepPlanning) -> None:
        self._managed, self._planning = managed, planning
        self.watchers: list[Watcher] = []
        self._history: deque[StepFigures] = deque(maxlen=_HISTORY_STEPS)
        self._last: Stats | None = None
        self._unread: _Unread | None = None
        self._observed: Observed | None = None

    @property
    def last(self) -> Stats | None:
        """Of the last step; waits for it."""
        self._read()
        return self._last

    @property
    def history(self) -> deque[StepFigures]:
        """Of the last steps, oldest first; waits for the last one."""
        self._read()
        return self._history

    def note(self, kind: StepKind, number: int, recompute_ns: int) -> None:
        """A step ends."""
        self._read()
        executor = self._managed.executor
        executor.clock.pause()
        stage, timeline = None, None
        if isinstance(kind.stage, Planned) and executor.state.mode is PLANNED and executor.traffic.keep_spans:
            stage, timeline = kind.stage, timeline_of(kind.stage, self._managed, recompute_ns)
        figures = figures_of(kind, self._managed, recompute_ns)
        self._unread = _Unread(kind, stage, number, executor.clock.times.begun, figures, timeline)
        if self.watchers or not self._runs_ahead:
            self._read()

    def observe(self, kind: StepKind, stage: Planned) -> None:
        """A step that was planned has run to the end of its last op."""
        executor = self._managed.executor
        if not executor.runner.is_at_end:
            return
        unread, last = self._unread, self._last

        def step_s() -> float:
            stats = unread.figures() if unread is not None else last
            return stats.step_s if stats is not None else 0.0

        observed: Observed | None = Observed(kind, stage, executor.clock.times, executor.traffic.spans, step_s)
        if self._runs_ahead:
            observed, self._observed = self._observed, observed
        if observed is not None:
            self._planning.compare(observed)

    @property
    def _runs_ahead(self) -> bool:
        return self._managed.backend.device.type != "cpu"

    def _read(self) -> None:
        unread, self._unread = self._unread, None
        if unread is None:
            return
        self._last = stats = unread.figures()
        kind = unread.kind
        if unread.timeline is not None and unread.stage is not None:
            kind.ran = Ran(unread.stage.trace, unread.stage.plan, unread.timeline)
        for seen in self.watchers:
            seen(stats, kind.planned.plan if kind.planned is not None else None)
        self._history.append(replace(stats.figures(unread.number), began_ns=clock_ns(unread.begun)))
