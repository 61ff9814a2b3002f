"""Several agents on one machine, each with budgets and a drive of its own, stand for as many nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support.ports import held_port
from tests.support.twins import MACHINE

pytestmark = pytest.mark.timeout(300)


def node_config(folder: Path, node: int) -> Path:
    """Writes the config of one node; the second has half of the first's host memory."""
    (folder / f"node-{node}" / "nvme").mkdir(parents=True)
    (folder / "machine.toml").write_text(MACHINE)
    path = folder / f"node-{node}" / "tieroff.toml"
    path.write_text(
        f'device = "cpu"\n[budget]\ndevice = "{64 >> node}MiB"\nhost = "{128 >> node}KiB"\nnvme = "64MiB"\n'
        f'[nvme]\ndirs = ["{folder}/node-{node}/nvme"]\nstaging = "1MiB"\n'
        f'[plan]\npolicy = "floor"\nmin_bytes = 0\nmachine = "{folder}/machine.toml"\n'
    )
    return path


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


def found_by(
    commands: list[list[str]], environments: list[dict[str, str]], folder: Path, project: Path
) -> list[dict[str, Any]]:
    """Runs one agent per node, and returns what their ranks wrote."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(project)}
    agents = [
        subprocess.Popen(
            command, cwd=folder, env=shared | own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for command, own in zip(commands, environments, strict=True)
    ]
    try:
        said = [agent.communicate(timeout=240)[0].decode()[-4000:] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0] * len(agents), said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def check(found: list[dict[str, Any]], folder: Path) -> None:
    """Two nodes of two ranks: each rank has half of what its own node has."""
    for rank, one in enumerate(found):
        assert one["differ"] == []
        assert one["moved"]["parameter"] > 0
        assert one["moved"]["gradient"] > 0
        assert one["dirs"] == [f"{folder}/node-{rank // 2}/nvme"]
        assert one["shares"] == {"host": (128 << 10 >> rank // 2) // 2, "nvme": 32 << 20}
        assert one["budget"] <= 32 << 20  # all plan with the least of any node
    assert not list(folder.glob("node-*/nvme/*"))


def test_ranks_under_torchrun_share_what_their_own_node_has(tmp_path: Path, project: Path, port: int) -> None:
    script = str(project / "tests/parity/shards/nodes.py")
    commands = [
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
            *("--nproc-per-node", "2", "--master-addr", "localhost", "--master-port", str(port), script, "cpu", str(tmp_path)),
        ]
        for node in range(2)
    ]
    environments = [{"TIEROFF_CONFIG": str(node_config(tmp_path, node))} for node in range(2)]
    check(found_by(commands, environments, tmp_path, project), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("counts_itself", [True, False])
def test_launch_starts_the_ranks_of_several_nodes(tmp_path: Path, project: Path, port: int, counts_itself: bool) -> None:
    script = str(project / "tests/parity/shards/nodes.py")
    commands = []
    for node in range(2):
        logs = tmp_path / f"logs-{node}"
        logs.mkdir()
        which = [] if counts_itself else ["--node-rank", str(node)]
        commands.append(
            [
                *(sys.executable, "-W", "ignore", "-m", "tieroff", "launch", "--config", str(node_config(tmp_path, node))),
                *("--nnodes", "2", *which, "--rdzv-endpoint", f"localhost:{port}", "--nproc-per-node", "2"),
                *("--log-dir", str(logs), script, "cpu", str(tmp_path)),
            ]
        )
    found = found_by(commands, [{}, {}], tmp_path, project)
    if counts_itself:  # either node may be the first
        found = sorted(found, key=lambda one: str(one["dirs"]))
    check(found, tmp_path)


def test_a_held_port_is_nobody_elses_until_a_server_listens_there() -> None:
    with held_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)
        store.set("key", "value")
        assert TCPStore("localhost", port).get("key") == b"value"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nnodes", "2"], "needs --rdzv-endpoint HOST:PORT"),
        (["--node-rank", "1"], "say how many with --nnodes"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "localhost:1"], "below --nnodes 2, got 2"),
    ],
)
def test_nodes_that_cannot_meet_are_refused(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "script.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tieroff", "launch", *options, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert said in " ".join(done.stderr.split())


def test_the_slurm_example_launches_each_node_with_the_scripts_own_arguments(tmp_path: Path, project: Path) -> None:
    """With commands of Slurm's names that do what those do on one node."""
    commands = {
        "scontrol": 'test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"',
        "srun": 'shift; "$@"',
        "tieroff": 'printf "%s\\n" "$@"',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    done = subprocess.run(
        ["bash", str(project / "examples/slurm.sbatch"), "train.py", "--name", "two words"],
        env={**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    where = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "n1:20007"]
    assert done.stdout.splitlines() == ["launch", "--config", "tieroff.toml", *where, "train.py", "--name", "two words"]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (pip install 'ray[train]')")
def test_the_ray_example_trains_with_its_shards_below(tmp_path: Path, project: Path) -> None:
    """Ray brings over half a gigabyte, so it is no dependency of the tests; where it is there, it is the real one."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(project / "examples/ray_train.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(project), os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        explained = (tmp_path / f"explain-{rank}.txt").read_text()
        assert "(planned)" in explained
        assert "to nvme" in explained
        assert "parameter" in explained
