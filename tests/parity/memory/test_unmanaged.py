"""What lies on the device and does not move counts in every step, so that planned ones stay within their budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff
from tests.support.oracles.bytes.device import DeviceBytes
from tests.support.parity import NVME, assert_as_counted, config_for
from tieroff.core.tensor import Tier
from tieroff.units import format_bytes

WIDTH, LAYERS, ROWS, STEPS = 256, 6, 512, 8
WORDS_BYTES = 64  # losses, and what autograd makes of them


class Wrapper(Tensor):
    """The least wrapper subclass: one plain tensor inside."""

    part: Tensor

    @staticmethod
    def __new__(cls, part: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype, device=part.device)

    def __init__(self, part: Tensor) -> None:
        self.part = part

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["part"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Wrapper:
        return Wrapper(parts["part"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        inner = torch.utils._pytree.tree_map(lambda t: t.part if isinstance(t, Wrapper) else t, (args, kwargs or {}))
        return func(*inner[0], **inner[1])


class Adam(torch.optim.Optimizer):
    """Adam without a correction of its bias; `make` says what its state is."""

    def __init__(self, params: Iterable[nn.Parameter], make: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, {})
        self._make = make

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["m"], state["v"] = self._make(p), self._make(p)
            m, v = (getattr(state[key], "part", state[key]) for key in ("m", "v"))
            m.lerp_(p.grad, 0.1)
            v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)


CASES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor], str]] = {
    "moved": ({}, torch.zeros_like, ""),
    "uncovered": ({"cover": ["activations", "parameters", "gradients"]}, torch.zeros_like, "optimizer state is not covered"),
    "small": ({"min_bytes": 300_000}, torch.zeros_like, "smaller than min_bytes"),
    "subclass": ({}, lambda p: Wrapper(torch.zeros_like(p)), ""),  # moves by its part
}


@pytest.mark.parametrize("is_resumed", [False, True], ids=["new", "resumed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
def test_state_that_does_not_move_is_in_the_plan(case: str, is_resumed: bool, tmp_path: Path) -> None:
    plan, make, why = CASES[case]
    taken = DeviceBytes(torch.device("cpu"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = tieroff.per_parameter(Adam)(model.parameters(), make)
    if is_resumed:
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    config = config_for(NVME, tmp_path, policy="auto", device="min")
    config["budget"]["nvme"] = "64MiB"
    config["plan"] |= {"background": False, **plan}
    engine = tieroff.engine(tieroff.wrap(model, optimizer, config))
    for step in range(STEPS):
        taken.begin()
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEPS - 3:
            assert engine.stats().phase == "planned"
            assert_as_counted(engine, taken.peak_bytes, WORDS_BYTES)
    state_bytes = 2 * LAYERS * WIDTH * WIDTH * 4
    said = [line for line in engine.explain().splitlines() if line.startswith("Not managed, and why: ")]
    kept = "4.50 MiB" if case == "small" else "3.00 MiB"  # with the parameters, which are as small
    assert said == ([f"Not managed, and why: {kept} ({why})."] if why else [])
    if why:
        assert engine.plan.peak_bytes[Tier.DEVICE] >= state_bytes
    tieroff.unwrap(model)


@pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
def test_what_a_loop_holds_from_step_to_step_counts_in_the_next_one(tmp_path: Path) -> None:
    taken = DeviceBytes(torch.device("cpu"))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)), nn.Linear(WIDTH, 4 * WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = config_for(NVME, tmp_path, policy="auto", device="60%")
    config["budget"]["nvme"] = "64MiB"
    config["plan"]["background"] = False
    engine = tieroff.engine(tieroff.wrap(model, optimizer, config))
    for step in range(STEPS):
        taken.begin()
        logits = model(torch.randn(ROWS, WIDTH))
        logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= STEPS - 3:
            assert engine.stats().phase == "planned"
            assert_as_counted(engine, taken.peak_bytes, WORDS_BYTES)
    tieroff.unwrap(model)


@pytest.mark.parametrize("is_wrapped", [False, True], ids=["left out", "wrapped"])
@pytest.mark.filterwarnings("ignore:.*was raised:tieroff.errors.BudgetWarning")
def test_the_parameters_of_another_model_are_told(is_wrapped: bool, tmp_path: Path) -> None:
    """A frozen reference that nobody wrapped is in the plan, and named with what to do."""
    taken = DeviceBytes(torch.device("cpu"))
    torch.manual_seed(0)
    models = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))) for _ in range(2)]
    model, reference = models[0], models[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    config = config_for(NVME, tmp_path, policy="auto", device="min")
    config["budget"]["nvme"] = "64MiB"
    config["plan"] |= {"background": False}
    if is_wrapped:
        tieroff.wrap(models, [optimizer, None], config)
    else:
        tieroff.wrap(model, optimizer, config)
    engine = tieroff.engine(model)
    for _ in range(STEPS):
        taken.begin()
        output = model(x := torch.randn(ROWS, WIDTH))
        with torch.no_grad():  # after the step's first forward: what comes before that is no part of a step
            wanted = reference(x)
        (output - wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert engine.stats().phase == "planned"
    foreign_bytes = LAYERS * WIDTH * WIDTH * 4
    assert is_wrapped or taken.peak_bytes >= foreign_bytes
    said = [line for line in engine.explain().splitlines() if line.startswith("Not managed, and why: ")]
    why = "parameters of a model that is not wrapped: wrap it under the same budget"
    assert said == ([] if is_wrapped else [f"Not managed, and why: {format_bytes(foreign_bytes)} ({why})."])
    assert is_wrapped or engine.plan.peak_bytes[Tier.DEVICE] >= foreign_bytes
    for one in models[: 2 if is_wrapped else 1]:
        tieroff.unwrap(one)
