"""Bandwidth of copies between the device and host memory, each way alone and both at once."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tieroff.storage.buffers import allocate
from tieroff.storage.host import numa

if TYPE_CHECKING:
    import torch

DEVICE_COPY_BYTES = 16 * 2**20
MEMORY_COPY_BYTES = 8 * 2**20
"""Small, since a run on the CPU is measured within its own budget; larger than what a core's caches keep."""

LATENCY_COPIES = 32
MEMORY_THREADS_MAX = 8


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What the host link moves.

    Attributes:
        d2h_bytes_per_s, h2d_bytes_per_s: bandwidth each way alone.
        d2h_latency_s, h2d_latency_s: seconds that a copy of one byte takes.
        duplex_share: what both ways at once move, over the sum of each alone, at most 1.
    """

    d2h_bytes_per_s: int
    h2d_bytes_per_s: int
    d2h_latency_s: float = 0.0
    h2d_latency_s: float = 0.0
    duplex_share: float = 1.0


def measure_links(device: str, seconds: float) -> LinkRates:
    """Returns the rates of the link between the device and host memory.

    Args:
        device: "cpu", where both ends are ordinary memory, or the kind of torch's accelerator, such as "cuda".
        seconds: time to spend, roughly.
    """
    if device == "cpu":
        return _measure_memory(seconds)
    with numa.running_on(near_cpus(device)):
        return _measure_accelerator(device, seconds)


def near_cpus(device: str) -> frozenset[int]:
    """Returns the CPUs of the NUMA node that the device hangs on, as a run has it; none where there is nothing to choose."""
    if device != "cuda":
        return frozenset()
    import torch

    properties: Any = torch.cuda.get_device_properties()  # its stub lacks what is asked for
    return numa.cpus_near(numa.pci_address(properties))


def pinned(size_bytes: int) -> torch.Tensor:
    """Returns pinned memory that this thread alone has written: its pages lie near it, as PyTorch's other threads may not."""
    import torch

    memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    memory.numpy().fill(1)
    return memory


def measure_memory(seconds: float) -> float:
    """Returns the bytes per second that several cores copy at once: no drive is read faster than that."""
    count = min(MEMORY_THREADS_MAX, len(os.sched_getaffinity(0)))
    return sum(_copies_at_once(count, seconds))


def _copies_at_once(count: int, seconds: float) -> list[float]:
    """Returns the bytes per second of each of several threads that copy at the same time."""
    rates = [0.0] * count

    def run(lane: int) -> None:
        source, target = touched(MEMORY_COPY_BYTES), touched(MEMORY_COPY_BYTES)
        rates[lane] = _rate(lambda: np.copyto(target, source), MEMORY_COPY_BYTES, seconds)

    threads = [threading.Thread(target=run, args=(lane,), name=f"tieroff-probe-{lane}") for lane in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rates


def _measure_memory(seconds: float) -> LinkRates:
    """A copy between two buffers on one thread, and on two threads at once, as the CPU backend's workers do."""
    [alone] = _copies_at_once(1, seconds / 2)
    together = sum(_copies_at_once(2, seconds / 2))
    source, target = touched(1), touched(1)
    latency_s = statistics.median(_seconds(lambda: np.copyto(target[:1], source[:1])) for _ in range(9))
    return LinkRates(int(alone), int(alone), latency_s, latency_s, _share(together, 2 * alone))


def touched(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns memory whose pages are there, and that goes back to the system when it is dropped.

    Not from malloc: freeing large blocks there raises the size from which it maps memory for the rest of the process.
    """
    array = np.frombuffer(allocate(size_bytes), dtype=np.uint8)
    array.fill(1)
    return array


def _measure_accelerator(device: str, seconds: float) -> LinkRates:
    """Copies between pinned memory and the device on two streams, timed from the host around a synchronisation."""
    import torch

    below = [pinned(DEVICE_COPY_BYTES) for _ in range(2)]
    resident = [torch.ones(DEVICE_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)]
    torch.accelerator.synchronize()  # the buffers above were filled on the current stream

    def issue(direction: int, size_bytes: int) -> None:
        with streams[direction]:
            source, target = (resident, below) if direction == 0 else (below, resident)
            target[direction][:size_bytes].copy_(source[direction][:size_bytes], non_blocking=True)

    def alone(direction: int, size_bytes: int = DEVICE_COPY_BYTES) -> None:
        issue(direction, size_bytes)
        streams[direction].synchronize()

    def both() -> None:
        issue(0, DEVICE_COPY_BYTES)
        issue(1, DEVICE_COPY_BYTES)
        for stream in streams:
            stream.synchronize()

    def rate(direction: int) -> float:
        return _rate(lambda: alone(direction), DEVICE_COPY_BYTES, seconds / 3)

    def latency_s(direction: int) -> float:
        return statistics.median(_seconds(lambda: alone(direction, 1)) for _ in range(LATENCY_COPIES))

    d2h, h2d = rate(0), rate(1)
    together = 2 * _rate(both, DEVICE_COPY_BYTES, seconds / 3)
    return LinkRates(int(d2h), int(h2d), latency_s(0), latency_s(1), _share(together, d2h + h2d))


def _share(together: float, sum_alone: float) -> float:
    return min(1.0, together / sum_alone)


def _rate(copy: Callable[[], None], size_bytes: int, seconds: float) -> float:
    """Returns bytes per second of the median copy of `size_bytes`; the first one, which warms up, is left out."""
    copy()
    stop = time.perf_counter() + seconds
    times = [_seconds(copy)]
    while time.perf_counter() < stop:
        times.append(_seconds(copy))
    return size_bytes / statistics.median(times)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
