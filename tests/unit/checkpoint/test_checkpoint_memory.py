"""What loading and saving takes of memory, by measures that tieroff does not own: the resident set, and the page cache."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.parity import machine_file
from tieroff.storage.nvme.pages import MappedFiles

MODEL_BYTES_AT_LEAST = 600e6
GROWTH_BYTES_AT_MOST = 100e6
PAGE = 4096


def cached_share(paths: list[Path]) -> float:
    """Returns the share of the files' pages that lie in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    cached = pages = 0
    for path in paths:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            states = ctypes.create_string_buffer(-(-len(memory) // PAGE))
            first = ctypes.c_char.from_buffer(memory)
            assert libc.mincore(ctypes.addressof(first), len(memory), states) == 0
            del first
            cached += sum(state & 1 for state in states.raw)
            pages += len(states)
    return cached / pages


def resident_bytes_of(path: Path) -> int:
    """Returns how much of a file is mapped into this process and resident."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_inside = line.endswith(str(path))
        elif is_inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.timeout(300)
def test_a_model_larger_than_its_budget_is_loaded_and_saved_in_little_memory(tmp_path: Path, project: Path) -> None:
    """620 MB, of which the largest tensor has 17: from shards to a drive, and back to shards."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(project / "tests/unit/checkpoint/checkpoint_memory_run.py"), str(tmp_path)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model_bytes"] > MODEL_BYTES_AT_LEAST and found["is_right"]
    for work in ("load", "save", "load_again", "torch_save"):
        assert found[work] < GROWTH_BYTES_AT_MOST, f"{work}: {found}"
    shards = list((tmp_path / "source").glob("*.safetensors"))
    assert len(shards) == 5 and cached_share(shards) < 0.1
    shards = list((tmp_path / "target").glob("*.safetensors"))
    assert len(shards) == 2 and cached_share(shards) < 0.1


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def resume_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> None:
    optimizer.load_state_dict(found["optimizer"])


def assign_model(model: nn.Module, _optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> None:
    model.load_state_dict(found["model"], assign=True)


@pytest.mark.parametrize("resume", [resume_optimizer, assign_model])
def test_a_mapped_checkpoint_leaves_memory_once_its_tensors_have_their_tiers(
    resume: Callable[..., None], tmp_path: Path
) -> None:
    model, optimizer = build()
    step(model, optimizer)
    path = tmp_path / "all.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    model, optimizer = build()
    (tmp_path / "drive").mkdir()
    tieroff.wrap(
        model,
        optimizer,
        {
            "device": "cpu",
            "budget": {"device": "1GiB", "host": 0, "nvme": "256MiB"},
            "nvme": {"dirs": [str(tmp_path / "drive")]},
            "plan": {"policy": "floor", "machine": str(machine_file(tmp_path))},
        },
    )
    found = torch.load(path, weights_only=True, mmap=True)
    resume(model, optimizer, found)
    first = found["model"]["0.weight"]  # one tensor keeps the whole mapping
    del found
    tieroff.engine(model).settle()
    assert resident_bytes_of(path) < 2 << 20
    assert first.numel() == 1 << 20
    assert resident_bytes_of(path) < 2 << 20
    step(model, optimizer)
    tieroff.unwrap(model)


def test_pages_of_files_go_and_values_written_privately_stay(tmp_path: Path) -> None:
    path = tmp_path / "values"
    with path.open("wb") as file:
        file.write(bytes(64 * PAGE))
        os.fsync(file)  # what is not on the drive yet stays
    values = torch.from_file(str(path), shared=False, size=64 * PAGE, dtype=torch.uint8)
    values[5 * PAGE] = 7
    assert int(values.sum()) == 7
    before = resident_bytes_of(path)
    MappedFiles().page_out(values.data_ptr(), 64 * PAGE)
    assert resident_bytes_of(path) <= PAGE < before
    assert int(values[5 * PAGE]) == 7 and int(values.sum()) == 7


def test_memory_that_is_no_files_is_left_alone() -> None:
    values = torch.full((1 << 20,), 3.0)
    mapped = MappedFiles()
    assert not any(start <= values.data_ptr() < stop for start, stop in mapped.ranges)
    mapped.page_out(values.data_ptr(), values.numel() * 4)
    MappedFiles.none().page_out(values.data_ptr(), values.numel() * 4)
    assert bool((values == 3.0).all())
