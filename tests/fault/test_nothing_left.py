"""Nothing is left behind: no file, no thread, no descriptor, no mapping, however a run ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import tieroff
from tests.support.twins import Setting, assert_same, follow, look, loss_of, mlp_and_adam
from tests.support.twins import usual_step as usual

pytestmark = pytest.mark.timeout(120)


class First(torch.nn.Module):
    """The first of several results."""

    def forward(self, results: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return results[0]


def threads() -> int:
    """Native threads included."""
    return len(os.listdir("/proc/self/task"))


def descriptors() -> set[str]:
    """What this process has open, by what it leads to."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def mapped_bytes(folder: Path) -> int:
    """Bytes of the folder's files that are mapped into this process."""
    lines = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return sum(int(line.split("-")[1], 16) - int(line.split("-")[0], 16) for line in lines)


def settled(count: Any, expected: int) -> int:
    """Returns the count once it is down to what is expected, or after a while: threads end a moment after join."""
    for _ in range(200):
        if (now := count()) <= expected:
            return now
        time.sleep(0.01)
    return now


def warmed_up() -> None:
    """Has torch start its own threads and open its own files."""
    follow(mlp_and_adam, usual, 2)


def test_nothing_leaks_over_200_steps(each_setting: Setting) -> None:
    warmed_up()
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    for _ in range(10):
        usual(model, optimizer)
    at_first = threads(), descriptors(), mapped_bytes(each_setting.dir)
    held = tieroff.engine(model).stats().nvme_bytes
    for index in range(200):
        if index % 50 == 7:  # now and then something else happens
            with torch.no_grad():
                model(torch.randn(2, 8))
            loss_of(model, batch=3)
        usual(model, optimizer)
    assert tieroff.engine(model).stats().phase == "planned"
    assert (threads(), descriptors(), mapped_bytes(each_setting.dir)) == at_first
    assert tieroff.engine(model).stats().nvme_bytes == held
    tieroff.unwrap(model)


@pytest.mark.parametrize("ending", ["close", "unwrap", "exception"])
def test_nothing_is_left_after_the_end(each_setting: Setting, ending: str) -> None:
    warmed_up()
    gc.collect()
    before, known = (threads(), descriptors()), set(threading.enumerate())
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    engine = weakref.ref(tieroff.engine(model))
    for _ in range(4):
        usual(model, optimizer)
    if ending == "exception":
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 9))
        tieroff.unwrap(model)
    elif ending == "close":
        closed = tieroff.engine(model)
        closed.close()
        closed.close()  # closing twice is no error
        del closed
    elif ending == "unwrap":
        tieroff.unwrap(model)
    del model, optimizer
    gc.collect()
    assert settled(threads, before[0]) == before[0]
    assert settled(lambda: len(descriptors() - before[1]), 0) == 0, descriptors() - before[1]
    assert mapped_bytes(each_setting.dir) == 0
    assert list(each_setting.dir.iterdir()) == []
    assert engine() is None
    assert set(threading.enumerate()) <= known


def test_a_second_engine_after_the_first_was_closed(each_setting: Setting) -> None:
    plain = follow(mlp_and_adam, usual, 12)
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    seen = []
    for index in range(12):
        if index % 4 == 0:
            each_setting.wrap(model, optimizer)
        torch.manual_seed(1000 + index)
        out = usual(model, optimizer)
        seen.append(look(model, optimizer, out))
        if index % 4 == 3:
            tieroff.unwrap(model)
    assert_same(plain.seen, seen)


def test_two_engines_in_one_folder_keep_apart(setting: Setting) -> None:
    plain = follow(mlp_and_adam, usual, 5)
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        pairs.append(mlp_and_adam())
        setting.wrap(*pairs[-1])
    for index in range(5):
        for model, optimizer in pairs:
            torch.manual_seed(1000 + index)
            assert_same([plain.seen[index]], [look(model, optimizer, usual(model, optimizer))])
    tieroff.unwrap(pairs[0][0])
    usual(*pairs[1])
    tieroff.unwrap(pairs[1][0])
    assert list(setting.dir.iterdir()) == []


def drop(model: Any, optimizer: Any, *places: int) -> list[weakref.ref[Any]]:
    """Takes layers out of a model and its optimizer; returns what is to die."""
    dropped = [weakref.ref(one) for place in places for one in (model[place], *model[place].parameters())]
    for place in places:
        del model[place]
    optimizer.param_groups[0]["params"] = kept = list(model.parameters())
    for key in [key for key in optimizer.state if not any(key is one for one in kept)]:
        del optimizer.state[key]
    return dropped


