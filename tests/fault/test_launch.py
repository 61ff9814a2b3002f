"""`tieroff launch` as people run it: what it passes on, what it says, and that nothing is left however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.support.twins import MACHINE
from tieroff.runtime.backend.cpu import settle_vector_math

pytestmark = pytest.mark.timeout(240)

SCRIPT = """
import gc, os, signal, subprocess, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
import tieroff

torch.set_num_threads(1)
folder, how = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
child = subprocess.Popen(["sleep", "600"], start_new_session=True) if "child" in how else None
(folder / f"{os.environ['RANK']}.pids").write_text(f"{os.getpid()} {child.pid if child else ''}")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
tieroff.wrap(model, optimizer)
data = nn.parallel.DistributedDataParallel(model)
for index in range(10**6 if "forever" in how else 6):
    torch.manual_seed(10 * index + rank)
    optimizer.zero_grad()
    loss = data(torch.randn(8, 16)).square().mean()
    if index == 4 and "killed" in how and rank == 1:  # its peer waits for its gradients
        (folder / "killed").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    if index == 4 and "raises" in how and rank == 1:
        raise ValueError("batch 4 is bad")
    loss.backward()
    optimizer.step()
    if rank == 0:
        print(loss.item().hex(), flush=True)
gc.collect()  # torch's gloo thread may still hold the last collective's tensors, and would die in freeing them
dist.destroy_process_group()
"""


def write_config(folder: Path, **changes: str) -> Path:
    """Writes a config under which everything moves to files, and a machine file, so that nothing is measured."""
    (folder / "nvme").mkdir(exist_ok=True)
    (folder / "machine.toml").write_text(MACHINE)
    path = folder / "config.toml"
    path.write_text(
        f'device = "{changes.get("device", "cpu")}"\n[budget]\ndevice = "1GiB"\nhost = 0\nnvme = "64MiB"\n'
        f'[nvme]\ndirs = ["{folder / "nvme"}"]\nstaging = "1MiB"\n'
        f'[plan]\npolicy = "floor"\nmin_bytes = 0\nmachine = "{folder / "machine.toml"}"\n'
    )
    (folder / "script.py").write_text(SCRIPT)
    return path


def command(folder: Path, how: str, *options: str, ranks: int = 2) -> list[str]:
    """Returns a launch's command line. Its logs lie in the folder."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    return [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tieroff",
        "launch",
        "--config",
        str(folder / "config.toml"),
        "--nproc-per-node",
        str(ranks),
        "--log-dir",
        str(logs),
        *options,
        str(folder / "script.py"),
        str(folder),
        how,
    ]


