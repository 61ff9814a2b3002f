"""Every error that tieroff raises on purpose. A message names the option or call, then the fact, then the remedy."""

from __future__ import annotations


class TieroffError(Exception):
    """Base of all errors of this library."""


class BudgetWarning(UserWarning):
    """A device budget is below the least that a step runs in, and was raised to it. The message names the number."""


class ConfigError(TieroffError):
    """A config file, mapping or argument that cannot be used."""


class CaptureError(TieroffError):
    """A step that cannot be recorded, or a trace file that cannot be read."""


class RecorderBusyError(CaptureError):
    """Another wrapped model's step is traced just now: a process traces one at a time."""


class InfeasiblePlanError(TieroffError):
    """No plan fits the budget.

    Attributes:
        op: index and name of the op that does not fit.
        needed_bytes: bytes that the op needs at once.
        available_bytes: bytes that the budget leaves for it.
        is_proven: True when nothing can fit; False when a search ended before it found anything that fits.
        why: the part of the message on what needs the bytes.
        helps: the part on what would lower the need; "" where nothing is known to.
    """

    def __init__(
        self,
        message: str,
        *,
        op: str = "",
        needed_bytes: int = 0,
        available_bytes: int = 0,
        is_proven: bool = True,
        why: str = "",
        helps: str = "",
    ) -> None:
        super().__init__(message)
        self.op, self.why, self.helps = op, why, helps
        self.is_proven = is_proven
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class InvalidPlanError(TieroffError):
    """A plan that breaks a rule; `rule` names it."""

    def __init__(self, message: str, *, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule


class CheckpointError(TieroffError):
    """A checkpoint that cannot be read, or does not fit the model.

    Attributes:
        missing: names that the model has and the checkpoint lacks.
        unexpected: names that the checkpoint has and the model lacks.
    """

    def __init__(self, message: str, *, missing: tuple[str, ...] = (), unexpected: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing
        self.unexpected = unexpected


class TraceMismatchError(TieroffError):
    """A plan or a trace that belongs to another model or step."""


class StateError(TieroffError):
    """A call that the object does not allow in its current state."""


class StoreError(TieroffError, OSError):
    """A failed transfer to or from a lower tier.

    Attributes:
        path: file or folder; empty for memory.
        offset: byte offset in the file.
        size_bytes: bytes requested.
        done_bytes: bytes moved before the failure.
        errno: the system's error number, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        offset: int = 0,
        size_bytes: int = 0,
        done_bytes: int = 0,
        errno: int | None = None,
    ) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset
        self.size_bytes = size_bytes
        self.done_bytes = done_bytes
        self.errno = errno

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""
