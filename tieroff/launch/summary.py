"""What a launch came to: one row per rank, and why it failed."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tieroff.launch.folder import ACCOUNT_FILE, ERROR_FILE, STDERR_FILE, STDOUT_FILE, rank_folder, read_json
from tieroff.units import format_bytes, format_seconds

_SAME_MOMENT_S = 2
_REASON_CHARACTERS = 500

COLUMNS = ("rank", "ended", "device", "plan", "step", "peak", "moved per step")


class Failure(Protocol):
    """What of torch's ProcessFailure is used."""

    exitcode: int
    timestamp: int


@dataclass(frozen=True)
class RankRow:
    """What one rank did.

    Attributes:
        rank: its number.
        status: "done", "failed" (by itself), or "stopped" (because of another rank, or from outside).
        reason: why it did not end well; "" when it did.
        log: its standard error, or the file with its error where that went to the launcher's; "" when there is neither.
        peak_bytes: most memory of the process, measured from outside the engine: of its GPU, or resident.
        engines: per model that it wrapped, the figures of its last step and plan.
    """

    rank: int
    status: str
    reason: str = ""
    log: str = ""
    peak_bytes: int = 0
    engines: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a launch came to.

    Attributes:
        folder: with logs, config and accounts.
        ranks: a row each.
        error: why the launch failed, the first cause first; "" when it did not.
    """

    folder: Path
    ranks: tuple[RankRow, ...]
    error: str = ""
    exit_status: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exit_status", 1 if self.error else 0)


def summarize(folder: Path, count: int, failures: Mapping[int, Failure], ended_by: str = "") -> Outcome:
    """Returns what a launch came to.

    Args:
        folder: of the launch.
        count: of its ranks.
        failures: by rank, of those that did not exit with 0.
        ended_by: name of the signal that the launcher got, or "".
    """
    errors = {rank: found for rank in range(count) if (found := _error_of(rank_folder(folder, rank))) is not None}
    cause = first_cause(failures, {rank: raised_s for rank, (_, raised_s) in errors.items()})
    rows = tuple(_row(folder, rank, failures.get(rank), rank == cause, ended_by) for rank in range(count))
    error = ""
    if ended_by:
        error = f"ended by {ended_by}: every rank was stopped"
    elif cause is not None:
        log = f"; see {rows[cause].log}" if rows[cause].log else ""
        error = f"rank {cause} failed and the others were stopped: {rows[cause].reason}{log}"
    return Outcome(folder, rows, error)


def first_cause(failures: Mapping[int, Failure], raised_s: Mapping[int, float]) -> int | None:
    """Returns the rank whose failure came first; None without failures.

    The agent ends the others with SIGTERM, so a rank that SIGTERM ended without its own error comes last. A rank that
    was killed is noticed a moment after its peers have lost their connection to it, so of failures at about the same time
    the killed one counts as the first. SIGABRT is how libraries end a process that lost a peer.

    Args:
        failures: by rank; when each was noticed, in whole seconds.
        raised_s: by rank, when it raised the error that ended it, if it did.
    """
    own = {rank for rank, f in failures.items() if f.exitcode != -signal.SIGTERM or rank in raised_s} or set(failures)
    if not own:
        return None
    when_s = {rank: raised_s.get(rank, failures[rank].timestamp) for rank in own}
    latest_s = min(when_s.values()) + _SAME_MOMENT_S

    def order(rank: int) -> tuple[bool, float, int]:
        was_killed = failures[rank].exitcode < 0 and failures[rank].exitcode != -signal.SIGABRT and rank not in raised_s
        return not (was_killed and when_s[rank] <= latest_s), when_s[rank], rank

    return min(own, key=order)


def _row(folder: Path, rank: int, failure: Failure | None, is_cause: bool, ended_by: str) -> RankRow:
    own = rank_folder(folder, rank)
    account = read_json(own / ACCOUNT_FILE) or {"peak_bytes": 0, "engines": []}
    status, reason = "done", ""
    if ended_by:
        status, reason = "stopped", f"the launch was ended by {ended_by}"
    elif failure is not None:
        has_error = is_cause or (own / ERROR_FILE).is_file()
        is_stopped = failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL) and not has_error
        status = "stopped" if is_stopped else "failed"
        reason = "another rank failed" if is_stopped else _reason(own, failure.exitcode)
    log = next((str(own / name) for name in (STDERR_FILE, ERROR_FILE) if (own / name).is_file()), "")
    return RankRow(rank, status, reason, log, account["peak_bytes"], tuple(account["engines"]))


def _reason(own: Path, exitcode: int) -> str:
    """Returns why a rank failed: its error, the signal that ended it, or its exit status with its last words."""
    error = _error_of(own)
    if error is not None:
        return _short(error[0])
    if exitcode < 0:
        name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else f"signal {-exitcode}"
        more = " (by a user, or by the kernel when memory ran out)" if exitcode == -signal.SIGKILL else ""
        return f"killed by {name}{more}"
    for name in (STDERR_FILE, STDOUT_FILE):
        log = own / name
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
        if lines:
            return _short(f"exit status {exitcode}: {lines[-1]}")
    return f"exit status {exitcode}"


def _error_of(own: Path) -> tuple[str, float] | None:
    """Returns the error that ended a rank and when it was raised, in seconds; None without one.

    Torch's `@record` writes the same file, without the exact time, and a script that catches the error then keeps it.
    """
    try:
        message = read_json(own / ERROR_FILE)["message"]
        more = message["extraInfo"]
        return str(message["message"]), float(more["time_s"] if "time_s" in more else more["timestamp"])
    except (ValueError, TypeError, KeyError):  # there is none, or it has the form of another library
        return None


def _short(text: str) -> str:
    return text if len(text) <= _REASON_CHARACTERS else text[: _REASON_CHARACTERS - 1] + "…"


def as_document(outcome: Outcome) -> dict[str, Any]:
    """Returns the outcome as JSON data, with an `error` if the launch failed."""
    rows = [
        {
            "rank": row.rank,
            "status": row.status,
            "reason": row.reason,
            "log": row.log,
            "peak_bytes": row.peak_bytes,
            "engines": list(row.engines),
        }
        for row in outcome.ranks
    ]
    document: dict[str, Any] = {"folder": str(outcome.folder), "ranks": rows}
    if outcome.error:
        document["error"] = {"type": "LaunchError", "message": outcome.error}
    return document


def as_lines(outcome: Outcome) -> list[tuple[str, ...]]:
    """Returns the rows of a table with `COLUMNS`: one per wrapped model, and one for a rank without any."""
    return [_line(row, engine) for row in outcome.ranks for engine in row.engines or (None,)]


def _line(row: RankRow, engine: dict[str, Any] | None) -> tuple[str, ...]:
    peak = format_bytes(row.peak_bytes) if row.peak_bytes else "-"
    if engine is None:
        return str(row.rank), row.status, "-", "no model was wrapped", "-", peak, "-"
    moved = ", ".join(f"{link} {format_bytes(size)}" for link, size in engine.get("moved_bytes", {}).items() if size)
    step = format_seconds(engine["step_s"]) if "step_s" in engine else "-"
    return str(row.rank), row.status, engine["device"], _plan(engine), step, peak, moved or "nothing"


def _plan(engine: dict[str, Any]) -> str:
    name = engine["model"]
    if "policy" not in engine:
        return f"{name}: none in {engine['steps']} steps"
    if engine["moves_nothing"]:
        return f"{name}: everything fits"
    used, budget = engine["peak_bytes"]["device"], engine["budget_bytes"]["device"]
    return f"{name}: {engine['policy']}, {format_bytes(used)} of {format_bytes(budget)}"
