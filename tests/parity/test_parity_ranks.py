"""Two ranks with DDP and with FSDP2: bit for bit the run without tieroff, while bytes move; and one budget for both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.twins import MACHINE

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import gc, json, sys, warnings
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
import tieroff
from tieroff.config import Config
from tests.support.delayed import DelayedBackend
from tieroff.runtime.backend.cpu import settle_vector_math

torch.set_num_threads(1)
settle_vector_math()
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
SHARDED = {
    "fsdp": {}, "fsdp, delayed": {}, "fsdp, auto": {}, "fsdp, shapes": {},
    "fsdp, kept": {"reshard_after_forward": False},
    "fsdp, bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "fsdp, offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}

class Block(nn.Module):
    def __init__(self, width):  # nothing here is divided evenly by two
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(33), nn.Linear(33, width), nn.Linear(width, 33)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()

def make(how):
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(65 + i) for i in range(3)])
    if how in SHARDED:
        for block in (*model, model):
            fully_shard(block, mesh=mesh, **SHARDED[how])
    return model

def optimizer_of(model, how):
    if "kept" in how:
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), 0.01, amsgrad="bf16" in how, foreach="offloaded" in how or None)

def run(how, config=None):
    model = make(how)
    optimizer = optimizer_of(model, how)
    if config is not None:
        tieroff.wrap(model, optimizer, config, backend=DelayedBackend(seed=3) if "delayed" in how else None)
    called = model if how in SHARDED else nn.parallel.DistributedDataParallel(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    seen = []
    for index in range(7):
        torch.manual_seed(100 * index + rank)
        optimizer.zero_grad()
        rows = 16 + 4 * (index % 2 == rank and "shapes" in how) + 3000 * (rank == 1 and "needs more" in how)
        loss = called(torch.randn(rows, 33)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        values = {"loss": local(loss)}
        for name, p in model.named_parameters():
            values |= {name: local(p), f"gradient of {name}": local(p.grad)}
            values |= {f"{key} of {name}": local(value) for key, value in optimizer.state[p].items()}
        seen.append(values)
    found = {"how": how}
    if config is not None:
        engine = tieroff.engine(model)
        stats = engine.stats()
        found |= {"phase": stats.phase, "moved": stats.moved_bytes_by_class, "explain": engine.explain(),
                  "budget": {tier.value: size for tier, size in engine.plan.budget_bytes.items()}}
        tieroff.unwrap(model)
    return seen, found

def tell(found):
    everyone = [None, None]
    dist.all_gather_object(everyone, found)
    if rank == 0:
        print(json.dumps(everyone), flush=True)

def twins(how, config):
    plain, _ = run(how)
    wrapped, found = run(how, config)
    found["differ"] = [
        f"step {step}: {name}" for step, (a, b) in enumerate(zip(plain, wrapped, strict=True))
        for name in {*a, *b} if name not in a or name not in b or not torch.equal(a[name], b[name])
    ]
    tell(found)

def changed(**tables):
    content = Config.load().model_dump(mode="json", exclude_none=True)
    return {key: value | tables.get(key, {}) if isinstance(value, dict) else value for key, value in content.items()}

for how in ("ddp", *SHARDED):
    twins(how, changed(plan={"policy": "auto"}, budget={"device": "90%"}) if "auto" in how else Config.load())

_, found = run("budgets differ", changed(budget={"device": ["2MiB", "1MiB"][rank]}))
tell(found)
for how, budgets in (("too little", ("1GiB", "40KiB")), ("one needs more", ("700KiB", "700KiB"))):
    try:
        run(how, changed(budget={"device": budgets[rank], "strict": True}))
    except tieroff.InfeasiblePlanError as error:
        tell({"how": how, "error": str(error)})
for how, budgets in (("raised", ("1GiB", "40KiB")), ("raised for one", ("700KiB", "700KiB"))):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, found = run(how.replace("raised for one", "one needs more"), changed(budget={"device": budgets[rank]}))
    told = [str(seen.message) for seen in caught if seen.category is tieroff.BudgetWarning]
    tell({**found, "how": how, "warnings": told})
gc.collect()  # torch's gloo thread may still hold the last collective's tensors, and would die in freeing them
dist.destroy_process_group()
"""

