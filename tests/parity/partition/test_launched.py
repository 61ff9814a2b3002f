"""`tieroff launch` with a partition in its config: the model is split over two ranks, and what is left is moved off them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tieroff
from tests.support import sharded
from tests.support.twins import MACHINE
from tieroff.cli import app
from tieroff.core.sharding.placements import PlacementPlan, save_placements
from tieroff.errors import ConfigError, InfeasiblePlanError, StateError
from tieroff.study.sharding.capture import capture_step
from tieroff.study.sharding.partition_model import placements_of
from tieroff.study.sharding.tofu import partition_step

pytestmark = pytest.mark.timeout(300)

SCRIPT = """
import gc, json, sys
import torch
import torch.distributed as dist
import tieroff
from tests.support import sharded
from tieroff.config import Config
from tieroff.core.sharding.placements import load_placements
from tieroff.runtime.backend.cpu import settle_vector_math

torch.set_num_threads(1)
settle_vector_math()

def made():
    torch.manual_seed(1)
    model, (batch,) = sharded.wide_mlp()
    return model, batch, torch.optim.AdamW(model.parameters(), 1e-3)

def values(model, optimizer):
    states = {f"{k} {n}": v for n, p in model.named_parameters() for k, v in optimizer.state[p].items()}
    found = {**dict(model.named_parameters()), **states}
    return {k: (v.to_local() if hasattr(v, "to_local") else v).detach().clone() for k, v in found.items()}

wrapped, batch, optimizer = made()
tieroff.wrap(wrapped, optimizer)  # it makes the process group
losses = sharded.train(wrapped, batch, optimizer, 7)
engine = tieroff.engine(wrapped)
stats = engine.stats()
found = {"losses": losses, "phase": stats.phase, "moved": stats.moved_bytes_by_class, "said": engine.explain(),
         "budget": {tier.value: size for tier, size in engine.plan.budget_bytes.items()}}
tieroff.unwrap(wrapped)

plain, batch, other = made()
mesh = dist.init_device_mesh("cpu", (2,))
tieroff.parallelize(plain, mesh, load_placements(Config.load().parallel.plan), other)
found["plain"] = sharded.train(plain, batch, other, 7)
ours, theirs = values(wrapped, optimizer), values(plain, other)
found["differ"] = sorted(k for k in {*ours, *theirs} if not torch.equal(ours[k], theirs[k]))
found["held"] = sum(p.to_local().numel() for p in wrapped.parameters()) / sum(p.numel() for p in wrapped.parameters())
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, found)
if dist.get_rank() == 0:
    print(json.dumps(everyone), flush=True)
gc.collect()  # torch's gloo thread may still hold the last collective's tensors, and would die in freeing them
dist.destroy_process_group()
"""
SHARE = "80%"


def write_plan(folder: Path, devices: int = 2) -> Path:
    """Writes the partition of the script's model."""
    path = folder / "plan.json"
    save_placements(placements_of(partition_step(capture_step(sharded.wide_mlp, sharded.MACHINE), devices)), path)
    return path


def config(folder: Path, share: str, *, strict: bool = False) -> dict[str, Any]:
    (folder / "machine.toml").write_text(MACHINE)
    return {
        "device": "cpu",
        "budget": {"device": share, "host": "256MiB", "strict": strict},
        "plan": {"min_bytes": 0, "machine": str(folder / "machine.toml")},
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, project: Path) -> list[dict[str, Any]]:
    """What both ranks of one launch told."""
    folder = tmp_path_factory.mktemp("launched")
    plan = write_plan(folder)
    (folder / "script.py").write_text(SCRIPT)
    text = tieroff.Config.load({**config(folder, SHARE), "parallel": {"plan": str(plan)}}).to_toml()
    (folder / "config.toml").write_text(text)
    # Without --nproc-per-node: the plan says how many.
    options = ["-m", "tieroff", "launch", "--config", "config.toml", "--log-dir", str(folder), "script.py"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: list[dict[str, Any]] = json.loads(done.stdout)
    return told


def alone(folder: Path, share: str, *, strict: bool = False) -> list[float]:
    """Runs the script's loop on one device."""
    torch.manual_seed(1)
    model, (batch,) = sharded.wide_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    tieroff.wrap(model, optimizer, config(folder, share, strict=strict))
    try:
        return sharded.train(model, batch, optimizer, 7)
    finally:
        tieroff.unwrap(model)


def test_what_is_left_of_a_partition_is_moved_bit_for_bit(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    assert len(ranks) == 2
    losses = alone(tmp_path, "100%")
    for found in ranks:
        assert found["phase"] == "planned"
        assert found["moved"]["optimizer"] > 0
        assert found["moved"].get("parameter", 0) == 0
        assert "(a DTensor that FSDP2 does not gather)" in found["said"]
        assert found["differ"] == []
        assert found["losses"] == found["plain"]
        assert found["losses"] == pytest.approx(losses, rel=1e-6)
        assert found["held"] == 0.5


def test_the_budget_that_two_ranks_keep_is_refused_on_one_device(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    budget = ranks[0]["budget"]["device"]
    with pytest.raises(InfeasiblePlanError) as caught:
        alone(tmp_path, "42%", strict=True)
    assert caught.value.available_bytes >= budget


def test_a_launch_with_another_number_of_ranks_is_refused_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f'device = "cpu"\n[parallel]\nplan = "{write_plan(tmp_path)}"\n')
    (tmp_path / "script.py").write_text("raise SystemExit(7)")
    arguments = ["launch", "--config", str(tmp_path / "config.toml"), "--nproc-per-node", "3", "--json", "--log-dir"]
    done = CliRunner().invoke(app, [*arguments, str(tmp_path), str(tmp_path / "script.py")])
    assert done.exit_code == 1
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "ConfigError"
    assert "splits Sequential over 2 devices, but there are 3 ranks" in error["message"]


def test_wrap_refuses_a_partition_without_its_ranks(tmp_path: Path) -> None:
    model, _ = sharded.wide_mlp()
    with pytest.raises(ConfigError, match="over 2 devices, but there are 1 ranks: start 2"):
        tieroff.wrap(model, config={**config(tmp_path, "100%"), "parallel": {"plan": str(write_plan(tmp_path))}})
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model, (batch,) = sharded.wide_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).sum().backward()
    optimizer.step()
    mesh: Any = None
    with pytest.raises(StateError, match="expected AdamW before its first step"):
        tieroff.parallelize(model, mesh, PlacementPlan("", (2,), {}, (), {}), optimizer)
