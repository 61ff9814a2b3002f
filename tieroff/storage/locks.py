"""Locks that an exception between any two instructions may leave taken."""

from __future__ import annotations

from typing import Any


def let_go(lock: Any) -> None:
    """Frees a `threading.RLock` that an interrupted frame of this thread still holds.

    `with` is no help: the exception may come after its body and before the lock is freed.
    """
    while lock._is_owned():
        lock.release()
