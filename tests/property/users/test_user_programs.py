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
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.property.users.parts import OPTIMIZERS
from tests.property.users.programs import Person
from tests.property.users.strange import ACTIONS, Strange
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
    "cpu auto 50": {"policy": "auto", "device": "50%"},
    "delayed auto 80": {"policy": "auto", "device": "80%", "delayed": True},
}
# Half of what people do is train.
_ACTION = st.tuples(st.one_of(st.just("step"), st.sampled_from(ACTIONS)), st.integers(0, 59))
PROGRAMS = st.tuples(
    st.sampled_from(sorted(SETTINGS)),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.integers(0, 4),  # ordinary steps first: four of them make a plan
    st.lists(_ACTION, min_size=1, max_size=14),
    st.booleans(),  # looks at everything after each action, which brings it up; or at the end alone
)
Program = tuple[str, str, int, list[tuple[str, int]], bool]


def attempt(person: Person, name: str, number: int) -> BaseException | None:
    try:
        person.act(name, number)
    except Exception as error:
        return error
    return None


def run(program: Program) -> None:
    """Asserts that a program shows the same numbers wrapped as plain, or ends with an error that tieroff names."""
    with tempfile.TemporaryDirectory() as folder:
        setting, optimizer, steps, actions, looks = program
        kind = Setting(Path(folder), **SETTINGS[setting])

        def wrap(model: Any, optimizer: Any, device: str | None) -> Any:
            return replace(kind, device=device or kind.device).wrap(model, optimizer)

        plain, wrapped = Strange(optimizer, None), Strange(optimizer, wrap)
        try:
            is_whole = compare(plain, wrapped, [("step", 1)] * steps + actions, looks)
        finally:
            wrapped.end()
        if is_whole:
            assert_same_look(plain, wrapped, "after unwrap")


def compare(plain: Person, wrapped: Person, actions: list[tuple[str, int]], looks: bool) -> bool:
    """Does the actions on both sides; False when tieroff refused one, which ends the program."""
    for index, (name, number) in enumerate(actions):
        expected, got = attempt(plain, name, number), attempt(wrapped, name, number)
        where = f"action {index}, {name}({number})"
        if isinstance(got, TieroffError) and expected is None:
            assert "bug in tieroff" not in str(got), f"{where}: {got}"
            return False
        if type(expected) is not type(got):
            raise AssertionError(f"{where}: expected {expected!r}, got {got!r}") from got
        if looks or index == len(actions) - 1:
            assert_same_look(plain, wrapped, where)
        assert equal(wrapped.said, plain.said), f"{where} said {wrapped.said}, expected {plain.said}"
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
@pytest.mark.parametrize("number", range(20))
def test_a_hundred_programs_of_each_seed_show_the_plain_numbers(number: int) -> None:
    """Two thousand in all; a test's name has its seed, and repeats its programs."""

    @seed(number)
    @given(program=PROGRAMS)
    @settings(max_examples=100, **_COMMON)
    def check(program: Program) -> None:
        run(program)

    check()


# Programs that were wrong once, as short as they get.
FOUND: list[Program] = [
    ("cpu floor", "adamw", 4, [("share", 31), ("step", 54)], True),
    ("cpu auto 100", "sgd", 3, [("alias_all", 4), ("step", 20)], True),
    ("cpu auto 100", "sgd", 0, [("assign_data", 17), ("evaluate", 0)], True),
    ("cpu floor", "adamw", 0, [("step", 2), ("share_all", 13), ("evaluate", 34), ("step", 35)], False),
    ("cpu demand", "own", 0, [("change_forward", 22), ("step", 23), ("freeze_all", 22), ("step", 49)], False),
    ("cpu auto 100", "adamw", 4, [("replace_layer", 7), ("evaluate", 32), ("step", 6)], True),
    ("cpu auto 100", "sgd", 2, [("retain", 11), ("step", 44), ("alternate_halves", 9), ("assign_vector", 38)], True),
    ("cpu demand", "sgd", 2, [("retain", 24), ("alternate_halves", 52), ("assign_slice", 37)], True),
    ("cpu demand", "sgd", 4, [("retain", 24), ("alternate_halves", 52), ("assign_slice", 37), ("step", 23), ("step", 3)], True),
    ("cpu auto 100", "adamw", 0, [("step", 0), ("share", 5), ("narrow_group", 0), ("step", 0), ("step", 0)], False),
    ("cpu auto 100", "normed", 2, [("retain", 45), ("parametrize", 42), ("step", 54), ("share", 5), ("step", 13)], True),
]


@pytest.mark.parametrize("program", FOUND, ids=lambda program: "-".join(name for name, _ in program[3]))
def test_a_program_that_was_wrong_once(program: Program) -> None:
    run(program)


def test_programs_leave_grad_mode_alone() -> None:
    run(("cpu floor", "adamw", 4, [("fail_in_forward", 1), ("fail_in_backward", 1), ("step", 1)], True))
    assert torch.is_grad_enabled()
