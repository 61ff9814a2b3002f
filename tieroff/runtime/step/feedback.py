"""Feedback: planned steps against what their plan was made for, so that it is made again when that does not hold."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

from tieroff.core.machine import Machine
from tieroff.core.trace import Trace
from tieroff.storage.completion import Timed
from tieroff.units import NS_PER_S, format_bytes, format_seconds

# By how much durations and bandwidth may differ from those that a plan was made for, and how much of a step that has to be:
# planning takes time too.
_DRIFT = 0.1
_NOISE_NS, _NOISE_SHARE = 5_000_000, 0.01
# By how much further than when it was made a plan may be from the least time that any plan takes.
_WORSE = 0.02
# Planned steps of each look at a plan while it settles: with one traced and one measured step, the last ends with step 9.
_FIRST_LOOKS = (3, 2, 2)
# Of each look after that; twice as many after each that finds the plan to hold, so that looks cost ever less, and after each
# plan that is made later, since a speed that keeps changing cannot be met.
_LATER_STEPS, _HELD_STEPS_AT_MOST, _LATER_STEPS_AT_MOST = 8, 64, 512
# Of these, the last ones are seen. Each op's duration is their median; of an even number it would be the mean of two, which one
# slow step moves.
_SEEN_STEPS = 5

# (tensor, link, copy, bytes), as `Traffic.spans` has them.
Span = tuple[int, str, Timed, int]
MachineAsSeen = Callable[[dict[str, float]], Machine | None]


class Feedback:
    """What the planned steps of one kind showed since their plan was made or last checked.

    Attributes:
        plan_count: plans made of this kind of step since it was recorded.
        settled_after: planned steps after which the plan that runs was found to hold; 0 while none was.
        rates: bytes per second of links, beside compute, that the plan that runs was made for; {} before any was seen.
        replanned_since: why the plan that runs took the place of another; "" while the first one runs.
        slack: step time predicted when the plan was made, over the lower bound of any plan; 0 if unknown.
    """

    def __init__(self, rates: dict[str, float] | None = None) -> None:
        self.plan_count = self.settled_after = 0
        self.slack, self.replanned_since = 0.0, ""
        self.rates = dict(rates or {})
        self._planned_steps = self._looks = 0
        self._later_steps = _LATER_STEPS
        self._forget()

    def _forget(self) -> None:
        self._steps = self._seen_steps = 0
        self._durations_ns: deque[list[int]] = deque(maxlen=_SEEN_STEPS)
        self._busy_ns: Counter[str] = Counter()
        self._moved_bytes: Counter[str] = Counter()

    @property
    def is_settling(self) -> bool:
        """True while the plan is new enough to be checked often."""
        return self._looks < len(_FIRST_LOOKS)

    @property
    def passes_next(self) -> bool:
        """True while planned steps are too early before the next look to be seen."""
        return self._due_steps - self._steps > _SEEN_STEPS

    def passes(self, *, is_whole: bool = True) -> bool:
        """True for a planned step that is not seen; it is counted here.

        Args:
            is_whole: each of its ops has a duration.
        """
        if is_whole and not self.passes_next:
            return False
        self._count()
        return True

    @property
    def _due_steps(self) -> int:
        return _FIRST_LOOKS[self._looks] if self.is_settling else self._later_steps

    def _count(self) -> None:
        self._planned_steps += 1
        self._steps += 1

    def take(self, durations_ns: list[int], spans: Iterable[Span]) -> bool:
        """Takes what a step that followed its plan showed; True when that is enough to check the plan."""
        self._durations_ns.append(durations_ns)
        per_link: dict[str, list[tuple[int, int]]] = {}
        for _, link, arrival, size_bytes in spans:
            per_link.setdefault(link, []).append((arrival.start_ns, arrival.stop_ns))
            self._moved_bytes[link] += size_bytes
        for link, times in per_link.items():
            self._busy_ns[link] += _covered_ns(times)
        self._seen_steps += 1
        self._count()
        return self._steps >= self._due_steps

    @property
    def typical_ns(self) -> list[int]:
        """Per op, its median duration since the last look: the shortest ones add up to a step that never was."""
        return [int(ns) for ns in np.median(np.array(self._durations_ns), axis=0)]

    def typical_for(self, trace: Trace) -> list[int]:
        """Returns `typical_ns` with collectives that take together what is typical of them together.

        A late rank is waited for in another collective each time, so medians of each of them leave most waits out.
        """
        typical_ns, collectives = self.typical_ns, list(trace.communication)
        median_ns = sum(typical_ns[op] for op in collectives)
        if median_ns:
            together_ns = float(np.median(np.array(self._durations_ns)[:, collectives].sum(axis=1)))
            for op in collectives:
                typical_ns[op] = int(typical_ns[op] * together_ns / median_ns)
        return typical_ns

    def look(self, trace: Trace, machine_as_seen: MachineAsSeen) -> str:
        """Returns why the plan no longer fits, "" when it does.

        Args:
            trace: the plan's, with the durations it was made for, not those of later predictions.
            machine_as_seen: the machine to plan for when links were seen at given rates; None: links are not compared.
        """
        reasons = [_compute_drift(trace.with_durations(self.typical_for(trace)).ideal_ns, trace.ideal_ns)]
        before, now = machine_as_seen(self.rates), machine_as_seen(self._seen())
        noise_ns = max(_NOISE_NS, int(_NOISE_SHARE * trace.ideal_ns))
        for link, moved_bytes in self._moved_bytes.items():
            if before is not None and now is not None:
                key = f"{link}_bytes_per_s"
                reasons.append(
                    _link_drift(link, getattr(before, key), getattr(now, key), moved_bytes / self._seen_steps, noise_ns)
                )
        return "; ".join(filter(None, reasons))

    def holds(self, step_ns: int, bound_ns: int) -> bool:
        """True for a plan that is as near to the least time as when it was made: another one would gain next to nothing."""
        return bool(self.slack) and step_ns <= bound_ns * self.slack * (1 + _WORSE)

    def settle(self) -> bool:
        """The plan was found to hold; True the first time."""
        is_first = not self.settled_after
        self.settled_after = self.settled_after or self._planned_steps
        if not self.is_settling:
            self._later_steps = max(self._later_steps, min(2 * self._later_steps, _HELD_STEPS_AT_MOST))
        self._looks = len(_FIRST_LOOKS)
        self._forget()
        return is_first

    def plan_again(self) -> dict[str, float]:
        """The plan is made again from what was seen; returns the rates of links to make it for."""
        self.rates = self.rates_now()
        if self.is_settling:
            self._looks += 1
        else:
            self._later_steps = min(2 * self._later_steps, _LATER_STEPS_AT_MOST)
        self.settled_after = 0
        self._forget()
        return self.rates

    def rates_now(self) -> dict[str, float]:
        """Returns `rates` with those of the links that were used since the last look."""
        return {**self.rates, **self._seen()}

    def _seen(self) -> dict[str, float]:
        """Returns bytes per second that each link moved while it was busy, beside compute."""
        return {link: self._moved_bytes[link] * NS_PER_S / busy_ns for link, busy_ns in self._busy_ns.items() if busy_ns}


def _covered_ns(times: list[tuple[int, int]]) -> int:
    """Returns how long at least one of these (start, stop) was under way."""
    covered_ns = end_ns = 0
    for start_ns, stop_ns in sorted(times):
        covered_ns += max(stop_ns - max(start_ns, end_ns), 0)
        end_ns = max(end_ns, stop_ns)
    return covered_ns


def _compute_drift(seen_ns: int, planned_ns: int) -> str:
    off_ns = abs(seen_ns - planned_ns)
    if off_ns <= max(_DRIFT * planned_ns, _NOISE_NS):
        return ""
    return f"compute takes {format_seconds(seen_ns / NS_PER_S)}, planned were {format_seconds(planned_ns / NS_PER_S)}"


def _link_drift(link: str, planned: int, seen: int, moved_bytes: float, noise_ns: int) -> str:
    if not planned or not seen or abs(seen - planned) <= _DRIFT * planned:
        return ""
    if moved_bytes * abs(1 / seen - 1 / planned) * NS_PER_S <= noise_ns:
        return ""
    return f"{link} moves {format_bytes(seen)}/s, planned were {format_bytes(planned)}/s"
