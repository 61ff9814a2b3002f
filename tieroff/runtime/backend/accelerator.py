"""The accelerator backend: copies on streams of their own, ordered by events, memory from PyTorch's caching allocator.

It serves every device that `torch.accelerator` knows; what PyTorch has no common call for is in vendor.py.

[Note: who waits for whom]
Each direction has a stream, so copies of one direction run in order and both overlap with compute. A copy waits for the
compute stream's work so far (its source is being written, or its target's memory was just used), by an event. `wait`
makes the compute stream wait for the copy: whoever frees the device's side afterwards gives its memory to work that comes later
on that stream, so no `record_stream` is needed. The host does not wait, so the other side, pinned memory, stays taken until
the copy's event is over: the block knows of the copy (`Place.note`), and its store gives it to nobody else before. The compute
stream is that of the model's device, whichever device is the current one, in the thread that asks; of several, see [Note:
several streams] in compute.py.

[Note: how far the host is ahead] The host issues a step's work faster than the device does it. It may be a number of stamps
ahead (one or two per op, two per wait), which is more than any pause of the host lasts and less than its queue of kernels
holds. So what is under way at once is bounded: events, blocks of pinned memory that wait for their last copy, and the time
that somebody who stops the program waits. The device's memory does not depend on it, since that is given out in the order of
issue. Quiet steps have few stamps; a step's figures are read when the next one has been issued, so of these it is ahead by one.

[Note: other streams than compute's]
FSDP2 gathers and reduces on streams of its own, and calls the engine under them. The engine works as ever under compute's
(`computing`), the one that was current when the step began, so that all its memory is that stream's in the allocator. What it
fetched for an all-gather is ready for the stream that copies it once the fetch is over, without waiting for compute
(`Completion.wait` under that stream), and is kept until compute itself is behind the all-gather. A reduced gradient is copied
by the stream that reduced it, into compute's memory; only copies out wait for it (`wrote_elsewhere`), so backward goes on.

Where an I/O engine takes device memory itself, no stream knows of its transfers. So the host waits at both ends: a thread
waits for the event behind compute's work so far before it hands the memory to the engine, and `wait` returns when the
engine has ended, before anything that comes later is issued to the compute stream.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.errors import StoreError
from tieroff.runtime.backend.compute import ComputeStreams, entry_of
from tieroff.runtime.backend.place import Place
from tieroff.runtime.backend.staging.staging import Staging, pinned
from tieroff.runtime.backend.stamp import Anchor, Events, EventStamp, Stamp
from tieroff.runtime.backend.vendor import vendor_of
from tieroff.storage.completion import Completion
from tieroff.storage.engines.base import Engine, Mover

log = logging.getLogger("tieroff")

STAMPS_AHEAD_MAX = 512
"""By how many stamps the host may be ahead of the device."""

_STAMPS_AT_ONCE = 64
"""So many are waited for together: each question takes the host a microsecond."""


class _StreamCopy:
    """A copy between device and pinned memory, complete when its event is.

    Args:
        begun: None: nobody asks when it began; it counts as begun when it ended.
        ended: behind it on its stream.
        compute: comes behind it in `wait`.
        keep: lives until then.
    """

    def __init__(self, begun: EventStamp | None, ended: EventStamp, compute: ComputeStreams, keep: tuple[object, ...]) -> None:
        self._begun, self._ended, self._compute = begun, ended, compute
        self._keep: tuple[object, ...] = keep

    @property
    def start_ns(self) -> int:
        """When it began, by the device's clock; waits for it."""
        return (self._begun or self._ended).ns()

    @property
    def stop_ns(self) -> int:
        """When it ended, by the device's clock; waits for it."""
        return self._ended.ns()

    def done(self) -> bool:
        return bool(self._ended.event.query())

    def wait(self, timeout_s: float | None = None) -> None:
        """Orders the device's compute behind the copy; the host goes on."""
        self._compute.wait_event(self._ended.event)
        self._keep = ()

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Blocks the host until it is over: what a store asks before it gives the memory to somebody else."""
        self.join()
        return True

    def join(self) -> None:
        """Blocks the host until the bytes are there."""
        self._ended.event.synchronize()


class Ready(Protocol):
    """What has to be over before a transfer may start: an event on a stream."""

    def synchronize(self) -> None:
        """Blocks the host until it is over."""


class _EngineCopy:
    """A copy between device memory and a file that the I/O engine makes by itself, once the memory is ready for it."""

    def __init__(self, start: Future[Completion], what: str, size_bytes: int) -> None:
        self._start, self._what, self._size_bytes = start, what, size_bytes

    @property
    def start_ns(self) -> int:
        completion = self._started()
        return completion.start_ns if completion is not None else 0

    @property
    def stop_ns(self) -> int:
        completion = self._started()
        return completion.stop_ns if completion is not None else 0

    def done(self) -> bool:
        completion = self._started()
        return completion.done() if completion is not None else self._start.done()

    def wait(self, timeout_s: float | None = None) -> None:
        stop_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            completion = self._start.result(timeout_s)
        except FutureTimeout:
            raise StoreError(
                f"expected {self._what} of {self._size_bytes} bytes to start within {timeout_s} s, the device still works "
                "on its memory",
                size_bytes=self._size_bytes,
                errno=errno.ETIMEDOUT,
            ) from None
        completion.wait(None if stop_s is None else max(stop_s - time.monotonic(), 0.0))

    def _started(self) -> Completion | None:
        is_started = self._start.done() and self._start.exception() is None
        return self._start.result() if is_started else None


def copy_by_engine(
    thread: ThreadPoolExecutor, ready: Ready, start: Callable[[], Completion], what: str, size_bytes: int
) -> _EngineCopy:
    """Has a transfer of device memory start as soon as it may.

    Args:
        thread: waits for `ready`; with one thread transfers start in the order of these calls, and many are under way.
        ready: what the memory's last user ends with; see [Note: who waits for whom].
        start: hands the memory to the engine, and keeps it alive until the transfer has ended.
        what: for messages.
        size_bytes: of the transfer.
    """

    def begin() -> Completion:
        ready.synchronize()
        return start()

    return _EngineCopy(thread.submit(begin), what, size_bytes)


def _nothing() -> None:
    """What a thread does whose end alone is waited for."""


class AcceleratorBackend:
    """One device that is not the host.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.name = device, device.type
        self._vendor = vendor_of(device)
        self.slabs, self.near_cpus = self._vendor.slabs(device), self._vendor.near_cpus(device)
        self.has_host_tier = not self._vendor.is_integrated(device)
        # One each way, so that the link carries both at once and neither holds compute up.
        self._out, self._in = torch.Stream(device), torch.Stream(device)
        self._compute, self._events = ComputeStreams(device), Events(device)
        self._anchor = Anchor(self._events, self._compute.current())
        self._keeps_times = True
        self._ahead: deque[EventStamp] = deque()
        self._joined: torch.Stream | None = None
        self._written: list[torch.Event] = []  # by other streams; see [Note: other streams than compute's]
        self._staging: Staging | None = None
        self._engines = 0
        self._start_threads()

    def _start_threads(self) -> None:
        # For engines that take device memory: a thread each way waits for events, so that the one that trains does not.
        begin = torch.accelerator.set_device_index, (self.device.index,)  # see [Note: a thread's device] in staging/line.py
        self._writers = ThreadPoolExecutor(1, "tieroff-out", *begin)
        self._readers = ThreadPoolExecutor(1, "tieroff-in", *begin)

    def use_staging(self, size_bytes: int) -> None:
        """Makes the pinned memory through which bytes pass on their way to files; several engines use the first one's."""
        if size_bytes and self._staging is None:
            self._staging = Staging(size_bytes, self.slabs, self._out, self._in)
        self._engines += 1

    def empty(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def placeholder(self, value: torch.Tensor, message: str) -> torch.Tensor:
        with torch.no_grad(), _disable_current_modes():
            storage: Any = torch._C._construct_storage_from_data_pointer(0, self.device, value.untyped_storage().nbytes())
            placeholder = torch.empty(0, dtype=value.dtype, device=self.device)
            placeholder.set_(storage, value.storage_offset(), value.size(), value.stride())
            self._vendor.forbid_access(storage, message)  # last: `set_` looks at the address
        return placeholder

    def copy_out(self, source: torch.Tensor, place: Place) -> Completion:
        address = place.address
        if address is not None:
            for event in self._others_writes():  # `_on_stream` orders the copy behind compute alone
                self._out.wait_event(event)
            copy = self._on_stream(self._out, pinned(address, source.numel()), source)
            place.note(copy)  # the host goes on: the block is given to nobody else before this is over
            return copy
        ready = self._ready(after_writes=True)
        if place.takes_device_memory:
            return copy_by_engine(
                self._writers, ready, lambda: place.write(source.data_ptr(), source), "a copy to a file", source.numel()
            )
        return place.write(source.data_ptr(), source, self._mover(source, ready))

    def copy_in(self, place: Place, target: torch.Tensor) -> Completion:
        address = place.address
        if address is not None:
            copy = self._on_stream(self._in, target, pinned(address, target.numel()))
            place.note(copy)
            return copy
        ready = self._ready()
        if place.takes_device_memory:
            return copy_by_engine(
                self._readers, ready, lambda: place.read(target.data_ptr(), target), "a copy from a file", target.numel()
            )
        return place.read(target.data_ptr(), target, self._mover(target, ready))

    def begin_step(self, *, keeps_times: bool = True) -> None:
        self._keeps_times = keeps_times
        self._compute.begin_step()
        self._events.begin_step()
        self._anchor = Anchor(self._events, self._compute.current(), self._anchor)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        if self._compute.has(self._compute.callers):
            yield
            return
        with entry_of(self._compute.first):
            yield

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        current = self._compute.callers
        if self._compute.has(current):
            yield
            return
        self._compute.lead(current)
        try:
            yield
        finally:
            self._compute.follow(current.record_event())

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        with self.computing():
            copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        current = self._compute.callers
        if not self._compute.has(current):
            self._compute.lead(current)  # the copy's memory was in use until there
            # Of several reductions (HSDP) the first one's stream has allocated it, and the last one's reads it here.
            tensor.record_stream(current)
        with torch.no_grad():
            copy.copy_(tensor)
        return copy

    def wrote_elsewhere(self) -> None:
        current = self._compute.callers
        if not self._compute.has(current):
            self._written.append(current.record_event())

    def stamp(self) -> Stamp | None:
        stamp = self._anchor.stamp(self._compute.current())
        ahead = self._ahead
        ahead.append(stamp)
        if len(ahead) > STAMPS_AHEAD_MAX:  # see [Note: how far the host is ahead]
            last = [ahead.popleft() for _ in range(_STAMPS_AT_ONCE)][-1]
            last.event.synchronize()
        return stamp

    def order_frees(self) -> None:
        self._compute.join()

    def flush(self) -> None:
        self._out.synchronize()

    def tune_allocator(self, mmap_threshold_bytes: int | None) -> None:
        """Nothing to tune: device memory does not come from the C library."""

    def keep_freed(self, limit_bytes: int) -> None:
        """Nothing to say: torch's caching allocator keeps freed memory, inside what it has reserved."""

    def return_freed(self) -> None:
        """Nothing to return: the budget is about the device's memory."""

    def allocated_bytes(self) -> int | None:
        figures = self._figures()
        if figures is None:
            return None
        lent, asked = figures["allocated_bytes"], figures["requested_bytes"]
        # A large block may have up to a MiB more than was asked for, as the allocator found it: that is nobody's, and as more
        # tensors are there at once, there is more of it.
        return int(lent["all"]["current"] - max(lent["large_pool"]["current"] - asked["large_pool"]["current"], 0))

    def requested_most(self) -> int | None:
        figures = self._figures()
        return int(figures["requested_bytes"]["all"]["peak"]) if figures is not None else None

    def _figures(self) -> dict[str, Any] | None:
        """Returns what PyTorch's allocator counts; None where it does not."""
        # As `torch.accelerator.memory_stats`, which flattens and sorts all figures: 0.3 ms.
        try:
            return torch._C._accelerator_getDeviceStats(self.device.index)
        except (RuntimeError, AttributeError, NotImplementedError):
            return None  # not for this device, or a torch before it was counted

    def allocated_most(self) -> tuple[int, int]:
        memory = torch.accelerator
        return memory.max_memory_reserved(self.device), memory.max_memory_allocated(self.device)

    def gave(self, device: torch.Tensor) -> bool:
        return True

    def settle(self, timeout_s: float) -> None:
        marks = [threads.submit(_nothing) for threads in (self._writers, self._readers)]  # behind all that they were given
        if wait(marks, timeout_s).not_done or (self._staging is not None and not self._staging.settle(timeout_s)):
            raise StoreError(
                f"copies between {self.device} and files have not ended {timeout_s:g} s after an exception; the drive may hang",
                errno=errno.ETIMEDOUT,
            )
        torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        torch.accelerator.synchronize(self.device)  # the memory that copies use goes with what closes next
        self._engines = max(self._engines - 1, 0)
        if self._engines:
            return
        self._writers.shutdown()
        self._readers.shutdown()
        self._start_threads()  # none starts before it has something to do
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _ready(self, *, after_writes: bool = False) -> torch.Event:
        """Returns an event behind all that compute has been given so far; `after_writes`: and what other streams wrote."""
        self._compute.join()
        event = torch.Event(self.device, enable_timing=False)
        event.record(self._compute.current())
        return self._behind_writes(event) if after_writes else event

    def _others_writes(self) -> list[torch.Event]:
        """Returns events behind what other streams wrote and may not be through with."""
        if self._written:
            self._written = [event for event in self._written if not event.query()]
        return self._written

    def _behind_writes(self, ready: torch.Event) -> torch.Event:
        """Returns an event behind this one and what other streams wrote."""
        written = self._others_writes()
        if not written:
            return ready
        if self._joined is None:  # a stream of its own: compute must not wait for what others write
            self._joined = torch.Stream(self.device)
        for event in (ready, *written):
            self._joined.wait_event(event)
        joined = torch.Event(self.device, enable_timing=False)
        joined.record(self._joined)
        return joined

    def _on_stream(self, stream: torch.Stream, target: torch.Tensor, source: torch.Tensor) -> _StreamCopy:
        """Copies bytes, which need no gradient, behind all that compute has been given so far."""
        # Behind what compute was given so far: out, it writes the source; in, it may still use what had the target's memory.
        self._compute.join()
        stream.wait_stream(self._compute.current())
        with entry_of(stream), torch._C.DisableTorchFunction():  # whoever changes the program's functions means its own
            begun = self._anchor.stamp(stream) if self._keeps_times else None
            target.copy_(source, non_blocking=True)
            ended = self._anchor.stamp(stream)
        return _StreamCopy(begun, ended, self._compute, (target, source))

    def _mover(self, tensor: torch.Tensor, ready: torch.Event) -> Callable[[Engine], Mover]:
        if self._staging is None:
            raise StoreError("expected staging memory for copies to files; set [nvme] staging above 0")
        return self._staging.mover(tensor, ready, self._anchor)
