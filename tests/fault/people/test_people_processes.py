"""DDP and FSDP2 over two gloo processes with a wrapped model: the numbers of the plain run on every rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import held_port

pytestmark = pytest.mark.timeout(150)

PRELUDE = """
import gc, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
import tieroff
from tests.support.twins import Mlp, Setting, adam, assert_same, look, loss_of

torch.set_num_threads(1)
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
folder = folder / str(rank)
folder.mkdir(exist_ok=True)
dist.init_process_group("gloo")

def step(model, optimizer, index, width=8):
    torch.manual_seed(1000 + 10 * index + rank)
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss
"""

DDP = """
def run(how, setting, steps=7):
    torch.manual_seed(0)
    model = Mlp()
    kwargs = {"gradient_as_bucket_view": "view" in how}
    seen = []
    if how.startswith("after"):  # DDP first, the wrapper round it
        ddp = nn.parallel.DistributedDataParallel(model, **kwargs)
        optimizer = adam(ddp)
        wrapped = ddp
        if setting is not None:
            setting.wrap(ddp, optimizer)
    else:
        optimizer = adam(model)
        wrapped = model
        if setting is not None:
            setting.wrap(model, optimizer)
        ddp = nn.parallel.DistributedDataParallel(model, **kwargs)
    for index in range(steps):
        if index == 5:
            with ddp.no_sync():
                ddp(torch.ones(2, 8)).sum().backward()
        loss = step(ddp, optimizer, index)
        seen.append(look(model, optimizer, loss))
        if index == 3 and setting is not None:
            stats = tieroff.engine(wrapped).stats()
            assert stats.phase == "planned", stats
            assert stats.moved_bytes_by_class["parameter"] > 0, stats
            assert stats.moved_bytes_by_class["optimizer"] > 0, stats
    if setting is not None:
        tieroff.unwrap(wrapped)
    return seen

for how in sys.argv[2:]:
    plain = run(how, None)
    for setting in (Setting(folder, nvme=True), Setting(folder, delayed=True)):
        assert_same(plain, run(how, setting))
    weights = torch.cat([v.flatten() for k, v in plain[-1].items() if k.startswith("parameter")])
    gathered = [torch.empty_like(weights) for _ in range(2)]
    dist.all_gather(gathered, weights)
    assert torch.equal(*gathered)
    print("right:", how, flush=True)
"""

FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

def local(seen):
    return {k: v.to_local() if isinstance(v, DTensor) else v for k, v in seen.items()}

def values(model, optimizer, loss):
    seen = {"loss": loss.detach().clone()}
    for name, p in model.named_parameters():
        seen[name] = p.detach().to_local().clone()
        seen["gradient of " + name] = p.grad.to_local().clone()
        seen |= {f"{k} of {name}": v.to_local().clone() for k, v in optimizer.state[p].items() if isinstance(v, DTensor)}
    return seen

def run(setting, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), nn.Tanh(), Mlp())
    mesh = init_device_mesh("cpu", (2,))
    for child in (model[0], model[2], model):
        fully_shard(child, mesh=mesh)
    optimizer = adam(model)
    if setting is not None:
        setting.wrap(model, optimizer)
    seen = [values(model, optimizer, step(model, optimizer, index)) for index in range(steps)]
    if setting is not None:
        engine = tieroff.engine(model)
        stats = engine.stats()
        text = engine.explain()
        assert stats.phase == "planned", stats
        assert stats.moved_bytes_by_class["activation"] > 0, stats
        assert stats.moved_bytes_by_class["parameter"] > 0, stats
        assert stats.moved_bytes_by_class["gradient"] > 0, stats
        assert "nothing that could move" in text, text
        tieroff.unwrap(model)
    return seen

plain = run(None)
for setting in (Setting(folder, nvme=True), Setting(folder, delayed=True)):
    assert_same(plain, run(setting))
print("right: fsdp", flush=True)
"""

END = """
# torch's gloo thread may still hold the last collective's tensors, and would die in freeing them while Python ends.
gc.collect()
dist.destroy_process_group()
"""

HOWS = ("before", "before, view", "after", "after, view")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, project: Path) -> list[list[str]]:
    """What each of two ranks writes that train both ways, one after the other: a pair of processes takes long to begin."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + DDP + FSDP + END, str(folder), *HOWS]
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    said = []
    with held_port() as port:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                command,
                env={**environment, **meeting, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for rank, process in enumerate(ranks):
                out, errors = process.communicate(timeout=120)
                assert process.returncode == 0, f"rank {rank}: {errors[-3000:]}"
                said.append(out.splitlines())
        finally:
            for process in ranks:
                process.kill()
                process.communicate()
    assert list(folder.glob("*/nvme/*")) == []
    return said


def test_ddp_over_two_processes(said: list[list[str]]) -> None:
    """DDP before and after the wrapper, with gradients of its own and as views of its buckets."""
    for lines in said:
        assert lines[: len(HOWS)] == [f"right: {how}" for how in HOWS]


def test_a_model_sharded_by_fsdp2_underneath(said: list[list[str]]) -> None:
    for lines in said:
        assert lines[len(HOWS) :] == ["right: fsdp"]
