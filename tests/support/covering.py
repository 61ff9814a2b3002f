"""Covering arrays: every pair of values of any two factors at least once, in far fewer cases than the full product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings


def pairs_of(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    """Returns the pairs of a case, each as (factor, value, other factor, other value)."""
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns cases, as lists of arguments for `pytest.mark.parametrize`, with every pair of values of two factors.

    Greedy and deterministic: of the full product always the first case with the most pairs that no case has yet.
    """
    cases = list(product(*(range(len(values)) for values in factors)))
    missing = {pair for case in cases for pair in pairs_of(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        chosen.append(best)
    return [tuple(values[index] for values, index in zip(factors, case, strict=True)) for case in sorted(chosen)]


def in_turn(subjects: Sequence[Any], choices: Sequence[Any]) -> list[Any]:
    """Returns the full product as parameters; all but one choice for each subject, in turn, are marked `long`."""
    return [
        pytest.param(
            subject,
            choice,
            id=f"{getattr(subject, 'name', subject)}-{getattr(choice, 'name', choice)}",
            marks=[] if index % len(choices) == place else [pytest.mark.long],
        )
        for index, subject in enumerate(subjects)
        for place, choice in enumerate(choices)
    ]


def examples(count: int) -> int:
    """Returns on how many of `count` examples a property is tried: on all where the long tests run too, else on two fifths.

    tests/conftest.py sets the profile by what was selected.
    """
    return count * settings.default.max_examples // 100 if settings.default is not None else count