HOWS = ("ddp", "fsdp", "fsdp, delayed", "fsdp, auto", "fsdp, shapes", "fsdp, kept", "fsdp, bf16", "fsdp, offloaded")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, project: Path) -> dict[str, list[dict[str, Any]]]:
    """What both ranks of one launch told, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "nvme").mkdir()
    (folder / "machine.toml").write_text(MACHINE)
    (folder / "script.py").write_text(SCRIPT)
    (folder / "config.toml").write_text(
        'device = "cpu"\n[budget]\ndevice = "1GiB"\nhost = "8MiB"\nnvme = "64MiB"\n[nvme]\ndirs = ["nvme"]\n'
        'staging = "1MiB"\nchecksum = "always"\n[plan]\npolicy = "floor"\nmin_bytes = 0\nmachine = "machine.toml"\n'
    )
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tieroff",
            "launch",
            "--config",
            "config.toml",
            "--nproc-per-node",
            "2",
            "--log-dir",
            str(folder),
            "script.py",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert list((folder / "nvme").iterdir()) == []
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row[0]["how"]: row for row in rows}


@pytest.mark.parametrize("how", HOWS)
def test_ranks_have_the_numbers_of_the_plain_run_while_bytes_move(told: dict[str, list[dict[str, Any]]], how: str) -> None:
    for found in told[how]:
        assert found["differ"] == []
        if how != "fsdp, shapes":  # there every other step of a rank is of another kind
            assert found["phase"] == "planned", found
        moved = found["moved"]
        if how == "ddp":
            assert all(moved[kind] > 0 for kind in ("activation", "parameter", "optimizer")), moved
        else:
            assert moved["optimizer"] > 0, moved
            if how == "fsdp, offloaded":  # its shards stay where FSDP2 puts them
                assert (moved["parameter"], moved["gradient"]) == (0, 0)
            assert moved["activation"] > 0 or how == "fsdp, auto", moved


def test_all_ranks_plan_for_the_smallest_budget(told: dict[str, list[dict[str, Any]]]) -> None:
    budgets = [found["budget"] for found in told["budgets differ"]]
    # What a rank's process takes besides tensors comes off its own budget: it may have grown on rank 1 since the ranks agreed.
    assert budgets[1]["device"] <= budgets[0]["device"] <= 1 << 20
    assert {**budgets[0], "device": 0} == {**budgets[1], "device": 0}
    assert budgets[0]["nvme"] <= 32 << 20  # half of what the machine may use
    assert budgets[0]["host"] <= 4 << 20


def test_a_budget_that_is_too_small_on_one_rank_ends_all_and_is_named(told: dict[str, list[dict[str, Any]]]) -> None:
    errors = [found["error"] for found in told["too little"]]
    assert "with everything away that can be" in errors[1]
    assert errors[0] == f"{errors[1]}. All ranks plan with the least budget of any, which is that of rank 1"


def test_a_rank_that_needs_more_than_there_is_ends_the_others_too(told: dict[str, list[dict[str, Any]]]) -> None:
    errors = [found["error"] for found in told["one needs more"]]
    assert "expected every op of every rank to fit" in errors[0]
    assert "but rank 1 needs" in errors[0]
    assert "op " in errors[1]  # the rank itself says which


def test_ranks_agree_on_a_raised_budget_and_rank_0_warns(told: dict[str, list[dict[str, Any]]]) -> None:
    first, second = told["raised for one"]
    assert first["budget"]["device"] == second["budget"]["device"] > 700 << 10
    assert first["phase"] == second["phase"] == "planned"
    assert len(first["warnings"]) == 1
    assert "rank 1 needs" in first["warnings"][0]
    assert second["warnings"] == []


def test_a_budget_too_small_on_one_rank_is_raised_there_and_agreed_on(told: dict[str, list[dict[str, Any]]]) -> None:
    first, second = told["raised"]
    assert 40 << 10 < second["budget"]["device"] == first["budget"]["device"] < 1 << 30
