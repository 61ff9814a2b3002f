"""What runs beside a step: a loss that torch.compile made, and profilers of memory. Numbers and plans stay as they are."""

from __future__ import annotations

import contextlib
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tieroff

Loss = Callable[[Tensor, Tensor], Tensor]
STEPS = 7


@contextlib.contextmanager
def allocations() -> Iterator[None]:
    tracemalloc.start(5)
    try:
        yield
    finally:
        tracemalloc.stop()


def profiled() -> AbstractContextManager[Any]:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    )


@contextlib.contextmanager
def memrayed() -> Iterator[None]:
    """memray takes the place of functions of memory in all libraries, also where the page pool has taken it."""
    memray = pytest.importorskip("memray")
    with tempfile.TemporaryDirectory() as folder, memray.Tracker(f"{folder}/calls"):
        yield


def loss_of(out: Tensor, wanted: Tensor) -> Tensor:
    return (torch.logsumexp(out, 1) - out.gather(1, wanted[:, None])[:, 0]).mean()


def train(folder: Path | None, loss: Loss, beside: Callable[[], AbstractContextManager[Any]]) -> tuple[list[Tensor], str]:
    """Returns losses and final parameters, and what the last step was; in a folder the model is wrapped."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)], nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if folder is not None:
        config: dict[str, Any] = {
            "device": "cpu",
            "budget": {"device": "50%", "host": "1MiB", "nvme": "64MiB"},
            "nvme": {"dirs": [str(folder)]},
            "plan": {"min_bytes": "1KiB"},
        }
        tieroff.wrap(model, optimizer, config)
    found = []
    with beside():
        for _ in range(STEPS):
            value = loss(model(torch.randn(32, 64)), torch.randint(10, (32,)))
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(value.detach())
    phase = tieroff.engine(model).stats().phase if folder is not None else ""
    found += [parameter.detach().clone() for parameter in model.parameters()]
    if folder is not None:
        tieroff.unwrap(model)
    return found, phase


def assert_alike(folder: Path, loss: Loss, beside: Callable[[], AbstractContextManager[Any]]) -> None:
    plain, _ = train(None, loss, beside)
    wrapped, phase = train(folder, loss, beside)
    assert [i for i, pair in enumerate(zip(plain, wrapped, strict=True)) if not torch.equal(*pair)] == []
    assert phase == "planned"


@pytest.mark.filterwarnings("ignore")  # of torch's own code, when it compiles
@pytest.mark.parametrize("loss", [loss_of, nn.CrossEntropyLoss()], ids=["function", "module"])
def test_a_compiled_loss_is_part_of_the_step(loss: Loss, tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(loss, backend="aot_eager")
    assert_alike(tmp_path, compiled, nullcontext)


@pytest.mark.parametrize("beside", [allocations, profiled, memrayed], ids=["tracemalloc", "torch.profiler", "memray"])
def test_a_profiler_of_memory_changes_nothing(beside: Callable[[], AbstractContextManager[Any]], tmp_path: Path) -> None:
    assert_alike(tmp_path, loss_of, beside)
