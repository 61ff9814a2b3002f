"""Where the data of others lies: published traces, allocation instances and measurements, which are no part of this project."""

from __future__ import annotations

import os
from pathlib import Path


def outside_data(name: str) -> Path:
    """Returns the path of a folder or file in the data of others, whether or not it is there.

    The folder is named by `TIEROFF_TEST_DATA`; without it, it is `../shared/data` beside the project.
    """
    beside = Path(__file__).resolve().parents[3] / "shared/data"
    return Path(os.environ.get("TIEROFF_TEST_DATA") or beside) / name
