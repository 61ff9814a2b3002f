"""Scenes from the life of a model whose shards lie below.

Run in every rank, as `torchrun … -m tests.parity.shards.life DEVICE FOLDER SCENE…`. A scene returns what it found;
rank 0 prints that of all ranks as a JSON list.
"""

from __future__ import annotations

import copy
import errno
import functools
import gc
import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import tieroff
from tests.fault.storage.faulty import FaultyEngine
from tests.parity.shards.program import (
    CASES,
    Block,
    Transformer,
    adam,
    begin,
    blocks,
    config_of,
    device,
    local,
    look,
    one_dim,
    shard,
    tell,
    usual,
)
from tests.unit.checkpoint.checkpoint_memory_run import growth_of
from tieroff.checkpoint.distributed import LoadPlanner, SavePlanner, StreamingReader
from tieroff.core.tensor import Tier
from tieroff.errors import BudgetWarning, InfeasiblePlanError, StateError
from tieroff.runtime.movable import local_of
from tieroff.storage.engines import choose

Made = tuple[nn.Module, torch.optim.Optimizer]


def made(folder: Path, *, wraps: bool) -> Made:
    torch.manual_seed(0)
    model = shard(blocks(), one_dim())
    optimizer = adam(model.parameters())
    if wraps:
        tieroff.wrap(model, optimizer, config_of(CASES["nvme"], folder))
    return model, optimizer


def steps(pair: Made, first: int, count: int) -> None:
    for index in range(first, first + count):
        torch.manual_seed(100 * index + dist.get_rank())
        usual(*pair, index, 33)


def differ(plain: Made, wrapped: Made) -> list[str]:
    ours, theirs = dict(look(*wrapped)), dict(look(*plain))
    return [name for name in theirs if name not in ours or not torch.equal(ours[name], theirs[name])]


def too_late(folder: Path) -> Any:
    pair = made(folder, wraps=False)
    steps(pair, 0, 1)
    try:
        tieroff.wrap(*pair, config_of(CASES["nvme"], folder))
    except StateError as error:
        said = str(error)
    config = config_of(CASES["nvme"], folder)
    config["plan"]["cover"] = ["optimizer"]
    tieroff.wrap(*pair, config)
    steps(pair, 1, 4)
    plain = made(folder, wraps=False)
    steps(plain, 0, 5)
    return {"error": said, "differ": differ(plain, pair), "moved": tieroff.engine(pair[0]).stats().moved_bytes_by_class}


def wrapped_again(folder: Path) -> Any:
    """Unwrapped before the first forward, and again between steps."""
    pair = made(folder, wraps=True)
    tieroff.unwrap(pair[0])
    for index in range(2):
        tieroff.wrap(*pair, config_of(CASES["nvme"], folder))
        steps(pair, 4 * index, 4)
        moved = tieroff.engine(pair[0]).stats().moved_bytes_by_class
        tieroff.unwrap(pair[0])
    plain = made(folder, wraps=False)
    steps(plain, 0, 8)
    return {"differ": differ(plain, pair), "moved": moved}


def loaded(folder: Path) -> Any:
    """`load_state_dict` gives shards of odd sizes other tensors: they are taken over."""
    pairs = made(folder, wraps=False), made(folder, wraps=True)
    for pair in pairs:
        steps(pair, 0, 4)
        kept = copy.deepcopy(pair[0].state_dict()), copy.deepcopy(pair[1].state_dict())
        steps(pair, 4, 2)
        pair[0].load_state_dict(kept[0])
        pair[1].load_state_dict(kept[1])
        steps(pair, 6, 4)
    stats = tieroff.engine(pairs[1][0]).stats()
    return {"differ": differ(*pairs), "moved": stats.moved_bytes_by_class, "phase": stats.phase}


def broken_off(folder: Path) -> Any:
    """A loss that raises between forward and backward, in every rank."""
    pairs = made(folder, wraps=False), made(folder, wraps=True)
    for model, optimizer in pairs:
        steps((model, optimizer), 0, 4)
        for _ in range(2):
            model(torch.ones(12, 5, 33, device=device()))
        steps((model, optimizer), 4, 4)
    stats = tieroff.engine(pairs[1][0]).stats()
    return {"differ": differ(*pairs), "moved": stats.moved_bytes_by_class, "phase": stats.phase}


