"""Figures of a rehearsal: what a step takes on the device, and what of it is the host's doing."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tieroff.core.history import StepFigures
from tieroff.units import NS_PER_S

LINKS = ("h2d", "d2h", "nvme_read", "nvme_write")
_UNTIMED_PLAIN = 2  # in the first steps kernels are priced and optimizers make their state
_SETTLED = 21


@dataclass(frozen=True, slots=True)
class StepShare:
    """One step by the device's clock; times in seconds.

    Attributes:
        step_s: from the end of one update to the end of the next.
        compute_s: kernels ran.
        waiting_s: no kernel ran, and the next one waited for a copy.
        host_bound_s: no kernel ran, and the host had not submitted the next one yet.
        host_s: the host's own time: the step's, by its clock, without what it waited for the device.
        host_cpu_s: processor time of this process, all threads together: a busy machine does not lengthen it.
        kernels: how many ran.
        values: numbers and tensors that the script read from the device.
        moved_bytes: per link, the script's own copies included.
        allocated_bytes: the most of the device that was allocated at once, by whomever.
    """

    step_s: float
    compute_s: float
    waiting_s: float
    host_bound_s: float
    host_s: float
    host_cpu_s: float
    kernels: int
    values: int
    moved_bytes: dict[str, int]
    allocated_bytes: int


def step_shares(marks: Sequence[dict[str, int]]) -> list[StepShare]:
    """Returns the steps between the marks of a performance; the first one holds the script's beginning too."""
    return [_share(a, b) for a, b in itertools.pairwise(marks)]


def _share(begin: dict[str, int], end: dict[str, int]) -> StepShare:
    grown = {key: end[key] - begin[key] for key in end}
    return StepShare(
        step_s=grown["device_ns"] / NS_PER_S,
        compute_s=grown["busy_ns"] / NS_PER_S,
        waiting_s=grown["copying_ns"] / NS_PER_S,
        host_bound_s=grown["starved_ns"] / NS_PER_S,
        host_s=(grown["now_ns"] - grown["waited_ns"]) / NS_PER_S,
        host_cpu_s=grown["cpu_ns"] / NS_PER_S,
        kernels=grown["kernels"],
        values=grown["values"],
        moved_bytes={link: grown[link] for link in LINKS},
        allocated_bytes=end["step_peak_bytes"],
    )


def settled(shares: Sequence[StepShare], history: Sequence[StepFigures] | None) -> list[StepShare]:
    """Returns the steps that stand for the run: of a wrapped one those that ran by plan, without the first of them.

    Args:
        shares: all steps.
        history: of the engine; None for a plain run.
    """
    if history is None:
        return list(shares[_UNTIMED_PLAIN:])[-_SETTLED:] or list(shares[-1:])
    planned = 0
    for step in reversed(history):
        if step.phase not in ("planned", "nothing moved"):
            break
        planned += 1
    planned = min(planned, len(shares) - 1)
    return list(shares[-planned:])[1:][-_SETTLED:] or list(shares[-1:]) if planned > 0 else []


def typical(shares: Sequence[StepShare]) -> StepShare:
    """Returns the step of median length, whole, so that its parts add up; of an even number the shorter of two."""
    return sorted(shares, key=lambda share: share.step_s)[(len(shares) - 1) // 2]


def median_host_s(shares: Sequence[StepShare]) -> tuple[float, float]:
    """Returns the medians of the host's own time per step, by its clock and by its processors' time."""
    return statistics.median(s.host_s for s in shares), statistics.median(s.host_cpu_s for s in shares)
