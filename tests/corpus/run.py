"""A small program of somebody's, run plain and wrapped: what it sees, how its steps ran, and what they took."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tieroff
from tests.support.oracles.bytes.device import DeviceBytes
from tests.support.parity import are_same_bits, copy_of, machine_file
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.base import Backend

Usage = Callable[["Program"], None]
ROUNDING_BYTES = 512  # an allocator's, of each tensor
# What a step may take of an accelerator beside its plan: blocks with norms of gradients that left, with their factors, a loss.
ON_DEVICE_BYTES = 3 * ROUNDING_BYTES
SEED = 11


@dataclass(frozen=True)
class Stranger:
    """A program.

    Attributes:
        usage: runs it.
        planned: how many of its last steps follow a plan.
        needs_host: it runs on the CPU only.
        is_counted: it takes what its planned steps take; not of one that keeps copies, or has steps without an update.
        on_host_bytes: on the CPU, scratch of kernels on small tensors, at which no step looks, and copies "to the host";
            programs that were seen to take more say so.
    """

    usage: Usage
    planned: int = 2
    needs_host: bool = False
    is_counted: bool = True
    on_host_bytes: int = 0


STRANGERS: dict[str, Stranger] = {}


def stranger(
    *, planned: int = 2, needs_host: bool = False, is_counted: bool = True, on_host_bytes: int = 12 << 10
) -> Callable[[Usage], Usage]:
    """Adds a program to the corpus."""

    def add(usage: Usage) -> Usage:
        STRANGERS[usage.__name__] = Stranger(usage, planned, needs_host, is_counted, on_host_bytes)
        return usage

    return add


def runs_anywhere() -> list[str]:
    """Returns the programs that run on every device, once the folder `programs` is imported."""
    return [name for name, known in STRANGERS.items() if not known.needs_host]


@dataclass
class Took:
    """What a step took.

    Attributes:
        phase, fallbacks, moved_bytes: as the engine says.
        limit_bytes: the budget of the plan that it followed, or of those of several models; None without one.
        peak_bytes: by the allocator, or on the CPU by one that counts in its place.
    """

    phase: str
    fallbacks: int
    moved_bytes: int
    limit_bytes: int | None
    peak_bytes: int


@dataclass
class Program:
    """One run; `wrap` does nothing in a plain one."""

    device: torch.device
    folder: Path
    budget: str | None = None
    backend: Callable[[], Backend] | None = None
    seen: list[Any] = field(default_factory=list)
    steps: list[Took] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        gc.collect()  # what runs before left in circles
        self._synchronize()
        self.taken = DeviceBytes(self.device)

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @property
    def is_plain(self) -> bool:
        return self.budget is None

    def wrap(self, model: Any, optimizer: Any = None) -> None:
        """Where the program would call `tieroff.wrap`."""
        if self.budget is None or self.backend is None:
            return
        is_cpu = self.device.type == "cpu"
        tiers = {"device": self.budget, "host": 0 if is_cpu else "64MiB"} | ({"nvme": "64MiB"} if is_cpu else {})
        config = {
            "budget": tiers,
            "nvme": {"dirs": [str(self.folder)] if is_cpu else []},
            "plan": {"min_bytes": 0, "machine": str(machine_file(self.folder)), "background": False},
        }
        tieroff.wrap(model, optimizer, config, backend=self.backend())
        self.models += model if isinstance(model, list) else [model]

    def unwrap(self, model: nn.Module) -> None:
        if not self.is_plain:
            tieroff.unwrap(model)
            self.models.remove(model)

    def note(self, *values: Any) -> None:
        """Keeps copies of tensors, and other values as they are."""
        for value in tree_leaves(list(values)):
            self.seen.append(copy_of(value) if isinstance(value, torch.Tensor) else value)

    def end(self, model: nn.Module, *values: Any) -> None:
        """A step has ended; notes values and what the step took."""
        self.note(*values)
        if self.is_plain:
            return
        engine = tieroff.engine(model)
        stats = engine.stats()
        is_planned = stats.phase == "planned"
        self._synchronize()
        peak_bytes = self.taken.peak_bytes
        self.taken.begin()
        limits = [_limit_bytes(one) for one in self.models] if is_planned else [None]
        limit_bytes = None if None in limits else sum(limit for limit in limits if limit is not None)
        moved = sum(stats.moved_bytes.values())
        self.steps.append(Took(stats.phase, stats.fallbacks, moved, limit_bytes, peak_bytes))

    def rows(self, index: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns random numbers, the same in every run."""
        generator = torch.Generator().manual_seed(2000 + index)
        return torch.randn(*shape, generator=generator).to(self.device, dtype)

    def tokens(self, index: int, *shape: int, vocabulary: int = 48) -> torch.Tensor:
        """Returns random integers, the same in every run."""
        generator = torch.Generator().manual_seed(3000 + index)
        return torch.randint(0, vocabulary, shape, generator=generator).to(self.device)

    def finish(self) -> None:
        """Unwraps what is left."""
        for model in list(self.models):
            self.unwrap(model)


def _limit_bytes(model: nn.Module) -> int | None:
    """Returns the budget of the plan of a model's last kind of step; None while it has none."""
    try:
        return tieroff.engine(model).plan.budget_bytes[Tier.DEVICE]
    except tieroff.StateError:
        return None


def run(usage: Usage, program: Program) -> Program:
    """Runs a program to its end."""
    torch.manual_seed(SEED)
    try:
        usage(program)
    finally:
        program.finish()
    return program


def differing(plain: Program, other: Program) -> list[int]:
    """Returns which of the values that two runs saw are not the same."""
    assert len(plain.seen) == len(other.seen)
    return [i for i, (a, b) in enumerate(zip(plain.seen, other.seen, strict=True)) if not are_same_bits(a, b)]


def excess_bytes(name: str, device: torch.device, backend: Callable[[], Backend], folder: Path, budget: str) -> int:
    """Returns the most that a planned step of a program took beyond its plan's budget, after the first of them."""
    steps = run(STRANGERS[name].usage, Program(device, folder, budget, backend)).steps
    taken = [step.peak_bytes - step.limit_bytes for step in steps if step.limit_bytes is not None]
    return max(taken[1:])


def check(name: str, device: torch.device, backend: Callable[[], Backend], folder: Path) -> None:
    """Asserts that a program sees the same plain, plain again and wrapped, and that its last steps are planned, in budget."""
    known = STRANGERS[name]
    plain = run(known.usage, Program(device, folder))
    assert differing(plain, run(known.usage, Program(device, folder))) == [], "two plain runs differ"
    moved_bytes = 0
    for budget in ("50%", "min"):
        wrapped = run(known.usage, Program(device, folder, budget, backend))
        wrong = differing(plain, wrapped)
        assert wrong == [], f"at {budget}, of {len(plain.seen)} values these differ"
        last = wrapped.steps[len(wrapped.steps) - known.planned :]
        assert [(step.phase, step.fallbacks) for step in last] == [("planned", 0)] * known.planned, (
            f"at {budget}: {wrapped.steps}"
        )
        moved_bytes += sum(step.moved_bytes for step in last)
        for step in last:
            if known.is_counted and step.limit_bytes is not None:
                beside_bytes = known.on_host_bytes if device.type == "cpu" else ON_DEVICE_BYTES
                assert step.peak_bytes <= step.limit_bytes + beside_bytes, f"at {budget}: {step}"
    assert moved_bytes > 0 or not known.planned
