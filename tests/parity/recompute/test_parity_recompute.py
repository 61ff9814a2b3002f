"""Modules that a plan names are recomputed in backward, with the same random numbers and types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import WIDTH, Block, sequences, under_autocast
from tests.support.parity import BACKENDS, HOST, NVME, Tiers, Workload, check_parity
from tests.support.twins import recompute_in_every_plan
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.runtime.engine import Engine

RECOMPUTED = ("blocks.0", "blocks.2")


class Blocks(nn.Module):
    """Blocks with dropout, as the first and the last thing in each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Dropout(0.1), Block(), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


BLOCKS = Workload("blocks", Blocks, sequences, steps=8)


@pytest.fixture
def _recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every plan name modules to recompute."""
    recompute_in_every_plan(monkeypatch, RECOMPUTED)


@pytest.mark.usefixtures("_recomputing")
@pytest.mark.parametrize("is_autocast", [False, True], ids=["float", "autocast"])
@pytest.mark.parametrize(("backend", "tiers"), [("cpu", NVME), ("delayed", HOST)], ids=["cpu-nvme", "delayed-host"])
def test_recomputed_modules_compute_the_same(backend: str, tiers: Tiers, is_autocast: bool, tmp_path: Path) -> None:
    workload = replace(BLOCKS, objective=under_autocast) if is_autocast else BLOCKS
    engine = check_parity(workload, tiers, BACKENDS[backend], tmp_path)
    assert engine.plan.recompute == RECOMPUTED
    assert engine.stats().recompute_s > 0


class Adding(Blocks):
    """Adds in place to what its blocks took, which they do not save."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), Block()) for _ in range(3))
        self.by_name = by_name

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.5
        for block in self.blocks:
            x += block(input=x) if self.by_name else block(x)
        return self.head(x)


@pytest.mark.usefixtures("_recomputing")
@pytest.mark.parametrize(
    ("by_name", "error", "words"),
    [(False, RuntimeError, "modified by an inplace operation"), (True, StateError, "runs again in backward")],
)
def test_an_input_written_since_is_an_error(by_name: bool, error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        check_parity(replace(BLOCKS, build=lambda: Adding(by_name=by_name)), HOST, BACKENDS["cpu"], tmp_path)


def test_recompute_keeps_fewer_activations(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kept = check_parity(BLOCKS, HOST, BACKENDS["cpu"], tmp_path)
    request.getfixturevalue("_recomputing")
    recomputed = check_parity(BLOCKS, HOST, BACKENDS["cpu"], tmp_path)
    before, after = (_moved_for_backward(engine) for engine in (kept, recomputed))
    assert after < 0.7 * before
    assert _live_activations(recomputed.trace) < 0.7 * _live_activations(kept.trace)


def _moved_for_backward(engine: Engine) -> int:
    """Returns the bytes of activations that the plan copies out and that forward saved: second runs save theirs in backward."""
    trace, plan = engine.trace, engine.plan
    saved = [(trace.tensors[t.tensor], trace.lifetimes[t.tensor]) for t in plan.transfers if t.source is Tier.DEVICE]
    in_forward = [tensor for tensor, life in saved if trace.ops[life.birth].phase == "forward"]
    return sum(tensor.size_bytes for tensor in in_forward if tensor.kind is TensorClass.ACTIVATION)


def _live_activations(trace: Trace) -> int:
    """Returns the largest sum of activations alive at an op."""
    change = torch.zeros(len(trace.ops) + 1, dtype=torch.int64)
    for tensor, life in zip(trace.tensors, trace.lifetimes, strict=True):
        if tensor.kind.value == "activation":
            change[life.birth] += tensor.size_bytes
            change[life.death] -= tensor.size_bytes
    return int(change.cumsum(0).max())
