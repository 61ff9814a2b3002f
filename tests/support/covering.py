"""Covering arrays: every pair of values of any two factors at least once, in far fewer cases than the full product."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Hashable, Sequence
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


def in_turn(subjects: Sequence[Any], choices: Sequence[Any], half: int | None = None) -> list[Any]:
    """Returns the full product as parameters; all but one choice for each subject, in turn, are marked `long`.

    With a `half` (0 or 1) all choices of every second subject are; the other half of the subjects is another test's.
    """
    return [
        pytest.param(
            subject,
            choice,
            id=f"{getattr(subject, 'name', subject)}-{getattr(choice, 'name', choice)}",
            marks=_marks(_turn(index, half) % len(choices) == place, half in (None, index % 2)),
        )
        for index, subject in enumerate(subjects)
        for place, choice in enumerate(choices)
    ]


def _turn(index: int, half: int | None) -> int:
    return index if half is None else index // 2


def _marks(is_chosen: bool, is_own_half: bool) -> list[pytest.MarkDecorator]:
    if not is_chosen:
        return [pytest.mark.long]
    return [] if is_own_half else [*ANOTHER_TURN]


ANOTHER_TURN = (pytest.mark.long, pytest.mark.turn)
"""Of what is long only because another setting, or another test, tries the behaviour by default; a GPU tries it too."""


def every_second(subjects: Sequence[str], half: int) -> list[Any]:
    """Returns subjects as parameters; those of the other half (0 or 1), which another test tries, are marked `long`."""
    return [pytest.param(subject, marks=[] if index % 2 == half else [*ANOTHER_TURN]) for index, subject in enumerate(subjects)]


SETTINGS = frozenset(
    ["backend", "each", "each_setting", "planned_setting", "setting", "tiers", "budget", "device", "share", "checkpoints"]
)
"""Parameters that say where a behaviour is tried, and not which one: backends, tiers, budgets, checkpointing."""
IN_TURN = frozenset(["accelerator", "corpus", "fault", "parity"])
"""Folders whose tests take turns: those that train."""
TURNS = 3


def take_turns(items: Sequence[pytest.Item]) -> None:
    """Marks two of three settings of each behaviour `long`: by default each is tried in some of them, by `--all` in all.

    Which ones depends on the behaviour's name, so that all settings take part alike.
    """
    behaviours: dict[tuple[Hashable, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        if IN_TURN & set(item.path.parts) and SETTINGS & params.keys() and not item.get_closest_marker("long"):
            own = ((name, _known_by(value)) for name, value in params.items() if name not in SETTINGS)
            behaviours[item.path, getattr(item, "originalname", item.name), *own].append(item)
    for cases in behaviours.values():
        turns = min(TURNS, len(cases))
        turn = zlib.crc32(cases[0].nodeid.encode())
        for index, item in enumerate(cases):
            if (index + turn) % turns:
                for mark in ANOTHER_TURN:
                    item.add_marker(mark)


def _known_by(value: object) -> Hashable:
    return value if isinstance(value, (str, int, float, type(None))) else id(value)


def examples(count: int) -> int:
    """Returns on how many of `count` examples a property is tried: on all where the long tests run too, else on two fifths.

    tests/conftest.py sets the profile by what was selected.
    """
    return count * settings.default.max_examples // 100 if settings.default is not None else count
