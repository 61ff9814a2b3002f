"""Two thousand steps: nothing grows, every count is the same after every step, and the numbers stay those of the plain run."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import tieroff
from tieroff.core.tensor import Tier

STEPS = 2000
_SETTLED = 200  # from here on nothing may change but with the plan, and caches are filled
_GROWTH_BYTES = 4 << 20  # pages that come and go; one leaked activation of each step would be 1800 x 256 KiB
_EVERY = 10


def _model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    torch.manual_seed(step)
    loss = (model(torch.randn(512, 128)) - 1).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class _Malloc(ctypes.Structure):
    """What glibc's `mallinfo2` returns, in bytes over all its arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    ]


def _memory(process: psutil.Process) -> dict[str, int]:
    """Returns where this process's memory is. Leaks grow all but `free`; `objects` grows by kept figures, too."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Malloc
    heap, objects = mallinfo2(), gc.get_objects()
    tensors = [each for each in objects if issubclass(type(each), torch.Tensor)]
    return {
        "resident": process.memory_info().rss,
        "in_use": heap.uordblks,
        "free": heap.fordblks,
        "mapped": heap.hblkhd,
        "tensors": len(tensors),
        "objects": len(objects),
    }


def soak(folder: str) -> list[dict[str, int]]:
    """Trains, comparing after every step; returns where the memory was at the settled steps, every tenth of them."""
    model, optimizer = _model()
    # One block: a loss kept of every plain step lies above that step's activations, and leaves the heap full of holes.
    expected = torch.empty(STEPS)
    for step in range(STEPS):
        expected[step] = _step(model, optimizer, step)
    values = [p.detach() for p in model.parameters()]

    model, optimizer = _model()
    config = {
        "budget": {"device": "60%", "host": "1MiB", "nvme": "64MiB"},
        "nvme": {"dirs": [folder], "staging": "256KiB"},
        "plan": {"min_bytes": 0, "background": False},
    }
    tieroff.wrap(model, optimizer, config)
    engine = tieroff.engine(model)
    process = psutil.Process()
    counts: dict[int, set[tuple[object, ...]]] = {}  # per plan: a machine whose speed changes has it made again
    memory: list[dict[str, int]] = []
    for step in range(STEPS):
        assert torch.equal(_step(model, optimizer, step), expected[step]), f"step {step}"
        if step < _SETTLED:
            continue
        stats = engine.stats()
        assert stats.phase == "planned", f"step {step}"
        held = engine.device_bytes, *(engine.stores[tier].used_bytes for tier in (Tier.HOST, Tier.NVME))
        handles = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        figures = (*held, *handles, *stats.moved_bytes.values(), stats.peak_device_bytes, stats.fallbacks)
        counts.setdefault(stats.plans, set()).add(figures)
        if step % _EVERY == 0:
            gc.collect()
            memory.append(_memory(process) | {"plans": stats.plans})
    for plan, seen in counts.items():
        assert len(seen) == 1, f"{len(seen)} different counts after a step of plan {plan}: {sorted(seen, key=str)[:3]}"
    assert sum(engine.stats().moved_bytes.values()) > 0
    tieroff.unwrap(model)
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    return memory


@pytest.mark.long
@pytest.mark.alone  # beside other tests the machine's speed changes, and with it the plan, whose making takes memory
@pytest.mark.timeout(1500)
def test_two_thousand_steps(tmp_path: Path, project: Path) -> None:
    # In a process of its own: what others here left behind can move its resident memory by more than a leak would.
    program = f"import json; from tests.fault.test_soak import soak; print(json.dumps(soak({str(tmp_path)!r})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=project)
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)
    part = len(memory) // 6
    first, last = (statistics.median(at["resident"] for at in some) for some in (memory[:part], memory[-part:]))
    shown = "\n".join(map(str, memory[:: len(memory) // 20]))
    assert last - first < _GROWTH_BYTES, f"resident memory grew from {first:.0f} to {last:.0f} bytes:\n{shown}"
