"""How fast the CPU updates parameters in host memory: with that memory to itself, and beside copies both ways.

Both are of AdamW in fp32, by the threads that a run has. Copies and updates share the memory, so the second is less than the
first where it is full; what both move then is all that it carries.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tieroff.core.machine import UPDATE_PASSES, Machine
from tieroff.core.tensor import Tier
from tieroff.probe.links import near_cpus, pinned, touched
from tieroff.storage.host import numa
from tieroff.updates import rule as rules
from tieroff.updates.native import HAS_UPDATES
from tieroff.updates.pool import make_pool

TENSOR_BYTES = 64 * 2**20
"""Of a parameter, its gradient, each moment, and each end of a copy: more than caches keep."""

STATE_TENSORS = 2
TENSORS = 2 + STATE_TENSORS
_GRANULE = 2**16
_ROUNDS_MIN = 3
_WAIT_S = 600.0
_ARITHMETIC = "contracted"  # rounds once per result; the others are as fast in fp32


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """What was measured; zeros where this build has no kernels.

    Attributes:
        state_bytes_per_s: bytes of optimizer state that are updated while nothing is copied.
        beside_bytes_per_s: the same while copies go both ways.
        copied_bytes_per_s: what those copy, both ways together.
    """

    state_bytes_per_s: int = 0
    beside_bytes_per_s: int = 0
    copied_bytes_per_s: int = 0

    def of(self, machine: Machine) -> Machine:
        """Returns a machine with these figures; its `device_type` says what a copy takes of the host's memory."""
        copied = self.copied_bytes_per_s * machine.memory_passes(Tier.DEVICE, Tier.HOST)
        memory = round(self.beside_bytes_per_s * UPDATE_PASSES + copied)
        return replace(machine, cpu_update_bytes_per_s=self.state_bytes_per_s, host_memory_bytes_per_s=memory)


def measure_updates(
    device: str, seconds: float, *, host_bytes: int = TENSORS * TENSOR_BYTES, copy_bytes: int = TENSOR_BYTES
) -> UpdateRates:
    """Returns the medians of rounds of updates, alone and beside copies in turn, so that both meet the same machine.

    Args:
        device: "cpu", where copies are those of two threads, or the kind of torch's accelerator, such as "cuda".
        seconds: time to spend, roughly.
        host_bytes: of memory that updates may take meanwhile. With little of it they find their tensors in caches, as those
            of a model do whose state is as small.
        copy_bytes: of each end of a copy.
    """
    if not HAS_UPDATES:
        return UpdateRates()
    with numa.running_on(near_cpus(device)):
        return _measured(device, seconds, host_bytes, copy_bytes)


def _measured(device: str, seconds: float, host_bytes: int, copy_bytes: int) -> UpdateRates:
    tensor_bytes = max(min(host_bytes // TENSORS, TENSOR_BYTES) // _GRANULE * _GRANULE, _GRANULE)
    tensors = [touched(tensor_bytes) for _ in range(TENSORS)]
    for tensor in tensors:
        tensor.view(np.float32).fill(0.01)  # neither denormal nor on its way there
    addresses = [tensor.ctypes.data for tensor in tensors]
    rule = rules.adam(2.0, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, decouples=True)
    part = rule.part(_ARITHMETIC, "float32", tensor_bytes // 4, addresses, addresses)
    pool = make_pool()

    def update() -> float:
        begin = time.perf_counter()
        pool.wait(pool.submit([part], [], []), _WAIT_S)
        return time.perf_counter() - begin

    alone: list[float] = []
    beside: list[float] = []
    copied: list[float] = []
    copies = _Copies(device, copy_bytes)
    try:
        update()  # warms up
        stop = time.perf_counter() + seconds
        while len(alone) < _ROUNDS_MIN or time.perf_counter() < stop:
            alone.append(update())
            with copies.under_way():
                before, begin = copies.copied_bytes, time.perf_counter()
                beside.append(update())
                copied.append((copies.copied_bytes - before) / (time.perf_counter() - begin))
    finally:
        pool.close()
    state_bytes = STATE_TENSORS * tensor_bytes
    return UpdateRates(
        int(state_bytes / statistics.median(alone)),
        int(state_bytes / statistics.median(beside)),
        int(statistics.median(copied)),
    )


class _Copies:
    """Copies both ways, as many as the links take.

    Attributes:
        copied_bytes: by those that are over.
    """

    def __init__(self, device: str, copy_bytes: int) -> None:
        self.copied_bytes = 0
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._lanes = [_memory_copy(copy_bytes) for _ in range(2)] if device == "cpu" else [_device_copies(device, copy_bytes)]

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Copies run, the first of each lane over."""
        self._is_over.clear()
        begun = threading.Barrier(len(self._lanes) + 1)
        threads = [threading.Thread(target=self._run, args=(lane, begun), name="tieroff-probe-copy") for lane in self._lanes]
        for thread in threads:
            thread.start()
        try:
            begun.wait()
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def _run(self, copy: Callable[[], int], begun: threading.Barrier) -> None:
        copy()
        begun.wait()
        while not self._is_over.is_set():
            moved = copy()
            with self._lock:
                self.copied_bytes += moved


def _memory_copy(size_bytes: int) -> Callable[[], int]:
    source, target = touched(size_bytes), touched(size_bytes)

    def copy() -> int:
        np.copyto(target, source)
        return size_bytes

    return copy


def _device_copies(device: str, size_bytes: int) -> Callable[[], int]:
    """Returns what copies both ways at once, each way on a stream of its own."""
    import torch

    below = [pinned(size_bytes) for _ in range(2)]
    resident = [torch.ones(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)]
    torch.accelerator.synchronize()  # the buffers above were filled on the current stream

    def copy() -> int:
        torch.accelerator.set_device_index(streams[0].device_index)  # of a thread that begins with the first device
        for stream, target, source in zip(streams, (below[0], resident[1]), (resident[0], below[1]), strict=True):
            with stream:
                target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        return 2 * size_bytes

    return copy
