"""Any sequence of what people do with a model, its optimizer and their tensors: the plain run's numbers after every action."""

from __future__ import annotations

import gc
import logging
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.property.users.programs import ACTIONS, Person
from tests.support.twins import Setting, equal
from tieroff.errors import TieroffError

# That a budget is below what a step needs is no news here.
pytestmark = pytest.mark.filterwarnings("ignore::tieroff.BudgetWarning")

SETTINGS: dict[str, dict[str, Any]] = {
    "cpu floor": {"nvme": True},
    "delayed floor": {"delayed": True},
    "cpu auto 80": {"policy": "auto", "device": "80%", "nvme": True},
    "delayed auto 50": {"policy": "auto", "device": "50%", "nvme": True, "delayed": True},
    "cpu auto 100": {"policy": "auto", "device": "100%"},
    "cpu demand": {"policy": "demand"},
}
# Half of what people do is train.
_ACTION = st.tuples(st.one_of(st.just("step"), st.sampled_from(ACTIONS)), st.integers(0, 59))
PROGRAMS = st.tuples(
    st.sampled_from(sorted(SETTINGS)),
    st.sampled_from(["adamw", "sgd"]),
    st.integers(0, 4),  # ordinary steps first: four of them make a plan
    st.lists(_ACTION, min_size=1, max_size=14),
)
Program = tuple[str, str, int, list[tuple[str, int]]]


def attempt(person: Person, name: str, number: int) -> BaseException | None:
    try:
        person.act(name, number)
    except Exception as error:
        return error
    return None


def run(program: Program) -> None:
    """Asserts that a program shows the same numbers wrapped as plain, or ends with an error that tieroff names."""
    with tempfile.TemporaryDirectory() as folder:
        setting, optimizer, steps, actions = program
        kind = Setting(Path(folder), **SETTINGS[setting])

        def wrap(model: Any, optimizer: Any, device: str | None) -> Any:
            return replace(kind, device=device or kind.device).wrap(model, optimizer)

        plain, wrapped = Person(optimizer, None), Person(optimizer, wrap)
        try:
            is_whole = compare(plain, wrapped, [("step", 1)] * steps + actions)
        finally:
            wrapped.end()
        if is_whole:
            assert_same_look(plain, wrapped, "after unwrap")


def compare(plain: Person, wrapped: Person, actions: list[tuple[str, int]]) -> bool:
    """Does the actions on both sides; False when tieroff refused one, which ends the program."""
    for index, (name, number) in enumerate(actions):
        expected, got = attempt(plain, name, number), attempt(wrapped, name, number)
        where = f"action {index}, {name}({number})"
        if isinstance(got, TieroffError) and expected is None:
            assert "bug in tieroff" not in str(got), f"{where}: {got}"
            return False
        if type(expected) is not type(got):
            raise AssertionError(f"{where}: expected {expected!r}, got {got!r}") from got
        assert_same_look(plain, wrapped, where)
    return True


def assert_same_look(plain: Person, wrapped: Person, where: str) -> None:
    ours, theirs = wrapped.look(), plain.look()
    assert ours.keys() == theirs.keys(), f"{where}: {sorted(ours.keys() ^ theirs.keys())}"
    wrong = [key for key in theirs if not equal(ours[key], theirs[key])]
    assert wrong == [], f"{where} differs in {wrong}"


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """Warnings about steps that leave their plan are no news here; and no program leaves tensors to the next."""
    logger = logging.getLogger("tieroff")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)
    gc.collect()


_COMMON: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,  # the same programs in every run of a tree
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
    "database": None,
}


@given(program=PROGRAMS)
@settings(max_examples=25, **_COMMON)
def test_programs_of_people_show_the_plain_numbers(program: Program) -> None:
    run(program)


@pytest.mark.long
@given(program=PROGRAMS)
@settings(max_examples=300, **_COMMON)
def test_three_hundred_programs_show_the_plain_numbers(program: Program) -> None:
    run(program)


@pytest.mark.published
@pytest.mark.timeout(7200)
@given(program=PROGRAMS)
@settings(max_examples=2000, **_COMMON)
def test_two_thousand_programs_show_the_plain_numbers(program: Program) -> None:
    run(program)


# Programs that were wrong once, as short as they get.
FOUND: list[Program] = [
    ("cpu floor", "adamw", 4, [("share", 31), ("step", 54)]),
    ("cpu auto 100", "sgd", 3, [("alias_all", 4), ("step", 20)]),
    ("cpu auto 100", "sgd", 0, [("assign_data", 17), ("evaluate", 0)]),
    ("cpu auto 100", "adamw", 4, [("replace_layer", 7), ("evaluate", 32), ("step", 6)]),
]


@pytest.mark.parametrize("program", FOUND, ids=lambda program: "-".join(name for name, _ in program[3]))
def test_a_program_that_was_wrong_once(program: Program) -> None:
    run(program)


def test_programs_leave_grad_mode_alone() -> None:
    run(("cpu floor", "adamw", 4, [("fail_in_forward", 1), ("fail_in_backward", 1), ("step", 1)]))
    assert torch.is_grad_enabled()
