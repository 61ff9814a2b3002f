"""In a real cgroup that leaves less memory than was asked for: refused or lowered, by name, and the kernel ends nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.twins import MACHINE

MIB = 2**20
LEFT_BYTES = 200 * MIB  # of it planner and optimizer take 100; the step of the script takes 128 for tensors that persist

SCRIPT = """
import logging, sys
import torch, tieroff
from torch import nn
limit_file, usage_file, left, folder, machine, *budget = sys.argv[1:]
if limit_file:
    with open(usage_file) as usage, open(limit_file, "w") as limit:
        limit.write(str(int(usage.read()) + int(left)))
logging.basicConfig(stream=sys.stderr)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
if budget:
    asked = dict(pair.split("=") for pair in budget)
    budgets = {"host": 0, "nvme": "1GiB", **asked}
    plan = {"background": False, **({"machine": machine} if machine else {})}
    tieroff.wrap(model, optimizer, {"device": "cpu", "budget": budgets, "nvme": {"dirs": [folder]}, "plan": plan})
for step in range(5):
    torch.manual_seed(step)
    loss = model(torch.randn(16, 1024)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
print(sum(p.double().sum().item() for p in model.parameters()).hex())
if budget:
    print("phase:", tieroff.engine(model).stats().phase, file=sys.stderr)
"""


class Group:
    """A cgroup of this test's own, of either version."""

    def __init__(self, folder: Path) -> None:
        is_first_version = (folder / "memory.limit_in_bytes").exists()
        self.folder = folder
        self.limit = folder / ("memory.limit_in_bytes" if is_first_version else "memory.max")
        self.usage = folder / ("memory.usage_in_bytes" if is_first_version else "memory.current")
        if not self.limit.exists():
            raise OSError(f"{folder} has no limit of memory")
        self.limit.write_text(self.limit.read_text())

    def enter(self) -> None:
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def remove(self) -> None:
        """Once its last process has gone, which takes the kernel a moment."""
        for _ in range(100):
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.1)
        self.folder.rmdir()


@pytest.fixture
def group() -> Iterator[Group]:
    refusals = []
    for top in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        folder = Path(top) / f"tieroff-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError as error:
            refusals.append(str(error))
            continue
        try:
            made = Group(folder)
        except OSError as error:
            folder.rmdir()
            refusals.append(str(error))
            continue
        yield made
        made.remove()
        return
    pytest.skip(f"no cgroup can be made here: {'; '.join(refusals)}")


def train(
    project: Path, folder: Path, group: Group | None, *budget: str, measures: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs the script; `measures` the links, which takes memory of the group and gigabytes of traffic, or has them given."""
    machine = folder / "machine.toml"
    machine.write_text(MACHINE)
    given = "" if measures else str(machine)
    files = [str(group.limit), str(group.usage)] if group is not None else ["", ""]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, *files, str(LEFT_BYTES), str(folder), given, *budget],
        env={**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"},
        preexec_fn=group.enter if group is not None else None,
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.fixture(scope="module")
def plain(project: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints without a group and without a budget."""
    return train(project, tmp_path_factory.mktemp("plain"), None).stdout


@pytest.mark.parametrize("asked", ["device=1GiB", "device=100%", "host=0"], ids=["bytes", "share", "none"])
def test_a_step_that_a_cgroup_has_no_room_for_runs_by_a_smaller_plan(
    asked: str, tmp_path: Path, project: Path, group: Group, plain: str
) -> None:
    wrapped = train(project, tmp_path, group, asked, measures=asked == "host=0")
    assert wrapped.returncode == 0, wrapped.stderr
    assert wrapped.stdout == plain
    assert plain.count("0x1.") == 6
    assert "phase: planned" in wrapped.stderr
    said = f"the cgroup {group.folder} leaves no more"
    assert (said in wrapped.stderr) is asked.startswith("device"), wrapped.stderr


def test_a_host_budget_that_a_cgroup_has_no_room_for_is_refused(tmp_path: Path, project: Path, group: Group) -> None:
    done = train(project, tmp_path, group, "host=2GiB")
    assert done.returncode == 1
    assert f"ConfigError: [budget] host: 2.00 GiB is too much, the cgroup {group.folder} leaves at most" in done.stderr
