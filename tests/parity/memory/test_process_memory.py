"""What of the process's memory counts as tensors of the model."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.parity import machine_file
from tieroff.config import Config
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.least import Least
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.process_memory import ProcessMemory
from tieroff.session.budgets import Budgets
from tieroff.session.ranks import Ranks

ELEMENTS = 8 << 20
SIZE_BYTES = ELEMENTS * 4
SMALL_BYTES = 100 << 10


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.alone
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_resident_takes_parameters_for_tensors_when_they_are_whole_or_shards(is_sharded: bool) -> None:
    value = torch.ones(ELEMENTS)
    if is_sharded:
        value = distribute_tensor(value, init_device_mesh("cpu", (1,)), [Shard(0)])
    model = nn.Module()
    model.weight = nn.Parameter(value)
    # No engine holds the parameter yet, so all of it is memory that nobody accounts for.
    overhead_bytes = ProcessMemory(model, CpuBackend()).overhead_bytes()
    assert overhead_bytes == pytest.approx(SIZE_BYTES, abs=SIZE_BYTES // 8)


@pytest.mark.alone
def test_resident_leaves_out_what_the_heap_has_kept_of_freed_memory() -> None:
    backend = CpuBackend()
    backend.return_freed()
    blocks = [torch.ones(SMALL_BYTES, dtype=torch.uint8) for _ in range(SIZE_BYTES // SMALL_BYTES)]
    last = torch.ones(SMALL_BYTES, dtype=torch.uint8)  # holds the end of the heap, which would be returned by itself
    del blocks
    resident = ProcessMemory(nn.Module(), backend)
    backend.return_freed()  # as after planning
    taken = torch.ones(SIZE_BYTES, dtype=torch.uint8)
    assert resident.overhead_bytes() == pytest.approx(SIZE_BYTES, abs=SIZE_BYTES // 8)
    assert taken.any()
    assert last.any()


class Heavy:
    """A process that takes 30 MiB beside tensors, of which it has none."""

    own_device_bytes = 0

    def overhead_bytes(self, *engines: Any) -> int:
        return 30 << 20


@pytest.mark.parametrize(("budget", "taken", "is_told"), [("40MiB", 20, True), ("80MiB", 30, False)])
def test_a_budget_pays_for_the_process_up_to_half_and_says_when_that_is_not_enough(
    budget: str, taken: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    budgets = Budgets(Config.load({"device": "cpu", "budget": {"device": budget}}), torch.device("cpu"), Ranks())
    heavy: Any = Heavy()
    budgets.watch(heavy, heavy)
    trace = Trace((Op("op", 1),), (Tensor("w", 64, TensorClass.PARAMETER, is_persistent=True),))
    with caplog.at_level(logging.WARNING, "tieroff"):
        for _ in range(2):
            got = budgets.of(trace, lambda: Least(1, 1))[Tier.DEVICE]
            assert got == int(budget.removesuffix("MiB")) - taken << 20
    said = [record.getMessage() for record in caplog.records]
    assert [("takes 30.00 MiB beside tensors" in one and "above the budget by 10.00 MiB" in one) for one in said] == [
        True
    ] * is_told


def test_program_without_an_optimizer_never_imports_dynamo(tmp_path: Path) -> None:
    """Some 80 MiB that the plain program does not have; see [Note: dynamo only where it is]."""
    program = f"""
import sys, torch, tieroff
from torch import nn
from tieroff.session import workshop
workshop.steps_wait = True  # for the plan, however busy the machine is
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
config = {{"budget": {{"device": "50%", "nvme": "16MiB"}}, "nvme": {{"dirs": [{str(tmp_path)!r}]}}}}
tieroff.wrap(model, config={{**config, "plan": {{"min_bytes": "1KiB", "machine": {str(machine_file(tmp_path))!r}}}}})
for _ in range(8):
    model.zero_grad()
    model(torch.randn(32, 64)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
print(tieroff.engine(model).stats().phase, "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "planned False\n"), done.stderr


def test_a_budget_in_bytes_pays_for_loading_the_library(tmp_path: Path) -> None:
    program = f"""
import torch
import torch._dynamo  # torch.optim loads it at its first use
from pathlib import Path
from torch import nn

def resident_kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))

def step(model, optimizer):
    model(torch.ones(256, model[0].in_features)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

small = nn.Sequential(nn.Linear(64, 64))
step(small, torch.optim.AdamW(small.parameters()))  # what torch itself takes for a step is there
before = resident_kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
import tieroff
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
config = {{"device": "cpu", "budget": {{"device": "96MiB", "nvme": "1GiB"}}, "nvme": {{"dirs": [{str(tmp_path)!r}]}}}}
tieroff.wrap(model, optimizer, {{**config, "plan": {{"machine": {str(machine_file(tmp_path))!r}}}}})
from tieroff.session import workshop
workshop.steps_wait = True  # for the plan, however busy the machine is
for _ in range(5):
    step(model, optimizer)
stats = tieroff.engine(model).stats()
print(stats.phase, stats.moved_bytes["nvme_write"] > 0, resident_kib("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    phase, has_moved, grown_kib = done.stdout.split()
    assert (phase, has_moved) == ("planned", "True")
    assert int(grown_kib) <= 1.08 * 96 * 1024
