"""Tells the race detector what threads of the host tell each other: through locks, ends of threads, and `backward`.

Events, conditions, queues, futures and executors of the standard library are made of its locks, so that only these are
watched. A lock that was made before `watch` is not seen.
"""

from __future__ import annotations

import queue
import threading
from types import ModuleType
from typing import Any

import torch

# The standard library's own lock, before anything is put in its place.
_RawLock = threading.Lock
_raw_join = threading.Thread.join


class _Watched:
    """What both kinds of lock do: whoever takes it knows what its last holders did."""

    _order: Any
    _lock: Any

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self._order.acquire()
        return taken

    def release(self) -> None:
        self._order.release()
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()


def _lock_class(native: ModuleType) -> type:
    class Lock(_Watched):
        def __init__(self) -> None:
            self._lock = _RawLock()
            self._order = native.Order()

        def locked(self) -> bool:
            return bool(self._lock.locked())

    return Lock


def _rlock_class(native: ModuleType) -> type:
    class RLock(_Watched):
        """With what `threading.Condition` asks of a lock that may be held several times."""

        def __init__(self) -> None:
            self._lock = threading._CRLock()  # type: ignore[attr-defined]
            self._order = native.Order()

        def _is_owned(self) -> bool:
            return bool(self._lock._is_owned())

        def _release_save(self) -> object:
            self._order.release()
            return self._lock._release_save()

        def _acquire_restore(self, state: object) -> None:
            self._lock._acquire_restore(state)
            self._order.acquire()

    return RLock


class _SimpleQueue(queue._PySimpleQueue):  # type: ignore[name-defined]
    """Made of locks that are seen, unlike the one in C."""


def _watch_backward(native: ModuleType) -> None:
    class Engine(torch._C._ImperativeEngine):
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            native.enter_backward()
            try:
                return super().run_backward(*args, **kwargs)
            finally:
                native.leave_backward()

    torch.autograd.Variable._execution_engine = Engine()


def watch(native: ModuleType) -> None:
    """Puts watched locks in the place of the standard library's, for all that is made from here on."""

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        _raw_join(self, timeout)
        if not self.is_alive() and self.native_id is not None:
            native.acquire_from_thread(self.native_id)

    lock, rlock = _lock_class(native), _rlock_class(native)
    threading.Lock = lock  # type: ignore[assignment]
    threading._allocate_lock = lock  # type: ignore[attr-defined]
    threading.RLock = rlock  # type: ignore[assignment]
    threading.Thread.join = join  # type: ignore[method-assign]
    queue.SimpleQueue = _SimpleQueue  # type: ignore[misc]
    _watch_backward(native)
