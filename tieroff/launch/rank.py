"""One rank: started by the launcher, runs the script as `python script.py` would, and keeps an account of it.

Nothing heavy is imported before the script runs, so that settings made before `import torch` take effect.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import resource
import runpy
import signal
import statistics
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieroff.launch.folder import ACCOUNT_FILE, ERROR_FILE, LAUNCH_FILE, rank_folder, read_json, write_json
from tieroff.session.ranks import Ranks, on_wrap
from tieroff.storage.host import numa

if TYPE_CHECKING:
    from tieroff.core.plan import Plan
    from tieroff.runtime.engine import Engine
    from tieroff.runtime.step.stats import Stats

log = logging.getLogger("tieroff")

_PR_SET_PDEATHSIG = 1
_WRITE_EVERY_S = 1.0
_STEPS_KEPT = 101


@dataclass
class _Followed:
    """Figures of one engine; no reference, so that nothing keeps the engine or its model alive."""

    model: str
    device: str
    steps: int = 0
    stats: Stats | None = None
    plan: Plan | None = None
    planned_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS_KEPT))

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"model": self.model, "device": self.device, "steps": self.steps}
        if self.stats is not None:
            row |= {
                "phase": self.stats.phase,
                "step_s": statistics.median(self.planned_s) if self.planned_s else self.stats.step_s,
                "stall_s": self.stats.stall_s,
                "moved_bytes": self.stats.moved_bytes,
                "moved_bytes_by_class": self.stats.moved_bytes_by_class,
                "fallbacks": self.stats.fallbacks,
            }
        if self.plan is not None:
            row |= {
                "policy": self.plan.policy,
                "moves_nothing": self.plan.moves_nothing,
                "predicted_step_s": self.plan.step_ns / 1e9,
                "peak_bytes": {tier.value: size for tier, size in self.plan.peak_bytes.items()},
                "budget_bytes": {tier.value: size for tier, size in self.plan.budget_bytes.items()},
            }
        return row


class Account:
    """What the engines of this process did, written into its folder now and then and when the process ends.

    So it is there, a second old at most, of a rank that was killed too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._followed: list[_Followed] = []
        self._written_s = 0.0
        self._is_written = True

    def open(self, engine: Engine) -> None:
        """Follows an engine from now on."""
        followed = _Followed(type(engine.model).__name__, str(engine.device))
        self._followed.append(followed)
        engine.watch(functools.partial(self._note, followed))

    def _note(self, followed: _Followed, stats: Stats, plan: Plan | None) -> None:
        followed.steps += 1
        followed.stats, followed.plan = stats, plan
        if stats.phase in ("planned", "nothing moved"):
            followed.planned_s.append(stats.step_s)
        if time.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Writes the current figures."""
        self._written_s = time.monotonic()
        try:
            write_json(self._path, {"peak_bytes": _peak_bytes(), "engines": [followed.row() for followed in self._followed]})
        except OSError as error:
            if self._is_written:  # once is enough; the script goes on, since nothing of its own depends on this
                log.warning("the summary of the launch will lack figures of this rank: %s", error)
            self._is_written = False


def _peak_bytes() -> int:
    """Returns the most memory that this process had: of its GPU where it used one, else resident."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _note_error(path: Path, error: BaseException) -> None:
    """Writes an error in the form in which torch's agent reads it."""
    now_s = time.time()
    more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(now_s)), "time_s": now_s}
    try:
        write_json(path, {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": more}})
    except OSError as refusal:  # the script's own error is the one to be seen
        log.warning("the summary of the launch will lack this rank's error: %s", refusal)


def _end_with(launcher_pid: int) -> None:
    """Makes the kernel kill this process when the launcher ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher_pid:  # it ended before the system was asked
        os._exit(1)


def main() -> None:
    """Runs `FOLDER SCRIPT ARGS…` of the command line."""
    folder, script, *arguments = sys.argv[1:]
    local_rank = Ranks.here().local_rank
    launch = read_json(Path(folder) / LAUNCH_FILE)
    _end_with(launch["pid"])
    if launch["cpus"] is not None:
        numa.bind(launch["cpus"][local_rank])
    own = rank_folder(Path(folder), local_rank)
    account = Account(own / ACCOUNT_FILE)
    on_wrap.set(account.open)
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:  # as `python script.py` has it; here it is the working directory
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        _note_error(own / ERROR_FILE, error)
        raise
    finally:
        account.write()


if __name__ == "__main__":
    main()
