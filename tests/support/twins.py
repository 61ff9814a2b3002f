"""One training loop run twice, plain and wrapped, and everything people can see of it compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import tieroff
from tests.support.covering import pairwise
from tests.support.delayed import DelayedBackend
from tieroff.core.seams import Made, Pending
from tieroff.core.trace import Trace
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.session.planning import Planning
from tieroff.session.workshop import Known

Model = nn.Module
Optimizer = torch.optim.Optimizer | None
Make = Callable[[], tuple[Any, Any]]
Step = Callable[[Any, Any, int], Any]

MACHINE = """
name = "box"
measured = "datasheet"
device_bytes = "1GiB"
host_bytes = "1GiB"
nvme_bytes = "1GiB"
d2h_bytes_per_s = "4GiB"
h2d_bytes_per_s = "4GiB"
nvme_write_bytes_per_s = "1GiB"
nvme_read_bytes_per_s = "1GiB"
"""


@dataclass
class Setting:
    """Where a wrapped run happens: which backend, and which tier things are moved to."""

    folder: Path
    delayed: bool = False
    nvme: bool = False
    policy: str = "floor"
    device: str = "1GiB"

    def backend(self) -> Backend:
        return DelayedBackend(seed=3) if self.delayed else CpuBackend()

    @property
    def dir(self) -> Path:
        """The folder of the NVMe tier."""
        path = self.folder / "nvme"
        path.mkdir(exist_ok=True)
        return path

    def config(self, **planning: Any) -> dict[str, Any]:
        machine = self.folder / "machine.toml"
        machine.write_text(MACHINE)
        tiers: dict[str, Any] = {"budget": {"device": self.device, "host": "16MiB"}}
        if self.nvme:
            tiers = {
                "budget": {"device": self.device, "host": 0, "nvme": "32MiB"},
                "nvme": {"dirs": [str(self.dir)], "staging": "1MiB", "checksum": "always"},
            }
        return {**tiers, "plan": {"policy": self.policy, "min_bytes": 0, "machine": str(machine), **planning}}

    def wrap(self, model: Any, optimizer: Any = None, **planning: Any) -> Any:
        return tieroff.wrap(model, optimizer, self.config(**planning), backend=self.backend())


# What a step is planned with: everything moved out, or a share of what it takes.
_BUDGETS: dict[str, dict[str, Any]] = {
    "floor": {},
    "auto-100": {"policy": "auto", "device": "100%"},
    "auto-80": {"policy": "auto", "device": "80%"},
    "auto-50": {"policy": "auto", "device": "50%"},
}
_PARTS = (("cpu", "delayed"), tuple(_BUDGETS), ("nvme", "host"))  # of a setting: backend, budget and lower tier
PLANNED = tuple("-".join(case) for case in pairwise(*_PARTS))
"""Names of settings with every pair of their parts."""


def planned(name: str) -> dict[str, Any]:
    """Returns the options of a setting by its name, such as "delayed-auto-80-host"."""
    backend, *budget, tier = name.split("-")
    return {"delayed": backend == "delayed", "nvme": tier == "nvme", **_BUDGETS["-".join(budget)]}


def with_plans(**factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Returns a mark that runs a test over every pair of values of its own factors and of the parts of `planned_setting`."""
    cases = [(*case[:-3], "-".join(case[-3:])) for case in pairwise(*factors.values(), *_PARTS)]
    return pytest.mark.parametrize((*factors, "planned_setting"), cases, indirect=["planned_setting"])


