"""An optimizer that is not attached updates a wrapped model: what it makes lies on the device, and steps have room for that."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.support.oracles.bytes.device import DeviceBytes, aside
from tests.support.parity import NVME, config_for, warnings_of_tieroff
from tieroff.core.tensor import Tier

WIDTH, LAYERS, ROWS, STEPS = 256, 6, 64, 16
LAYER_BYTES = 4 * WIDTH * WIDTH
WORDS_BYTES = 64  # losses, and what autograd makes of them
BUDGETS = ["min", pytest.param("50%", marks=pytest.mark.long)]


@dataclass(frozen=True)
class Case:
    """Who updates a model of six layers.

    Attributes:
        attached: how many layers the attached optimizer has; the other one, which is not, has the rest.
        is_first: the other one comes before it.
        since: the step from which on the other one updates.
    """

    attached: int
    is_first: bool = False
    since: int = 0


CASES = {
    "alone": Case(0),
    "alone, late": Case(0, since=8),
    "before the attached one": Case(3, is_first=True),
    "after the attached one": Case(3),
    "after the attached one, late": Case(3, since=8),
}


class Run:
    """One run of a case."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        parameters = list(self.model.parameters())
        self.attached = torch.optim.AdamW(parameters[: case.attached]) if case.attached else None
        self.other: torch.optim.Optimizer = torch.optim.AdamW(parameters[case.attached :])
        self.case = case
        self.values: list[Tensor] = []

    def step(self, step: int) -> None:
        loss = self.model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        if self.case.is_first:
            self.other.step()
        if self.attached is not None:
            self.attached.step()
        if step >= self.case.since and not self.case.is_first:
            self.other.step()
        self.model.zero_grad()
        with aside():
            self.values.append(loss.detach().clone())


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
def test_steps_have_room_for_what_an_unattached_optimizer_makes(name: str, budget: str, tmp_path: Path) -> None:
    case = CASES[name]
    plain = Run(case)
    for step in range(STEPS):
        plain.step(step)
    taken = DeviceBytes(torch.device("cpu"))
    run = Run(case)
    config = config_for(NVME, tmp_path, policy="auto", device=budget)
    config["budget"]["nvme"] = "64MiB"
    config["plan"]["background"] = False
    engine = tieroff.engine(tieroff.wrap(run.model, run.attached, config))
    phases = Counter[str]()
    with warnings_of_tieroff() as messages:
        for step in range(STEPS):
            taken.begin()
            run.step(step)
            is_new = step == case.since  # its state is made in this step, which has left its plan for that
            if step and engine.stats().phase == "planned" and not is_new:
                assert taken.peak_bytes <= engine.plan.budget_bytes[Tier.DEVICE] + WORDS_BYTES, f"in step {step}"
                phases["late" if step > case.since else "early"] += 1
    said = [line for line in engine.explain().splitlines() if line.startswith("Not managed, and why: ")]
    tieroff.unwrap(run.model)
    assert all(map(torch.equal, plain.values, run.values))
    assert all(map(torch.equal, plain.model.parameters(), run.model.parameters()))
    assert phases["late"] >= 3
    assert phases["early"] >= 3 or not case.since
    state_mib = 2 * (LAYERS - case.attached) * LAYER_BYTES / (1 << 20)
    assert said == [f"Not managed, and why: {state_mib:.2f} MiB (state of AdamW, which is not attached)."]
    (told,) = [message for message in messages if "its state stays on the device" in message]
    assert ("add_param_group" if case.attached else "tieroff.engine(model).attach(optimizer)") in told


@pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
def test_an_unattached_optimizer_that_is_gone_counts_no_more(tmp_path: Path) -> None:
    run = Run(CASES["after the attached one"])
    config = config_for(NVME, tmp_path, policy="auto", device="min")
    config["plan"]["background"] = False
    engine = tieroff.engine(tieroff.wrap(run.model, run.attached, config))
    for step in range(8):
        run.step(step)
    with_it = engine.plan.peak_bytes[Tier.DEVICE]
    run.other = torch.optim.SGD(list(run.model.parameters())[3:])
    for step in range(8):
        run.step(step)
    assert engine.stats().phase == "planned"
    assert engine.plan.peak_bytes[Tier.DEVICE] <= with_it - 6 * LAYER_BYTES
    assert "Not managed" not in engine.explain()
    tieroff.unwrap(run.model)
