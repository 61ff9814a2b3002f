"""A training loop whose parameters the CPU updates, plain and wrapped: by the machine file links are slow, so plans have it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tieroff
from tests.accelerator import target
from tests.support.parity import are_same_bits, copy_of
from tieroff.core.machine import Machine, save_machine
from tieroff.core.tensor import TensorClass, Tier
from tieroff.runtime.engine import Engine

WIDTH, ROWS, LAYERS, SEED = 64, 8, 8, 11
STEPS_BEFORE = 4  # traced, measured, and measured once more while updates are compared; then planned
LINK, UPDATES = 2 << 20, 1 << 30  # bytes per second

Make = Callable[[Any], torch.optim.Optimizer]


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    # A rate so large that few elements tell roundings apart: of updates much smaller than the parameter, few last bits differ.
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def machine_file(folder: Path) -> str:
    """Writes a machine on which it pays to update parameters where their state lies."""
    machine = Machine(
        name="made up",
        measured="datasheet",
        device_bytes=1 << 40,
        host_bytes=1 << 40,
        d2h_bytes_per_s=LINK,
        h2d_bytes_per_s=LINK,
        cpu_update_bytes_per_s=UPDATES,
    )
    save_machine(machine, folder / "machine.toml")
    return str(folder / "machine.toml")


def config(folder: Path, budget: str = "45%", **plan: Any) -> dict[str, Any]:
    return {
        "budget": {"device": budget, "host": 16 << 20},
        "nvme": {"dirs": []},
        "plan": {"machine": machine_file(folder), "min_bytes": 0, "background": False, **plan},
    }


class Loop:
    """One run of a program; plain without a folder.

    Attributes:
        seen: what it noted.
        engine: of the wrapped run.
    """

    def __init__(
        self,
        folder: Path | None,
        make: Make = fused_adamw,
        *,
        dtype: torch.dtype = torch.float32,
        bias: bool = True,
        outputs: int = WIDTH,
        **plan: Any,
    ) -> None:
        torch.manual_seed(SEED)
        widths = [WIDTH] * LAYERS + [outputs]
        layers = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair, bias=bias), nn.Tanh())]
        self.model: Any = nn.Sequential(*layers).to(target.device(), dtype)
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.dtype, self.seen, self.index = dtype, list[Any](), 0
        self.engine: Engine | None = None
        if folder is not None:
            tieroff.wrap(self.model, self.optimizer, config(folder, **plan), backend=target.backend())
            self.engine = tieroff.engine(self.model)

    @property
    def parameters(self) -> list[Any]:
        return list(self.model.parameters())

    @property
    def state(self) -> list[dict[str, Tensor]]:
        return [self.optimizer.state[parameter] for parameter in self.parameters]

    def note(self, *values: Any) -> None:
        self.seen += [copy_of(value) if isinstance(value, Tensor) else value for value in values]

    def loss(self) -> Tensor:
        torch.manual_seed(SEED + self.index)
        self.index += 1
        rows = torch.randn(ROWS, WIDTH).to(target.device(), self.dtype)
        loss: Tensor = self.model(rows).float().square().mean()
        self.note(loss)
        return loss

    def backward(self) -> None:
        self.loss().backward()

    def step(self, *, set_to_none: bool = True) -> None:
        self.backward()
        self.note(nn.utils.clip_grad_norm_(self.parameters, 0.02))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.scheduler.step()

    def steps(self, count: int, *, set_to_none: bool = True) -> None:
        for _ in range(count):
            self.step(set_to_none=set_to_none)

    def finish(self) -> Loop:
        """Notes what became of the model and its optimizer, and unwraps it."""
        if self.engine is not None:
            tieroff.unwrap(self.model)
        self.note(*self.parameters, *tree_leaves(self.state))
        torch.accelerator.synchronize(target.device())
        return self

    def assert_updated_below(self) -> None:
        """Asserts that the last step followed a plan in which the CPU updates most, and moved no state of that."""
        assert self.engine is not None
        stats, plan, trace = self.engine.stats(), self.engine.plan, self.engine.trace
        assert (stats.phase, stats.fallbacks) == ("planned", 0)
        assert stats.host_updates == len(plan.host_updates) >= LAYERS / 2
        moved = [trace.tensors[t.tensor] for t in plan.transfers if trace.tensors[t.tensor].kind is TensorClass.OPTIMIZER]
        updated = {trace.tensors[i].name for update in plan.host_updates for i in trace.ops[update.op].writes}
        assert updated.isdisjoint(tensor.name for tensor in moved)
        assert stats.moved_bytes_by_class["optimizer"] <= sum(tensor.size_bytes for tensor in moved)  # there in whole units
        assert stats.peak_device_bytes <= plan.budget_bytes[Tier.DEVICE]


def differing(one: Loop, other: Loop) -> list[int]:
    """Returns the places of what two runs noted where it differs."""
    assert len(one.seen) == len(other.seen)
    return [i for i, (a, b) in enumerate(zip(one.seen, other.seen, strict=True)) if not are_same_bits(a, b)]