def test_a_layer_that_the_program_drops_dies_with_the_next_step(each_setting: Setting) -> None:
    """Without the garbage collector, as in a plain run."""
    linear = torch.nn.Linear
    model = torch.nn.Sequential(linear(8, 8), torch.nn.LSTM(8, 8), First(), *(linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters())
    each_setting.wrap(model, optimizer, background=False)
    gc.collect()
    gc.disable()
    try:
        for places in ((5, 4), (2, 1)):
            for _ in range(4):
                usual(model, optimizer)
            dropped = drop(model, optimizer, *places)
            usual(model, optimizer)
            assert [one() for one in dropped if one() is not None] == [], f"dropped {places}"
    finally:
        gc.enable()
    tieroff.unwrap(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo's own, of a layer's input, in 2.14
def test_a_compiled_layer_that_the_program_drops_dies(each_setting: Setting) -> None:
    """It holds itself, so that a plain one waits for the garbage collector, too."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    model[2].compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    each_setting.wrap(model, optimizer, background=False)
    for _ in range(5):
        usual(model, optimizer)
    dropped = drop(model, optimizer, 2)
    usual(model, optimizer)
    gc.collect()
    assert [one() for one in dropped if one() is not None] == []
    tieroff.unwrap(model)


def test_a_failed_wrap_leaves_nothing(setting: Setting) -> None:
    warmed_up()
    before = threads(), descriptors()
    for _ in range(3):
        model, _ = mlp_and_adam()
        with pytest.raises(tieroff.errors.StateError, match=r"expected a torch\.optim\.Optimizer"):
            setting.wrap(model, "no optimizer")
    del model
    gc.collect()
    assert settled(threads, before[0]) == before[0]
    assert settled(lambda: len(descriptors() - before[1]), 0) == 0
    assert list(setting.dir.iterdir()) == []


TRAIN = """
import os, sys, time
import torch
from pathlib import Path
import tieroff
from tests.support.twins import Setting, mlp_and_adam, usual_step

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        return torch.full((8,), float(index % 7))

def main(folder, ending):
    setting = Setting(Path(folder), nvme=True)
    model, optimizer = mlp_and_adam()
    setting.wrap(model, optimizer)
    workers = 2 if "workers" in ending else 0
    context = "fork" if workers else None
    loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=workers, multiprocessing_context=context)
    batches = iter(loader)
    for index, rows in enumerate(batches):
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        if index == 4:
            pids = [w.pid for w in batches._workers] if workers else []
            print("planned", tieroff.engine(model).stats().nvme_bytes, *pids, flush=True)
            if ending == "raises":
                raise ValueError("user code fails")
            if ending == "exits":
                sys.exit(3)
        if index > 4:
            time.sleep(0.02)

main(*sys.argv[1:])
"""


def has_mapped(pid: int, folder: Path) -> bool:
    try:
        return os.fsencode(folder) in Path(f"/proc/{pid}/maps").read_bytes()  # others' files have names that are not UTF-8
    except (FileNotFoundError, ProcessLookupError):
        return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def interrupt(process: subprocess.Popen[str]) -> None:
    """Presses Ctrl-C, as people do, until it is heard: Python drops one that lands in a destructor."""
    for _ in range(50):
        process.send_signal(signal.SIGINT)
        try:
            process.wait(0.5)
        except subprocess.TimeoutExpired:
            continue
        return


def holders(folder: Path) -> set[int]:
    """Returns the processes that have a file in a folder open or mapped, one without a name too."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        # It ended meanwhile, or belongs to the system, which opens no files of ours.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            opened = [leads_to(fd) for fd in (process / "fd").iterdir()]
            if any(path.startswith(f"{folder}/") for path in opened) or has_mapped(int(process.name), folder):
                found.add(int(process.name))
    return found


def leads_to(descriptor: Path) -> str:
    """Returns the path behind a descriptor; "" where the process, which runs on, has closed it meanwhile."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("ending", ["killed", "killed with workers", "raises", "exits", "interrupted"])
def test_the_folder_is_empty_however_the_process_ends(tmp_path: Path, project: Path, ending: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAIN, str(tmp_path), ending],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[:1] == ["planned"], process.communicate(timeout=60)[1]
        assert int(said[1]) > 0
        workers = [int(pid) for pid in said[2:]]
        assert len(workers) == (2 if "workers" in ending else 0)
        assert not any(has_mapped(pid, tmp_path / "nvme") for pid in workers)
        assert process.pid in holders(tmp_path / "nvme")
        if ending.startswith("killed"):
            process.send_signal(signal.SIGKILL)
        elif ending == "interrupted":
            interrupt(process)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    expected = {"raises": 1, "exits": 3, "interrupted": -signal.SIGINT}.get(ending, -signal.SIGKILL)
    assert process.returncode == expected, errors
    if ending == "raises":
        assert "ValueError: user code fails" in errors
    deadline = time.monotonic() + 30
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    assert list((tmp_path / "nvme").iterdir()) == []
    # A file without a name takes room for as long as somebody has it open or mapped.
    assert holders(tmp_path / "nvme") == set()
