"""The covering arrays that parametrizations are made of leave no pair out."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.support.covering import every_second, in_turn, pairwise


@pytest.mark.parametrize("sizes", [(2,), (3, 2), (18, 3, 2), (7, 2, 2), (4, 3, 2), (2, 2, 2, 2), (5, 4, 3, 2)])
def test_every_pair_of_values_is_in_a_case(sizes: tuple[int, ...]) -> None:
    factors = [[f"{factor}={value}" for value in range(size)] for factor, size in enumerate(sizes)]
    cases = pairwise(*factors)
    for one, other in combinations(range(len(sizes)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(factors[one], factors[other]))


@pytest.mark.parametrize(("sizes", "most"), [((18, 3, 2), 54), ((7, 2, 2), 14), ((4, 3, 2), 12), ((5, 4, 3, 2), 24)])
def test_there_are_hardly_more_cases_than_the_two_largest_factors_need(sizes: tuple[int, ...], most: int) -> None:
    assert len(pairwise(*(range(size) for size in sizes))) <= most


def by_default(cases: list[Any]) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if not case.marks]


def test_every_subject_is_tried_by_default_and_all_choices_take_part() -> None:
    subjects = [f"{number}" for number in range(12)]
    cases = in_turn(subjects, "abc")
    assert {case.values for case in cases} == set(product(subjects, "abc"))
    assert [subject for subject, _ in by_default(cases)] == subjects
    assert {choice for _, choice in by_default(cases)} == set("abc")


def test_two_halves_try_every_subject_by_default_once() -> None:
    subjects = [f"{number}" for number in range(12)]
    both = [by_default(in_turn(subjects, "abc", half)) for half in (0, 1)]
    assert sorted((subject for half in both for subject, _ in half), key=int) == subjects
    assert all({choice for _, choice in half} == set("abc") for half in both)
    singles = [subject for half in (0, 1) for (subject,) in by_default(every_second(subjects, half))]
    assert sorted(singles, key=int) == subjects


_BEHAVIOURS = """
import pytest
from tests.support.covering import take_turns

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    take_turns(items)

def pytest_collection_finish(session):
    print("chosen:", *(item.name for item in session.items))
"""
_TESTS = """
import pytest
from itertools import product

SETTINGS = list(product(("cpu", "delayed"), ("host", "nvme")))

@pytest.mark.parametrize(("what", "backend", "tiers"), [(what, *setting) for what in "pqrs" for setting in SETTINGS])
def test_a(what, backend, tiers): ...
@pytest.mark.parametrize("backend", ["cpu"])
def test_b(backend): ...
@pytest.mark.parametrize("name", ["x", "y"])
def test_c(name): ...
"""


def test_each_behaviour_is_tried_by_default_in_some_of_its_settings(tmp_path: Path, project: Path) -> None:
    (tmp_path / "parity").mkdir()
    (tmp_path / "conftest.py").write_text(_BEHAVIOURS)
    (tmp_path / "parity/test_turns.py").write_text(_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    long\n    turn")

    def chosen(marks: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-qs", "-m", marks, "--rootdir", ".", "."]
        environment = {**os.environ, "PYTHONPATH": str(project)}
        told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
        [line] = [line for line in told.splitlines() if line.startswith("chosen:")]
        return set(line.split()[1:])

    default, rest = chosen("not long"), chosen("long")
    assert {"test_b[cpu]", "test_c[x]", "test_c[y]"} <= default and not default & rest
    assert len(default | rest) == 16 + 3 and chosen("turn") == rest
    for what in "pqrs":
        assert 1 <= len([name for name in default if name.startswith(f"test_a[{what}-")]) <= 2
