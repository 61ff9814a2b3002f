"""The folder of one launch: the launcher's settings for its ranks, and the ranks' figures for its summary.

config.toml     the config of every rank, with the machine's budgets written out
machine.toml    measured for all ranks, if the config names no machine file
launch.json     the launcher's process and the CPUs of each rank
rank-N/         stdout.log, stderr.log (rank 0 has the launcher's own), error.json, account.json
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.toml"
MACHINE_FILE = "machine.toml"
LAUNCH_FILE = "launch.json"
STDOUT_FILE = "stdout.log"
STDERR_FILE = "stderr.log"
ERROR_FILE = "error.json"
ACCOUNT_FILE = "account.json"


def rank_folder(folder: Path, local_rank: int) -> Path:
    """Returns where a rank's logs and account lie."""
    return folder / f"rank-{local_rank}"


def write_json(path: Path, content: object) -> None:
    """Writes a file atomically: readers see it whole or not at all, even if this process is killed."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_json(path: Path) -> Any:
    """Returns a file's content, or None when it was not written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
