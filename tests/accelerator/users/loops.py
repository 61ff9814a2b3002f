"""What people do with a model, run plain and wrapped on the device, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import tieroff
from tests.accelerator import target
from tests.support.parity import HOST, Tiers, are_same_bits, config_for, copy_of
from tieroff.runtime.engine import Engine

WIDTH, ROWS, STEPS = 16, 8, 8
SEED = 7


def untouched(_: Any, x: Tensor) -> Tensor:
    return x


class Net(nn.Module):
    """Four layers; `inside` is called in the middle of its forward, with the model and what it has computed by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.third, self.fourth = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inside: Callable[[Any, Tensor], Tensor] = untouched

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.second(F.gelu(self.first(x))))
        x = self.inside(self, x)
        output: Tensor = self.fourth(F.gelu(self.third(x)))
        return output


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Program:
    """One run of somebody's program; `wrap` does nothing in the plain run.

    Attributes:
        seen: all that the program noted, as copies.
        phases: of the wrapped run's steps, with the count of fallbacks.
    """

    def __init__(
        self, folder: Path | None, make: Callable[[], nn.Module], tiers: Tiers, device: str, policy: str = "floor"
    ) -> None:
        torch.manual_seed(SEED)
        self._folder, self._tiers, self._budget, self._policy = folder, tiers, device, policy
        self.model: Any = make().to(target.device())
        self.optimizer = adamw(self.model)
        self.seen: list[Any] = []
        self.phases: list[tuple[str, int]] = []
        self.engine: Engine | None = None

    @property
    def is_plain(self) -> bool:
        return self._folder is None

    def wrap(self) -> None:
        """Where the program calls `tieroff.wrap`."""
        if self._folder is not None:
            config = config_for(self._tiers, self._folder, device=self._budget, policy=self._policy)
            tieroff.wrap(self.model, self.optimizer, config, backend=target.backend())
            self.engine = tieroff.engine(self.model)

    @property
    def parameters(self) -> list[Any]:
        return list(self.model.parameters())

    def note(self, *values: Any) -> None:
        """Keeps copies of tensors, and other values as they are."""
        for value in values:
            self.seen.append(copy_of(value) if isinstance(value, Tensor) else value)

    def rows(self, index: int) -> Tensor:
        torch.manual_seed(SEED + 1 + index)
        return torch.randn(ROWS, WIDTH).to(target.device())

    def loss(self, index: int, model: Any = None) -> Tensor:
        out: Tensor = (self.model if model is None else model)(self.rows(index))
        return out.float().square().mean()

    def update(self, loss: Tensor, *, set_to_none: bool = True) -> None:
        """Ends a step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.note(loss)
        if self.engine is not None:
            stats = self.engine.stats()
            self.phases.append((stats.phase, stats.fallbacks))

    def step(self, index: int) -> None:
        """An ordinary step."""
        loss = self.loss(index)
        loss.backward()
        self.update(loss)

    def steps(self, count: int = STEPS, start: int = 0) -> None:
        for index in range(start, start + count):
            self.step(index)

    def finish(self) -> None:
        """Notes what became of the model and its optimizer, and unwraps it."""
        if self.engine is not None:
            tieroff.unwrap(self.model)
        self.note(*self.parameters)
        self.note(*tree_leaves([*self.optimizer.state.values()]))


Usage = Callable[[Program], None]


def run(
    usage: Usage,
    folder: Path | None,
    *,
    make: Callable[[], nn.Module] = Net,
    tiers: Tiers = HOST,
    device: str = "100%",
    policy: str = "floor",
) -> Program:
    """Runs a program, plain without a folder."""
    program = Program(folder, make, tiers, device, policy)
    usage(program)
    program.finish()
    torch.accelerator.synchronize(target.device())
    return program


def check(usage: Usage, folder: Path, *, planned: int = 2, **options: Any) -> Program:
    """Asserts that a program sees the same wrapped as plain, and that its last `planned` steps followed a plan."""
    plain, wrapped = run(usage, None, **options), run(usage, folder, **options)
    assert len(plain.seen) == len(wrapped.seen)
    differ = [i for i, (a, b) in enumerate(zip(plain.seen, wrapped.seen, strict=True)) if not are_same_bits(a, b)]
    assert differ == [], f"of {len(plain.seen)} values these differ"
    assert wrapped.phases[len(wrapped.phases) - planned :] == [("planned", 0)] * planned, wrapped.phases
    return wrapped
