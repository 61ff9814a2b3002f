"""Launches of the programs of this folder under plain torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

Found = dict[str, list[dict[str, Any]]]


def launch(
    project: Path, folder: Path, ranks: int, parts: tuple[str, ...], program: str, device: str = "cpu"
) -> subprocess.CompletedProcess[str]:
    """Runs parts of a program in so many ranks."""
    torchrun = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        "-m",
        f"tests.parity.shards.{program}",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *torchrun, device, str(folder), *parts],
        cwd=project,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert not list(folder.glob("rank-*/nvme/*"))  # whatever happened
    return done


def told_by(
    project: Path, folder: Path, ranks: int, parts: tuple[str, ...], program: str = "program", device: str = "cpu"
) -> Found:
    """Returns what each rank found, by part of the program."""
    done = launch(project, folder, ranks, parts, program, device)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(parts, (json.loads(line) for line in done.stdout.splitlines()), strict=True))