def copied(folder: Path) -> Any:
    """Copies of shards are plain tensors; used as a module's own, they are refused."""
    model, _ = pair = made(folder, wraps=True)
    steps(pair, 0, 4)
    before = dict(look(*pair))
    copies = {name: copy.deepcopy(parameter) for name, parameter in model.named_parameters()}
    different = [name for name, value in copies.items() if not torch.equal(local(value), before[name])]
    block = next(model.children())
    assert isinstance(block, Block)
    own, other = block.up.weight, copies["0.up.weight"]
    assert isinstance(own, DTensor)
    assert isinstance(other, DTensor)
    steps(pair, 4, 1)
    extension: Any = local_of(other)
    try:
        extension.fsdp_pre_all_gather(None, other.shape, other.stride(), block.up, None)
    except StateError as error:
        said = str(error)
    return {"differ": different, "follows": torch.equal(local(other), local(own)), "error": said}


def used(folder: Path) -> Any:
    """User code uses shards, gradients and state between steps, as `DTensor`s and as what this rank has of them."""
    seen = []
    for wraps in (False, True):
        model, optimizer = pair = made(folder, wraps=wraps)
        steps(pair, 0, 5)
        found: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            found |= {f"norm of {name}": parameter.norm(), f"sum of {name}": (parameter + parameter.grad).sum()}
            found |= {f"whole {name}": parameter.detach(), f"local {name}": parameter.to_local()}
            found |= {f"{key} of {name}": value for key, value in optimizer.state[parameter].items()}
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)
        saved = {**model.state_dict(), **{f"state {key}": value for key, value in enumerate(flat(optimizer))}}
        on = {str(value.device.type) for value in saved.values()}
        seen.append({key: whole_value(value) for key, value in found.items()} | {key: local(v) for key, v in saved.items()})
        del found, saved, parameter
        steps(pair, 5, 2)
        seen[-1] |= dict(look(*pair))
    moved = tieroff.engine(model).stats().moved_bytes_by_class
    return {"differ": [key for key in seen[0] if not torch.equal(seen[0][key], seen[1][key])], "moved": moved, "on": sorted(on)}


def flat(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]


def whole_value(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().to("cpu", copy=True)


def saved(folder: Path) -> Any:
    """Two ranks write a checkpoint of the wrapped model."""
    pair = made(folder, wraps=True)
    steps(pair, 0, 4)
    model, optimizer = get_state_dict(*pair)
    dcp.save(
        {"model": model, "optimizer": optimizer},
        checkpoint_id=str(folder.parent / "checkpoint"),
        process_group=dist.new_group(backend="gloo"),
        planner=SavePlanner(pair[0]),
    )
    return whole(pair)


def resumed(folder: Path) -> Any:
    """Any number of ranks loads it into a wrapped model, by torch's own reader and by that of this library."""
    pair = made(folder, wraps=True)
    place, group = str(folder.parent / "checkpoint"), dist.new_group(backend="gloo")
    own: dict[str, Any] = {"storage_reader": StreamingReader(place), "planner": LoadPlanner(pair[0])}
    by: dict[str, dict[str, Any]] = {"torch": {"checkpoint_id": place}, "tieroff": own}
    seen = {}
    for name, options in by.items():
        with torch.no_grad():
            for parameter in pair[0].parameters():
                parameter.zero_()
        model, optimizer = get_state_dict(*pair)
        dcp.load({"model": model, "optimizer": optimizer}, process_group=group, **options)
        set_state_dict(*pair, model_state_dict=model, optim_state_dict=optimizer)
        del model, optimizer
        seen[name] = whole(pair)
    del own, by, options  # what somebody holds does not move; a planner does
    found = seen["tieroff"]
    assert found == seen["torch"]
    steps(pair, 4, 4)
    return found | {"moves": tieroff.engine(pair[0]).stats().moved_bytes_by_class["parameter"]}


def whole(pair: Made) -> dict[str, list[str]]:
    """Returns every bit of parameters and optimizer state."""
    model, optimizer = pair
    found = {}
    for name, parameter in model.named_parameters():
        state = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}
        for key, value in {"value": parameter, **state}.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{key} of {name}"] = [number.hex() for number in full.detach().double().flatten().tolist()]
    return found


def raising(folder: Path) -> Any:
    pair = made(folder, wraps=True)
    steps(pair, 0, 3)
    if dist.get_rank() == 1:
        raise RuntimeError("rank 1 cannot go on")
    steps(pair, 3, 3)


def killed(folder: Path) -> Any:
    pair = made(folder, wraps=True)
    steps(pair, 0, 3)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    steps(pair, 3, 3)