@contextlib.contextmanager
def launched(project: Path, folder: Path, how: str, *options: str, ranks: int = 2) -> Iterator[subprocess.Popen[str]]:
    """Starts a launch; whatever the test does, it has ended at the end."""
    environment = {**os.environ, "PYTHONPATH": str(project), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        command(folder, how, *options, ranks=ranks),
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(project: Path, folder: Path, how: str, *options: str, ranks: int = 2) -> tuple[int, str, str]:
    with launched(project, folder, how, *options, ranks=ranks) as process:
        out, errors = process.communicate(timeout=150)
    return process.returncode, out, errors


def pids(folder: Path) -> list[int]:
    """Every process that the script told of: the ranks, and what they started."""
    return [int(pid) for path in folder.glob("*.pids") for pid in path.read_text().split()]


def alive(folder: Path, within_s: float = 0.0) -> list[int]:
    """Returns which of them live, after waiting a while for them to end."""
    processes = []
    for pid in pids(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, left = psutil.wait_procs([p for p in processes if p.status() != psutil.STATUS_ZOMBIE], timeout=within_s)
    return [process.pid for process in left]


def assert_nothing_is_left(folder: Path, within_s: float = 0.0) -> None:
    assert len(pids(folder)) >= 1
    assert alive(folder, within_s) == []
    assert list((folder / "nvme").iterdir()) == []


def document(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out)
    return found


def test_ranks_share_the_budget_and_the_output_is_rank_0s(tmp_path: Path, project: Path) -> None:
    write_config(tmp_path)
    status, out, errors = run(project, tmp_path, "wrapped")
    assert status == 0, errors
    losses = [float.fromhex(line) for line in out.splitlines()]  # and nothing else was printed there
    assert len(losses) == 6
    table = [line for line in errors.splitlines() if "Sequential: floor" in line]
    assert [line.split("│")[1].strip() for line in table] == ["0", "1"], errors
    (folder,) = (tmp_path / "logs").iterdir()
    for rank in range(2):
        (engine,) = json.loads((folder / f"rank-{rank}/account.json").read_text())["engines"]
        assert engine["phase"] == "planned"
        assert engine["budget_bytes"]["nvme"] <= (64 << 20) // 2
        assert engine["moved_bytes_by_class"]["parameter"] > 0
        assert engine["steps"] == 6
    assert (folder / "rank-1/stderr.log").is_file()
    assert_nothing_is_left(tmp_path)


@pytest.mark.alone  # how long the others take to end is measured
def test_a_rank_killed_in_mid_step_ends_the_others_with_the_reason(tmp_path: Path, project: Path) -> None:
    write_config(tmp_path)
    status, out, errors = run(project, tmp_path, "killed child", "--json")
    took_s = time.time() - float((tmp_path / "killed").read_text())
    assert status == 1, errors
    assert took_s < 30, took_s
    found = document(out)
    assert found["error"]["type"] == "LaunchError"
    assert "rank 1 failed and the others were stopped: killed by SIGKILL" in found["error"]["message"]
    assert [row["status"] for row in found["ranks"]][1] == "failed"
    assert found["ranks"][0]["status"] in ("stopped", "failed")
    assert found["ranks"][0]["engines"][0]["steps"] >= 1  # also of ranks that could not say goodbye
    assert len(pids(tmp_path)) == 4
    assert_nothing_is_left(tmp_path)


def test_an_error_in_one_rank_is_the_reason_and_its_log_is_named(tmp_path: Path, project: Path) -> None:
    write_config(tmp_path)
    status, out, errors = run(project, tmp_path, "raises")
    assert status == 1
    assert len(out.splitlines()) == 4  # rank 0's losses up to there
    (line,) = [line for line in errors.splitlines() if line.startswith("tieroff: LaunchError")]
    assert "rank 1 failed and the others were stopped: ValueError: batch 4 is bad; see " in line
    log = Path(line.split("; see ")[1])
    assert "ValueError: batch 4 is bad" in log.read_text()
    assert_nothing_is_left(tmp_path)


def wait_for_steps(process: subprocess.Popen[str], count: int) -> None:
    assert process.stdout is not None
    for _ in range(count):
        assert process.stdout.readline(), process.stderr.read() if process.stderr else ""


def test_ctrl_c_twice_leaves_no_process_and_no_file(tmp_path: Path, project: Path) -> None:
    write_config(tmp_path)
    with launched(project, tmp_path, "forever child") as process:
        wait_for_steps(process, 5)
        assert len(alive(tmp_path)) == 4
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)  # a person who hits it again
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ended by SIGINT: every rank was stopped" in errors
    assert_nothing_is_left(tmp_path)


def test_a_launcher_that_is_killed_takes_its_ranks_with_it(tmp_path: Path, project: Path) -> None:
    write_config(tmp_path)
    with launched(project, tmp_path, "forever") as process:
        wait_for_steps(process, 5)
        process.kill()
        process.wait(30)
    assert_nothing_is_left(tmp_path, within_s=20)


def plain_losses() -> list[str]:
    """Returns the losses of the script's loop on one rank, without anything round it."""
    settle_vector_math()  # as wrap does
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for index in range(6):
        torch.manual_seed(10 * index)
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses


def test_two_launches_at_once_share_a_drive_without_touching_each_other(tmp_path: Path, project: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        path = write_config(folder)
        (tmp_path / "nvme").mkdir(exist_ok=True)
        path.write_text(path.read_text().replace(str(folder / "nvme"), str(tmp_path / "nvme")))
    with launched(project, folders[0], "one", ranks=1) as first, launched(project, folders[1], "two", ranks=1) as second:
        outs = [process.communicate(timeout=150) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outs
    assert outs[0][0].split() == outs[1][0].split() == plain_losses()
    assert list((tmp_path / "nvme").iterdir()) == []
    for folder in folders:
        assert_nothing_is_left(folder)


def unwrapped(text: str) -> str:
    """Returns the text without spaces and the frame that it is wrapped in: long paths are cut at the end of a line."""
    return "".join(text.replace("│", "").split())


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        ("no script", 2, "script.py"),
        ("no ranks", 2, "nproc-per-node"),
        ("no config", 1, "ConfigError: "),
        ("no gpu", 1, "--nproc-per-node 9999: torch sees"),
        ("no logs", 1, "No such file or directory; make it writable, or name another with --log-dir"),
        ("no folder", 1, "nowhere"),
    ],
)
def test_bad_input_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, status: int, told: str
) -> None:
    from typer.testing import CliRunner

    from tieroff.cli import app

    config = write_config(tmp_path, device="cuda" if change == "no gpu" else "cpu")
    if change == "no folder":  # the budget is left out, so the folder is looked at
        config.write_text(config.read_text().replace('nvme = "64MiB"\n', "").replace(str(tmp_path / "nvme"), "/nowhere"))
    line = command(tmp_path, "", ranks={"no ranks": 0, "no gpu": 9999}.get(change, 2))[5:]
    if change in ("no script", "no config", "no logs"):
        (tmp_path / {"no script": "script.py", "no config": "config.toml"}.get(change, "none")).unlink(missing_ok=True)
    if change == "no logs":
        (tmp_path / "logs").rmdir()
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, line)
    assert found.exit_code == status, found.output
    assert unwrapped(told) in unwrapped(found.output)
    assert list(tmp_path.glob("*.pids")) == []


@pytest.mark.parametrize("endpoint", ["node0", "node0:", ":29400", "node0:port", "node0:99999", "node0:0"])
def test_an_endpoint_that_is_none_is_told(tmp_path: Path, endpoint: str) -> None:
    from typer.testing import CliRunner

    from tieroff.cli import app

    write_config(tmp_path)
    line = command(tmp_path, "", "--nnodes", "2", "--rdzv-endpoint", endpoint)[5:]
    found = CliRunner().invoke(app, line)
    assert found.exit_code == 1
    assert unwrapped("expected --rdzv-endpoint HOST:PORT with a port from 1 to 65535") in unwrapped(found.output)


def test_machines_that_cannot_meet_are_told_where_and_why(tmp_path: Path, project: Path) -> None:
    write_config(tmp_path)
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        where = f"localhost:{taken.getsockname()[1]}"
        status, _, said = run(project, tmp_path, "", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", where)
    assert status == 1
    assert f"ConfigError: the 2 machines did not meet at {where}: " in said
    assert "address already in use" in said
    assert "Traceback" not in said
