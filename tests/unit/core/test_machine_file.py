"""What `tieroff.wrap` takes from a machine file: the engine, what each folder gets to hold, and what checksums cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tieroff.core.machine import Machine, save_machine
from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.make_plan import make_plan
from tieroff.storage.space import SpaceStore

GB = 10**9


def wrapped(tmp_path: Path, machine: Machine, dirs: list[Path], **nvme: Any) -> nn.Module:
    for path in dirs:
        path.mkdir(exist_ok=True)
    save_machine(machine, tmp_path / "machine.toml")
    model = nn.Linear(64, 64)
    config = {
        "budget": {"device": "1GiB", "host": 0, "nvme": "64MiB"},
        "nvme": {"dirs": [str(path) for path in dirs], "staging": "1MiB", **nvme},
        "plan": {"machine": str(tmp_path / "machine.toml"), "min_bytes": 0, "policy": "floor", "background": False},
    }
    return tieroff.wrap(model, torch.optim.SGD(model.parameters(), 0.1), config)


def machine(**dirs: dict[str, Any]) -> Machine:
    return Machine(
        device_bytes=GB,
        host_bytes=GB,
        nvme_bytes=GB,
        d2h_bytes_per_s=GB,
        h2d_bytes_per_s=GB,
        nvme_write_bytes_per_s=GB,
        nvme_read_bytes_per_s=2 * GB,
        checksum_bytes_per_s=4 * GB,
        dirs=dirs,
    )


@pytest.mark.parametrize("name", ["threads", "aiofiles"])
def test_auto_takes_the_engine_that_was_fastest(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a"
    model = wrapped(tmp_path, machine(**{str(folder): {"engine": name}}), [folder])
    assert tieroff.engine(model).settings.chosen["io_engine"] == name
    tieroff.unwrap(model)


def test_an_engine_asked_for_is_taken_whatever_was_fastest(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    model = wrapped(tmp_path, machine(**{str(folder): {"engine": "threads"}}), [folder], engine="aiofiles")
    assert tieroff.engine(model).settings.chosen["io_engine"] == "aiofiles"
    tieroff.unwrap(model)


def test_folders_are_filled_in_proportion_to_their_speed(tmp_path: Path) -> None:
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    speeds = {str(fast): {"write_bytes_per_s": 3 * GB}, str(slow): {"write_bytes_per_s": GB}}
    model = wrapped(tmp_path, machine(**speeds), [fast, slow])
    store = tieroff.engine(model).stores[Tier.NVME]
    assert isinstance(store, SpaceStore)
    store.reserve(store.capacity_bytes)  # as a plan does
    blocks = [store.allocate(1 << 20) for _ in range(40)]
    used = [area.used_bytes for area in store.areas]
    assert used[0] / used[1] == pytest.approx(3, rel=0.15)  # whole blocks, and the model's own homes, are in between
    for block in blocks:
        store.free(block)
    tieroff.unwrap(model)


@pytest.mark.parametrize(("checksum", "write", "read"), [("off", GB, 2 * GB), ("always", 4 * GB // 5, 4 * GB // 3)])
def test_the_planner_knows_what_checksums_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checksum: str, write: int, read: int
) -> None:
    seen: list[Machine] = []

    def noting(trace: Any, machine: Machine, *others: Any) -> Plan:
        seen.append(machine)
        return make_plan(trace, machine, *others)

    monkeypatch.setattr("tieroff.planner.beside.work.make_plan", noting)
    model = wrapped(tmp_path, machine(), [tmp_path / "a"], checksum=checksum)
    optimizer = tieroff.engine(model).optimizer
    assert optimizer is not None
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (seen[0].nvme_write_bytes_per_s, seen[0].nvme_read_bytes_per_s) == (write, read)
    tieroff.unwrap(model)