def too_small(folder: Path) -> Any:
    """A budget that one gathered group alone exceeds, strict and not: what people are told."""
    said = []
    for is_strict in (True, False):
        torch.manual_seed(0)
        model = shard(Transformer(), one_dim())
        optimizer = adam(model.parameters())
        config = config_of(CASES["transformer"], folder)
        config["budget"] |= {"device": "100KiB", "strict": is_strict}
        tieroff.wrap(model, optimizer, config)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", BudgetWarning)
            try:
                for index in range(4):
                    usual(model, optimizer, index, 2)
            except InfeasiblePlanError as error:
                said.append(str(error))
        said += [str(one.message) for one in told if one.category is BudgetWarning]
    return said


def stop_returning(model: nn.Module, goes_on: bool) -> None:
    """Has all pages of shards returned, and none from then on unless the thread goes on."""
    store: Any = tieroff.engine(model).stores[Tier.NVME]
    if not goes_on:
        store.return_pages(0.001)
    returner = store.page_returner
    assert returner.wait_rounds(returner.round_count + 2, 30)
    if not goes_on:
        store.return_pages(None)


def streamed(folder: Path) -> Any:
    """Returns by how much the resident set grows as 24 shards of 8 MiB, on a drive, are saved and loaded.

    By torch's own classes, and by those of this library while no thread returns pages.
    """
    torch.manual_seed(0)
    model = shard(nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(8)]), one_dim())
    optimizer = adam(model.parameters())
    config = config_of(CASES["nvme"], folder)
    config["budget"]["nvme"] = "1GiB"
    tieroff.wrap(model, optimizer, config)
    for _ in range(4):
        model(torch.randn(8, 2048)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    place = str(folder.parent / "checkpoint")
    dcp.save({"small": torch.zeros(1)}, checkpoint_id=place)  # what the first one imports and makes
    grown: dict[str, Any] = {}
    calls: dict[str, Callable[..., Any]] = {
        "save by torch": dcp.save,
        "load by torch": dcp.load,
        "save": functools.partial(dcp.save, planner=SavePlanner(model)),
        "load": functools.partial(dcp.load, planner=LoadPlanner(model), storage_reader=StreamingReader(place)),
    }
    before = dict(look(model, optimizer))
    for name, call in calls.items():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        if name.startswith("load"):
            for parameter in model.parameters():
                local_of(parameter).detach().zero_()
        stop_returning(model, goes_on="torch" in name)
        gc.collect()
        grown[name] = growth_of(functools.partial(call, state, checkpoint_id=place))
        del state
    after = dict(look(model, optimizer))
    grown["differ"] = [name for name, value in before.items() if not torch.equal(after[name], value)]
    grown["all"] = sum(local(v).nbytes for v in (*model.parameters(), *flat(optimizer)))
    return grown


def drive_failing(folder: Path) -> Any:
    """Rank 1's drive takes no more writes in a planned step; each rank tells in a file what it has then, and raises."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the agent, while this rank still looks at what it has
    plain = made(folder, wraps=False)
    steps(plain, 0, 4)
    before = dict(look(*plain))
    steps(plain, 4, 1)
    after = dict(look(*plain))
    engines: list[FaultyEngine] = []

    def choose_faulty(name: str, **measured: Any) -> FaultyEngine:
        engines.append(FaultyEngine(choose(name, **measured)))
        return engines[-1]

    with mock.patch("tieroff.session.build.choose", choose_faulty):
        pair = made(folder, wraps=True)
    steps(pair, 0, 4)
    shards = dict(pair[0].named_parameters())  # some modules have whole parameters where a step breaks off
    if dist.get_rank() == 1:
        engines[0].inject("write", "errno", errno=errno.EIO, count=0)
    try:
        steps(pair, 4, 1)
    except Exception as error:
        values = {name: local(shard) for name, shard in shards.items()}
        values |= {f"{k} of {n}": local(v) for n, shard in shards.items() for k, v in pair[1].state[shard].items()}
        torn = [n for n, value in values.items() if not torch.equal(value, before[n]) and not torch.equal(value, after[n])]
        found = {"kind": type(error).__name__, "says": str(error), "torn": torn, "values": len(values)}
        (folder / "found.json").write_text(json.dumps(found))
        raise


SCENES: dict[str, Callable[[Path], Any]] = {
    scene.__name__: scene
    for scene in (
        too_late,
        wrapped_again,
        loaded,
        broken_off,
        copied,
        used,
        too_small,
        saved,
        resumed,
        raising,
        killed,
        streamed,
        drive_failing,
    )
}


def main() -> None:
    """Runs `DEVICE FOLDER SCENE…` of the command line."""
    own, names = begin()
    for name in names:
        tell(SCENES[name](own))
    gc.collect()  # torch's gloo thread may still hold the last collective's tensors, and would die in freeing them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
