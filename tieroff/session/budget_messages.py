"""What a person is told: where a device budget is too small for a kind of step or too large, and that there is a plan."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

from tieroff.core.place import user_frame
from tieroff.device_budget import DeviceBudget
from tieroff.errors import BudgetWarning, InfeasiblePlanError
from tieroff.probe.limits import available_folder_bytes
from tieroff.session.shared import Budget, Said
from tieroff.units import format_bytes, pasteable

log = logging.getLogger("tieroff")

NEWS = "tieroff.news"


class BudgetMessages:
    """Says that a budget was raised, for the first kind of step and for a later one that needs still more, or lowered.

    Args:
        wanted: the budget that was asked for; None: no one did.
        rank: of this process; rank 0 warns for all, the others log.
        shared: the budget, where it is for several models: what is said of it is said once.
    """

    def __init__(self, wanted: DeviceBudget | None, rank: int, shared: Budget | None = None) -> None:
        self._wanted, self._rank, self._shared = wanted, rank, shared
        self._ledger = shared.told if shared is not None else Said()
        self._told_lowered = self._was_kept_whole = False

    def lowered(self, limit_bytes: int, device_bytes: int, limiter: str) -> None:
        """A kind of step is planned with less than was asked for: there is no more. Said once.

        Args:
            limit_bytes: what was asked for.
            device_bytes: what the step gets.
            limiter: who leaves no more, as `HostLimit.limiter` says.
        """
        if self._told_lowered:
            return
        self._told_lowered = True
        log.warning(
            "the device budget was lowered from %s to %s: %s leaves no more, and ends a process that takes more",
            format_bytes(limit_bytes),
            format_bytes(device_bytes),
            limiter,
        )

    def kept_whole(self, saved_bytes: int, device_bytes: int, worth_bytes: int) -> None:
        """A kind of step moves nothing, since its share of the peak would save too little; said once.

        Args:
            saved_bytes: what the share could save of it.
            device_bytes: what the step needs with nothing moved.
            worth_bytes: what a share has to save.
        """
        if self._wanted is None or self._was_kept_whole:
            return
        self._was_kept_whole = True
        self._warn(
            f'the device budget "{self._wanted.written()}" could save {format_bytes(saved_bytes)} of the '
            f"{format_bytes(device_bytes)} that this step needs, and less than {format_bytes(worth_bytes)} is not worth its "
            'time: nothing moves. A budget in bytes, "min", [budget] strict = true or a smaller [plan] min_bytes moves it '
            "all the same"
        )

    def raised(self, limit_bytes: int, device_bytes: int, need: Callable[[], InfeasiblePlanError]) -> None:
        """A kind of step is planned with more than was asked for.

        Of a budget for several models the sum is told, when the first plan is made: by then the others have shown a step.

        Args:
            limit_bytes: what was asked for.
            device_bytes: what the step gets.
            need: gives what needs it, and what would lower that.
        """
        if self._wanted is None or self._wanted.is_least or device_bytes <= limit_bytes:
            return
        whose = "this step runs in"
        if self._shared is not None:
            limit_bytes, device_bytes, count = self._shared.asked_and_least()
            whose = f"the steps of its {count} models run in"
        if device_bytes <= max(limit_bytes, self._ledger.told_bytes):
            return
        self._ledger.told_bytes = device_bytes
        written = self._wanted.written()
        asked = f'"{written}" ({format_bytes(limit_bytes)})' if isinstance(written, str) else format_bytes(limit_bytes)
        text = pasteable(device_bytes)
        text = text if text.isdigit() else f'"{text}"'
        meant = f' If a share was meant, write "{written}%".' if isinstance(written, int) and 0 < written <= 100 else ""
        found = need()
        lower = f" What would lower it: {found.helps}." if found.helps else ""
        self._warn(
            f"the device budget {asked} is below the least that {whose}, and was raised to {format_bytes(device_bytes)}. "
            f'A budget of {text} or "min" asks for it without this warning; [budget] strict = true makes it an error.'
            f"{meant}{lower} What needs it: {found.why}"
        )

    def _warn(self, message: str) -> None:
        if self._rank:
            log.warning("rank %d: %s", self._rank, message)
            return
        _, above = user_frame()
        warnings.warn(message, BudgetWarning, stacklevel=above + 1)


def say_where(dirs: Sequence[Path]) -> None:
    """Says which folder takes what is above the budget, where no one named it."""
    folder = dirs[0]
    room = format_bytes(available_folder_bytes(folder))
    log.warning(
        "[nvme] dirs is not set: what is above the device budget goes to %s, which has %s free; nothing remains there after "
        'the run. [nvme] dirs = ["FOLDER"] names another folder, dirs = [] none',
        folder,
        room,
    )


class Terminal(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error, as long as the program has no handlers of its own."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("tieroff: %(message)s"))

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets nothing through once the program has set up logging, which shows the line itself."""
        others = (logging.getLogger(), logging.getLogger("tieroff"))
        return not any(logger.handlers for logger in others) and bool(super().filter(record))


def show_on_terminal() -> None:
    """Shows the news on standard error, if that is a terminal and the program has no handler for them."""
    news = logging.getLogger(NEWS)
    if news.hasHandlers() or sys.stderr is None or not sys.stderr.isatty():  # None where a program starts with it closed
        return
    news.addHandler(Terminal())
    if news.level == logging.NOTSET:
        news.setLevel(logging.INFO)
