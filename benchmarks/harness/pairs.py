"""Comparing two things on a machine whose speed drifts: slices in turn, and ratios within each turn."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

RESAMPLES = 2000
CONFIDENCE = 0.95
CONTROL_MIN, CONTROL_MAX = 0.97, 1.03

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of ratios, and the interval that the median of such ratios lies in with 95 % confidence."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def is_control_good(self) -> bool:
        """Whether a reference measured against itself is near enough to 1 for the measurement to count."""
        return CONTROL_MIN <= self.median <= CONTROL_MAX


def ratio_of(values: Sequence[float], references: Sequence[float], seed: int = 0) -> Ratio:
    """Returns the median of the pairs' ratios with its bootstrap interval (percentiles of resampled medians).

    Args:
        values, references: one of each per turn, at least one turn; references above 0.
        seed: of the resampling, so that a result can be had again from its slices.

    Raises:
        ValueError: there is no pair, or the lengths differ.
    """
    ratios = [value / reference for value, reference in zip(values, references, strict=True)]
    if not ratios:
        raise ValueError("expected at least one pair, got none")
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    tail = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Ratio(statistics.median(ratios), medians[tail], medians[-1 - tail], len(ratios))


def order_of(items: Sequence[Item], turn: int) -> list[Item]:
    """Returns the order of a turn: every second turn runs the one before backwards, and then another item is first.

    So nobody always runs first, or always after the same one, and a drift within turns cancels out.
    """
    start, is_backward = turn // 2 % len(items), turn % 2 == 1
    order = [*items[start:], *items[:start]]
    return order[::-1] if is_backward else order
