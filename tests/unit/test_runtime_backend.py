"""What the CPU backend does to the process it lives in: memory kept for reuse, the C library's thresholds, vector math."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tieroff.core.tensor import Tier
from tieroff.runtime import backend as backends
from tieroff.runtime.backend import CpuBackend

MIB = 2**20


class WatchedBackend(CpuBackend):
    """Notes what it is asked to keep, and what it holds beside that."""

    def __init__(self) -> None:
        super().__init__()
        self.thresholds: list[int | None] = []
        self.engine: Any = None
        self.sums: list[int] = []

    def tune_allocator(self, mmap_threshold_bytes: int | None) -> None:
        self.thresholds.append(mmap_threshold_bytes)

    def trim(self, kept_bytes: int) -> None:
        super().trim(kept_bytes)
        if self.engine is not None:
            self.sums.append(self._pool.kept_bytes + self.engine.device_bytes)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_memory_kept_for_reuse_counts_against_the_plans_peak(tmp_path: Path) -> None:
    model, optimizer = make()
    backend = WatchedBackend()
    config = {
        "budget": {"device": "40%", "host": 0, "nvme": "64MiB"},
        "nvme": {"dirs": [str(tmp_path)], "staging": "1MiB"},
        "plan": {"min_bytes": "64KiB"},
    }
    tieroff.wrap(model, optimizer, config, backend=backend)
    engine = tieroff.engine(model)
    train(model, optimizer, 3)
    backend.engine = engine
    train(model, optimizer, 3)
    assert engine.stats().phase == "planned"
    peak = engine.plan.peak_bytes[Tier.DEVICE]
    assert max(backend.sums) > 0
    assert max(backend.sums) <= peak
    assert backend._pool.kept_bytes > 0, "expected freed memory to be there for the next fetch in mid-step"
    tieroff.unwrap(model)
    assert backend._pool.kept_bytes == 0


def test_the_allocator_is_left_alone_while_nothing_moves(tmp_path: Path) -> None:
    model, optimizer = make()
    backend = WatchedBackend()
    config = {"budget": {"device": "1GiB", "nvme": "64MiB"}, "nvme": {"dirs": [str(tmp_path)], "staging": "1MiB"}}
    tieroff.wrap(model, optimizer, config, backend=backend)
    train(model, optimizer, 1)
    assert backend.thresholds[-1] is not None
    train(model, optimizer, 3)
    assert tieroff.engine(model).stats().phase == "nothing moved"
    assert backend.thresholds[-1] is None
    tieroff.unwrap(model)


def test_every_vector_function_is_called_once_on_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[tuple[int, torch.dtype]]] = {}

    def watched(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(value: torch.Tensor) -> torch.Tensor:
            seen.setdefault(function.__name__, []).append((value.numel(), value.dtype))
            return function(value)

        return call

    monkeypatch.setattr(backends, "_VECTOR_MATH", tuple(map(watched, backends._VECTOR_MATH)))
    CpuBackend()
    assert {"sqrt", "exp", "log", "sin", "cos", "tanh", "erf"} <= seen.keys()
    assert all(calls == [(1, torch.float32), (1, torch.float64)] for calls in seen.values())


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_first_square_root_of_a_process_is_exact_every_time() -> None:
    program = (
        "import torch; from tieroff.runtime.backend import settle_vector_math; settle_vector_math();"
        "torch.manual_seed(0); x = torch.rand(1 << 20); a = x.sqrt(); b = x.sqrt(); assert torch.equal(a, b)"
    )
    for _ in range(12):  # without settling, one process in twenty differs on two idle cores
        subprocess.run([sys.executable, "-c", program], check=True)
