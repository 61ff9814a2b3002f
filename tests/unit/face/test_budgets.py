"""Device budgets that people write: shares, sizes, "min", and what happens to one that is too small."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import MACHINE, adam, assert_same, follow, look
from tieroff.config import Config
from tieroff.core.tensor import Tier
from tieroff.device_budget import DeviceBudget
from tieroff.errors import BudgetWarning, ConfigError, InfeasiblePlanError
from tieroff.planner.problem.problem import live_bytes
from tieroff.storage.limits import HostLimit
from tieroff.units import parse_bytes, pasteable

ROWS, WIDTH = 64, 48
STEPS = 5


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    return model, adam(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int = 0, rows: int = ROWS) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(rows, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "machine.toml").write_text(MACHINE)
    planning = {"min_bytes": 0, "machine": str(tmp_path / "machine.toml")}
    return {"device": "cpu", "budget": {"host": "8MiB"}, "plan": planning}


def train(config: dict[str, Any], budget: int | str | None, steps: int = STEPS) -> tuple[nn.Module, list[BudgetWarning]]:
    """Returns a wrapped model after some steps, and the warnings about its budget."""
    torch.manual_seed(0)
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config, budget=budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(model, optimizer)
    assert all(isinstance(warning.message, BudgetWarning) for warning in caught)
    return model, [warning.message for warning in caught if isinstance(warning.message, BudgetWarning)]


def strict(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, "budget": {**config["budget"], "strict": True}}


def device_budget(model: nn.Module) -> int:
    return tieroff.engine(model).plan.budget_bytes[Tier.DEVICE]


def peak(model: nn.Module) -> int:
    return int(live_bytes(tieroff.engine(model).trace).max())


def pasted(message: str) -> int | str:
    """Returns the number that a message names, as a person pastes it."""
    found = re.search(r'(?:A device budget of|A budget of) "?(\d+(?:[KMGT]iB)?)"?', message)
    assert found is not None, message
    return int(found[1]) if found[1].isdigit() else found[1]


def test_a_budget_beside_the_config_overrides_it(config: dict[str, Any]) -> None:
    config["budget"]["device"] = "1GiB"
    model, said = train(config, "80%")
    assert said == []
    assert device_budget(model) == int(0.8 * peak(model))
    assert tieroff.engine(model).stats().moved_bytes["d2h"] > 0
    tieroff.unwrap(model)


@pytest.mark.parametrize(("budget", "raised_from"), [("2%", "2%"), ("1KiB", "1.00 KiB"), ("50%", ""), ("min", "")])
def test_explain_says_where_the_budget_was_raised_from(config: dict[str, Any], budget: str, raised_from: str) -> None:
    model, warned = train(config, budget)
    said = tieroff.engine(model).explain().splitlines()[0]
    tieroff.unwrap(model)
    assert bool(warned) == bool(raised_from)
    assert said.partition(", raised from ")[2].partition(";")[0] == raised_from


@pytest.mark.parametrize("written", ["min", " MIN "])
def test_the_least_that_runs_runs_and_moves_most(config: dict[str, Any], written: str) -> None:
    model, said = train(config, written)
    assert said == []
    least = device_budget(model)
    assert least < 0.8 * peak(model)
    tieroff.unwrap(model)
    with pytest.raises(InfeasiblePlanError):
        train(strict(config), least * 9 // 10)


def test_the_least_runs_under_every_policy(config: dict[str, Any]) -> None:
    config["plan"]["policy"] = "capuchin"  # which moves activations only
    model, said = train(config, "min")
    assert said == []
    by_policy = device_budget(model)
    tieroff.unwrap(model)
    config["plan"]["policy"] = "auto"
    model, _ = train(config, "min")
    assert device_budget(model) < by_policy
    tieroff.unwrap(model)


@pytest.mark.parametrize("budget", ["1%", "4KiB", 1000])
def test_a_budget_below_the_least_is_raised_with_one_warning_after_the_first_step(
    config: dict[str, Any], budget: int | str
) -> None:
    model, said = train(config, budget, steps=2)  # the second step's forward ends the first step
    assert len(said) == 1
    for _ in range(4):
        step(model, tieroff.engine(model).optimizer)  # type: ignore[arg-type]
    raised = device_budget(model)
    assert tieroff.engine(model).stats().phase == "planned"
    assert raised == parse_bytes(pasteable(raised))
    tieroff.unwrap(model)
    assert parse_bytes(pasted(str(said[0]))) == raised
    assert "below the least" in str(said[0])
    assert "strict" in str(said[0])


def test_a_raised_run_has_the_numbers_of_the_plain_one(config: dict[str, Any]) -> None:
    plain = follow(make, step, STEPS)
    torch.manual_seed(0)
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config, budget="1%")
    seen = []
    for index in range(STEPS):
        torch.manual_seed(1000 + index)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            out = step(model, optimizer, index)
        seen.append(look(model, optimizer, out))
    assert_same(plain.seen, seen)
    tieroff.unwrap(model)


def test_the_warning_points_at_the_loop_of_the_user(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config, budget="1%")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step(model, optimizer)
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]
    tieroff.unwrap(model)


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("budget", ["10%", "4KiB"])
def test_the_number_of_the_message_runs_when_it_is_pasted(config: dict[str, Any], budget: str, is_strict: bool) -> None:
    """Exactly one paste: on the CPU memory apart from tensors is subtracted from bytes, and grows as the run goes."""
    used = strict(config) if is_strict else config
    pastes: list[int | str] = [budget]
    for _ in range(4):
        try:
            model, said = train(used, pastes[-1])
        except InfeasiblePlanError as error:
            said = [str(error)]  # type: ignore[list-item]
        else:
            tieroff.unwrap(model)
        if not said:
            break
        pastes.append(pasted(str(said[0])))
    assert len(pastes) == 2


def test_the_number_runs_for_a_policy_that_needs_more_than_the_least(config: dict[str, Any]) -> None:
    config["plan"]["policy"] = "capuchin"
    with pytest.raises(InfeasiblePlanError) as caught:
        train(strict(config), "4KiB")
    with pytest.raises(InfeasiblePlanError) as by_policy:  # enough for some plan, not for one of this policy
        train(strict(config), pasted(str(caught.value)))
    model, _ = train(strict(config), pasted(str(by_policy.value)))
    tieroff.unwrap(model)


def test_a_strict_budget_is_an_error_after_the_first_step_and_numbers_stay(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, optimizer = make()
    tieroff.wrap(model, optimizer, strict(config), budget="1%")
    step(model, optimizer)
    with pytest.raises(InfeasiblePlanError) as caught:
        step(model, optimizer)
    assert caught.value.needed_bytes > caught.value.available_bytes
    tieroff.unwrap(model)
    step(model, optimizer)


def test_one_warning_for_many_kinds_of_steps_and_another_for_one_that_needs_more(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, optimizer = make()
    tieroff.wrap(model, optimizer, config, budget="1KiB")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (ROWS, ROWS // 2, ROWS, ROWS // 2, ROWS, ROWS // 2):
            step(model, optimizer, rows=rows)
        assert len(caught) == 1
        for _ in range(4):
            step(model, optimizer, rows=4 * ROWS)
    assert len(caught) == 2
    tieroff.unwrap(model)


def test_without_a_tier_below_the_message_says_how_to_have_one(config: dict[str, Any]) -> None:
    config["budget"]["host"] = 0
    config["nvme"] = {"dirs": []}
    model, said = train(config, "50%")
    tieroff.unwrap(model)
    assert "[nvme] dirs" in str(said[0])
    assert "largest there: ;" not in str(said[0])


def test_more_than_the_device_has_stays_an_error(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieroff.session.budgets.host_limit", lambda: HostLimit(1000))
    with pytest.raises(InfeasiblePlanError):
        train(config, "1%")


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        ("50", 'got "50"|write "50%"'),
        ("0.5", 'write "50%"'),
        (0.5, 'write "50%"'),
        ("half", "expected"),
        ("-3GiB", "expected"),
        ([], "expected"),
    ],
)
def test_budgets_that_are_none(config: dict[str, Any], budget: Any, told: str) -> None:
    model, optimizer = make()
    with pytest.raises(ConfigError, match=f"^budget: .*({told})"):
        tieroff.wrap(model, optimizer, config, budget=budget)


def test_a_budget_in_place_of_a_config_is_recognised() -> None:
    model, optimizer = make()
    for written, meant in (("50%", "50%"), ("min", "min"), ("6GiB", "6GiB"), ("50", "50%")):
        with pytest.raises(ConfigError, match=rf'which is a budget; write .*budget="{meant}"'):
            tieroff.wrap(model, optimizer, written)
    with pytest.raises(tieroff.StateError, match=r"wrap\(model, optimizer, budget=\.\.\.\)"):
        tieroff.wrap(model, "50%")  # type: ignore[call-overload]


def test_the_least_is_written_as_it_is_read(tmp_path: Path) -> None:
    loaded = Config.load({"budget": {"device": "min", "strict": True}})
    assert loaded.budget.device == DeviceBudget(is_least=True)
    (tmp_path / "again.toml").write_text(loaded.to_toml())
    assert Config.load(tmp_path / "again.toml") == loaded


@pytest.mark.parametrize("size_bytes", [1, 60, 63, 64, 65, 1000, 4097, 5 << 20, (5 << 20) + 1, 123_456_789_012])
def test_sizes_to_paste_are_enough_and_not_much_more(size_bytes: int) -> None:
    read = parse_bytes(pasteable(size_bytes))
    assert size_bytes <= read <= size_bytes * 33 // 32 + 1
    assert pasteable(read) == pasteable(size_bytes)


def test_the_warning_begins_with_what_to_do_and_names_what_needs_it_last(config: dict[str, Any]) -> None:
    model, said = train(config, "1%", steps=2)
    tieroff.unwrap(model)
    text = str(said[0])
    assert text.index("A budget of") < text.index("What needs it: op ") and len(text) < 800


def test_several_models_of_one_budget_are_told_once_with_what_all_of_them_need(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pairs = [make() for _ in range(3)]
    config["plan"]["background"] = False
    tieroff.wrap([model for model, _ in pairs], [optimizer for _, optimizer in pairs], config, budget="1%")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS):
            for model, optimizer in pairs:
                step(model, optimizer)
    said = [str(warning.message) for warning in caught]
    needed = sum(device_budget(model) for model, _ in pairs)
    for model, _ in pairs:
        tieroff.unwrap(model)
    assert len(said) == 1 and "its 3 models" in said[0]
    assert 0.97 * needed <= parse_bytes(pasted(said[0])) <= 1.03 * needed