@dataclass
class Run:
    """What a loop left behind: per step everything a person could print, and the engine's figures of the last step."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    phase: str = ""


def copied(value: Any) -> Any:
    """Returns a copy of all tensors in a nested structure, on memory of their own."""
    return _pytree.tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def look(model: Any, optimizer: Any, out: Any = None) -> dict[str, Any]:
    """Returns copies of outputs, parameters, buffers, gradients and optimizer state, by name."""
    seen = {"out": copied(out)}
    seen |= {f"parameter {name}": copied(p) for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": copied(b) for name, b in model.named_buffers()}
    seen |= {f"gradient of {name}": copied(p.grad) for name, p in model.named_parameters()}
    if optimizer is not None:
        seen |= {f"state {i}": copied(state) for i, state in optimizer.state_dict()["state"].items()}
    return seen


def equal(a: Any, b: Any) -> bool:
    """True when two nested structures hold the same bits."""
    ours, our_shape = _pytree.tree_flatten(a)
    theirs, their_shape = _pytree.tree_flatten(b)
    if our_shape != their_shape:
        return False
    for x, y in zip(ours, theirs, strict=True):
        if isinstance(x, torch.Tensor) != isinstance(y, torch.Tensor):
            return False
        if not isinstance(x, torch.Tensor):
            if x != y:
                return False
        elif x.layout is not y.layout or x.dtype is not y.dtype or not torch.equal(_dense(x), _dense(y)):
            return False
    return True


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def assert_same(plain: list[dict[str, Any]], wrapped: list[dict[str, Any]]) -> None:
    """Names the first step and the tensors in which two runs differ."""
    assert len(plain) == len(wrapped)
    for step, (a, b) in enumerate(zip(plain, wrapped, strict=True)):
        assert a.keys() == b.keys(), f"step {step}: {sorted(a.keys() ^ b.keys())}"
        wrong = [name for name in a if not equal(a[name], b[name])]
        assert not wrong, f"step {step} differs in {wrong}"


def follow(make: Make, step: Step, steps: int, setting: Setting | None = None, wrapping: Any = None) -> Run:
    """Runs a loop, wrapped when there is a setting, and looks at everything after every step."""
    torch.manual_seed(0)
    model, optimizer = make()
    run = Run()
    if setting is not None:
        setting.wrap(model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None, **(wrapping or {}))
    for index in range(steps):
        torch.manual_seed(1000 + index)
        out = step(model, optimizer, index)
        run.seen.append(look(model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else None, out))
    if setting is not None:
        stats = tieroff.engine(model).stats()
        run.moved_bytes, run.phase = stats.moved_bytes_by_class, stats.phase
        before = look(model, None)
        tieroff.unwrap(model)
        assert_same([before], [look(model, None)])
        assert not setting.nvme or list(setting.dir.iterdir()) == []
    return run


def check_twins(
    make: Make,
    step: Step,
    setting: Setting,
    *,
    steps: int = 5,
    phase: str = "planned",
    moves: tuple[str, ...] = ("parameter",),
    **wrapping: Any,
) -> Run:
    """Runs a loop plain and wrapped; asserts equal bits after every step, that bytes moved, and how the last step ran."""
    plain = follow(make, step, steps)
    wrapped = follow(make, step, steps, setting, wrapping)
    assert_same(plain.seen, wrapped.seen)
    for kind in moves:
        assert wrapped.moved_bytes[kind] > 0, f"no {kind} moved: {wrapped.moved_bytes}"
    assert wrapped.phase == phase, wrapped.phase
    return wrapped


class Mlp(nn.Module):
    """Two layers with an activation that is saved for backward."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def adam(model: Model) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 0.01)


def mlp_and_adam() -> tuple[Model, torch.optim.Optimizer]:
    model = Mlp()
    return model, adam(model)


def loss_of(model: Any, batch: int = 4, width: int = 8) -> torch.Tensor:
    """Returns the loss on a random batch, from the generator that both runs seed alike."""
    loss: torch.Tensor = model(torch.randn(batch, width)).square().mean()
    return loss


def usual_step(model: Any, optimizer: Any, index: int = 0) -> torch.Tensor:
    """An ordinary training step; gradients stay, to be looked at."""
    optimizer.zero_grad()
    loss = loss_of(model)
    loss.backward()
    optimizer.step()
    return loss


def recompute_in_every_plan(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    """Has every plan name these modules to recompute."""
    plan = Planning.plan

    def with_recompute(self: Planning, traces: Sequence[Trace], rates: dict[str, float], **options: bool) -> Pending[Made]:
        pending = plan(self, traces, rates, **options)

        def take() -> Made:
            made = pending.take()
            return replace(made, plan=replace(made.plan, recompute=names))

        return Known(take)

    monkeypatch.setattr(Planning, "plan", with_recompute)
