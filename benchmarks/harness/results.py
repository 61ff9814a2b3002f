"""What every stored measurement says of itself: when, by which command and on which machine it was taken."""

from __future__ import annotations

import os
import platform
from datetime import date
from typing import Any


def when_and_where(command: str) -> dict[str, Any]:
    """Returns the head of a document of results."""
    return {
        "date": date.today().isoformat(),
        "command": command,
        "kernel": f"{platform.system()} {platform.release()}",
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
    }
