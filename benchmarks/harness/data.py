"""What benches and tests plan: this project's own traces, and data of others, which is no part of this project."""

from __future__ import annotations

import os
from pathlib import Path

from tieroff.core.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
OWN_FOLDER = ROOT / "tests/data/traces"

SLOW_MACHINE = Machine(
    name="slow",
    measured="made up: links that a laptop's CPU can keep busy",
    d2h_bytes_per_s=10**9,
    h2d_bytes_per_s=10**9,
    nvme_write_bytes_per_s=2 * 10**8,
    nvme_read_bytes_per_s=3 * 10**8,
    nvme_write_latency_s=1e-4,
    nvme_read_latency_s=1e-4,
    duplex_share=0.75,
)


def outside_data(name: str) -> Path:
    """Returns the path of a folder or file in the data of others, whether or not it is there.

    The folder is named by `TIEROFF_TEST_DATA`; without it, it is `../shared/data` beside the project.
    """
    beside = ROOT.parent / "shared/data"
    return Path(os.environ.get("TIEROFF_TEST_DATA") or beside) / name
