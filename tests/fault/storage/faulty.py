"""Any engine with faults in front of it, so that every engine and store meets the same ones."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ECANCELED
from typing import Any, Literal

from tieroff.storage.engines import Direction, Engine, OpenFile, Transfer
from tieroff.storage.memory import align_up

Action = Literal["read", "write", "verify", "copy"]
Kind = Literal["errno", "short", "hang", "late", "flip", "lost", "misdirected"]


@dataclass
class Fault:
    """One rule: of the calls of its action, the first `after` pass, the next `count` (0: all) are hit, the rest pass.

    errno        ends at once with this number, nothing is moved
    short        ends at once without an error, but also without its last byte
    hang         starts only at release()
    late         is carried out, and its end is seen only after release()
    flip         one bit differs: of a write on the drive, of a read in what this read gave
    lost         a write that is reported done, and was not
    misdirected  the transfer touches the bytes one extent further on
    """

    action: Action
    kind: Kind
    errno: int = 0
    after: int = 0
    count: int = 1
    seen: int = 0

    def hits(self) -> bool:
        index = self.seen
        self.seen += 1
        return index >= self.after and (self.count == 0 or index < self.after + self.count)


class Ended:
    """A transfer that ended as a fault says."""

    start_ns = stop_ns = 1
    checksum: int | None = None

    def __init__(self, size_bytes: int, done_bytes: int, errno: int) -> None:
        self.size_bytes, self.done_bytes, self.errno = size_bytes, done_bytes, errno

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def cancel(self) -> bool:
        return False


class Held:
    """A transfer whose end, or whose start as well, waits for release()."""

    def __init__(self, size_bytes: int, start: Callable[[], Transfer], *, starts_now: bool) -> None:
        self.size_bytes = size_bytes
        self._start = start
        self._inner: Any = start() if starts_now else None
        self._released = threading.Event()
        self._is_cancelled = False

    def release(self) -> None:
        if self._inner is None and not self._is_cancelled:
            self._inner = self._start()
        self._released.set()

    def done(self) -> bool:
        return self._released.is_set() and (self._is_cancelled or self._inner.done())

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._released.wait(timeout_s) and (self._is_cancelled or self._inner.wait(timeout_s))

    def cancel(self) -> bool:
        if self._inner is not None or self._is_cancelled:
            return False
        self._is_cancelled = True
        self._released.set()
        return True

    @property
    def errno(self) -> int:
        return ECANCELED if self._is_cancelled else int(self._inner.errno)

    def __getattr__(self, name: str) -> Any:  # done_bytes, start_ns, stop_ns, checksum
        return getattr(self._inner, name) if self._inner is not None else 0


class FaultyEngine:
    """An engine that does what another one does, but for what was injected.

    Attributes:
        hits: actions that a fault was applied to, in order.
    """

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self.name, self.is_direct, self.thread_count = inner.name, inner.is_direct, inner.thread_count
        self.hits: list[tuple[str, str]] = []
        self._faults: list[Fault] = []
        self._held: list[Held] = []
        self._lock = threading.Lock()  # of the list: threads of a backend call while the test releases

    def inject(self, action: Action, kind: Kind, **rule: int) -> None:
        self._faults.append(Fault(action, kind, **rule))

    def clear(self) -> None:
        self._faults.clear()

    def release(self, seed: int | None = None) -> None:
        """Lets everything go on that is held, in the order of the calls or in one drawn by a seed."""
        with self._lock:
            held, self._held = self._held, []
        if seed is not None:
            random.Random(seed).shuffle(held)
        for transfer in held:
            transfer.release()

    def read(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool) -> Any:
        def call(at: int = offset) -> Transfer:
            return self.inner.read(file, at, address, size_bytes, with_checksum=with_checksum, is_mapped=is_mapped)

        return self._go("read", size_bytes, call, file, offset)

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool) -> Any:
        def call(at: int = offset) -> Transfer:
            return self.inner.write(file, at, address, size_bytes, with_checksum=with_checksum)

        return self._go("write", size_bytes, call, file, offset)

    def verify(self, file: OpenFile, offset: int, size_bytes: int) -> Any:
        def call(at: int = offset) -> Transfer:
            return self.inner.verify(file, at, size_bytes)

        return self._go("verify", size_bytes, call, file, offset)

    def copy(self, target_address: int, source_address: int, size_bytes: int, direction: Direction) -> Any:
        def call(_at: int = 0) -> Transfer:
            return self.inner.copy(target_address, source_address, size_bytes, direction)

        return self._go("copy", size_bytes, call)

    def joined_checksum(self, first: int, second: int, second_bytes: int) -> int:
        return self.inner.joined_checksum(first, second, second_bytes)

    def settle(self, timeout_s: float) -> bool:
        return self.inner.settle(timeout_s)

    def close(self) -> None:
        self.release()
        self.inner.close()

    def _go(
        self, action: Action, size_bytes: int, call: Callable[..., Transfer], file: OpenFile | None = None, offset: int = 0
    ) -> Any:
        hit = [fault for fault in self._faults if fault.action == action and fault.hits()]
        if not hit:
            return call()
        fault = hit[0]
        self.hits.append((action, fault.kind))
        if fault.kind == "errno":
            return Ended(size_bytes, 0, fault.errno)
        if fault.kind == "short":
            return Ended(size_bytes, size_bytes - 1, 0)
        if fault.kind in ("hang", "late"):
            held = Held(size_bytes, call, starts_now=fault.kind == "late")
            with self._lock:
                self._held.append(held)
            return held
        assert file is not None
        extent_bytes = align_up(size_bytes, file.block_bytes)
        if fault.kind == "misdirected":
            transfer = call(offset + extent_bytes)
        elif fault.kind == "lost":
            before = drive_bytes(file, offset, extent_bytes)
            transfer = call()
            transfer.wait()
            drive_write(file, offset, before)
        elif action == "write":
            transfer = call()
            transfer.wait()
            flip_bit(file, offset + size_bytes // 2)
        else:
            flip_bit(file, offset + size_bytes // 2, 8)  # another bit than a write's, so that two faults never cancel
            transfer = call()
            transfer.wait()
            flip_bit(file, offset + size_bytes // 2, 8)
        transfer.wait()
        return transfer


@contextmanager
def _buffered(file: OpenFile) -> Iterator[int]:
    """The file by other means than an engine's."""
    fd = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def drive_bytes(file: OpenFile, offset: int, size_bytes: int) -> bytes:
    with _buffered(file) as fd:
        return os.pread(fd, size_bytes, offset)


def drive_write(file: OpenFile, offset: int, data: bytes) -> None:
    with _buffered(file) as fd:
        assert os.pwrite(fd, data, offset) == len(data)
        os.fdatasync(fd)


def flip_bit(file: OpenFile, offset: int, bit: int = 4) -> None:
    drive_write(file, offset, bytes([drive_bytes(file, offset, 1)[0] ^ bit]))
