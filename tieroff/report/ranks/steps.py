"""The last planned step of each rank, on one axis of time, with the waits for other ranks in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tieroff.core.io.run_folder import Run
from tieroff.core.ranks.collectives import Collectives
from tieroff.core.ranks.waits import Wait, waits_of
from tieroff.errors import StateError


@dataclass(frozen=True)
class RankStep:
    """The last planned step of one rank.

    Attributes:
        run: of the rank.
        collectives: those that it called.
        start_ns, stop_ns: of the step, by the clock of its machine, from the beginning of 1970.
        waits: for other ranks, in order of time, cut to the step.
    """

    run: Run
    collectives: Collectives
    start_ns: int
    stop_ns: int
    waits: tuple[Wait, ...] = ()

    @property
    def rank(self) -> int:
        """Its number among all ranks."""
        return self.collectives.rank

    @property
    def step_ns(self) -> int:
        """What it took."""
        return self.stop_ns - self.start_ns

    @property
    def is_recorded_whole(self) -> bool:
        """False when the step's first collectives may have left torch's record."""
        calls = self.collectives.calls
        return not calls or calls[0].at_ns <= self.start_ns

    def waited_ns(self) -> dict[int, int]:
        """Returns for how long it waited for each other rank that it waited for, the longest first."""
        waited: dict[int, int] = defaultdict(int)
        for wait in self.waits:
            waited[wait.awaited] += wait.stop_ns - wait.start_ns
        return dict(sorted(waited.items(), key=lambda pair: -pair[1]))


def steps_of(runs: Mapping[int, Run]) -> list[RankStep]:
    """Returns a step of each rank; `runs` are those of `load_ranks`.

    Raises:
        StateError: a run does not say when its last planned step began, or the steps lie apart.
    """
    steps = [_step(rank, run) for rank, run in runs.items()]
    first, last = min(steps, key=lambda step: step.stop_ns), max(steps, key=lambda step: step.start_ns)
    if last.start_ns >= first.stop_ns:
        apart_ms = (last.start_ns - first.stop_ns) / 1e6
        raise StateError(
            f"expected ranks that run the same step, but the last planned step of rank {last.rank} began {apart_ms:.1f} ms "
            f"after that of rank {first.rank} had ended: the runs are of different launches or were saved in different steps"
            + ("" if first.collectives.machine == last.collectives.machine else ", or the clocks of their machines differ")
        )
    waits = waits_of([step.collectives for step in steps], {step.rank: _signs_ns(step) for step in steps})
    return [RankStep(s.run, s.collectives, s.start_ns, s.stop_ns, _cut(waits, s)) for s in steps]


def _step(rank: int, run: Run) -> RankStep:
    figures = run.last_planned
    start_ns, step_ns = run.timeline.began_ns, run.timeline.step_ns
    if not run.was_timed and figures is not None:
        start_ns, step_ns = figures.began_ns, figures.step_ns
    if run.collectives is None or not start_ns:
        raise StateError(f"rank {rank}: its run does not say when its last planned step began; run it again and save it")
    return RankStep(run, run.collectives, start_ns, start_ns + step_ns)


def _signs_ns(step: RankStep) -> list[int]:
    """Returns moments of the step at which the rank's host ran."""
    timeline = step.run.timeline
    moments = timeline.host_ns or [moment for op in timeline.ops for moment in (op.start_ns, op.stop_ns)]
    return [step.start_ns + moment for moment in moments]


def _cut(waits: list[Wait], step: RankStep) -> tuple[Wait, ...]:
    own = (wait for wait in waits if wait.rank == step.rank and wait.within_ns(step.start_ns, step.stop_ns))
    return tuple(
        Wait(wait.rank, wait.awaited, max(wait.start_ns, step.start_ns), min(wait.stop_ns, step.stop_ns), wait.call)
        for wait in own
    )
