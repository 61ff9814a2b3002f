"""Collectives between processes that have a simulated device each: asynchronous, and staged through pinned memory.

`register()` once per process, then `torch.distributed.init_process_group(communication.NAME, ...)`.
"""

from __future__ import annotations

import threading
from _queue import SimpleQueue
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import sim, threads

NAME = "simcomm"

Collective = Callable[[list[Tensor], list[Tensor]], object]
"""Fills what this rank gets from what it gives, both on the host, and returns when that is done."""


@dataclass
class _Job:
    """One collective on its way from the caller to the group's thread and back.

    Attributes:
        given, wanted: contiguous tensors of the device, kept until the caller has waited: their memory is its stream's.
        ready: of the caller's stream, after what was submitted before the collective.
        future: what DDP's reducer asks for: whoever waits for it has its stream wait for the last copy, as on CUDA.
        finished: of the group's stream, after the last copy to the device; None where the job failed.
        error: why it failed.
        done: held until the thread is through with the job.
    """

    collective: Collective
    given: list[Tensor]
    wanted: list[Tensor]
    ready: torch.Event
    future: torch.futures.Future[list[Tensor]]
    finished: torch.Event | None = None
    error: Exception | None = None
    # The detector does not see this lock, nor the C queue: a collective tells the host nothing of what the streams have done,
    # and what a caller orders by luck of the hand-over shall be a race.
    done: Any = field(default_factory=threads._RawLock)


class DeviceWork(dist.Work):
    """A collective that was begun: `wait` has the current stream wait for it."""

    def __init__(self, job: _Job) -> None:
        super().__init__()
        self._job: _Job | None = job
        self._future = job.future

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Returns a future of what the collective fills."""
        return self._future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Orders the current stream after the collective.

        Raises:
            RuntimeError: the collective failed; from what it raised.
        """
        if self._job is None:
            return True
        # Until the copy back is submitted there is no event to wait for.
        with self._job.done:
            pass
        if self._job.finished is None:
            raise RuntimeError("a collective of the simulated device failed") from self._job.error
        torch.accelerator.current_stream().wait_event(self._job.finished)
        # Given back here, not by the group's thread, which may drop the job later: memory is the same in every run.
        self._job.given.clear()
        self._job.wanted.clear()
        self._job = None
        return True


class DeviceGroup(dist.ProcessGroup):
    """Collectives of one group, each after the other on a thread and a stream of its own; gloo carries the bytes.

    Attributes:
        sent_bytes: the fewest that this rank sends for all collectives so far.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # what a class in Python is made with
        self.sent_bytes = 0.0
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream = torch.Stream(torch.accelerator.current_accelerator())
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=NAME, daemon=True)
        self._thread.start()

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override]
        # Otherwise its backends are asked, and it has none.
        return dist.distributed_c10d._get_process_group_name(self)

    def shutdown(self) -> None:
        """Ends the thread after the collectives that were begun."""
        self._jobs.put(None)
        self._thread.join()

    # -- collectives, by the names that PyTorch calls ------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> DeviceWork:  # type: ignore[override]
        def run(given: list[Tensor], wanted: list[Tensor]) -> None:
            _copy(given, wanted)
            self._gloo.allreduce(wanted, opts).wait()

        return self._begin(run, tensors, tensors, 2 * self._others_share() * _bytes(tensors))

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> DeviceWork:
        def run(given: list[Tensor], wanted: list[Tensor]) -> None:
            for part, whole in zip(given, wanted, strict=True):
                self._gloo._allgather_base(whole, part).wait()

        return self._begin(run, inputs, outputs, (self.size() - 1) * _bytes(inputs))

    def reduce_scatter_tensor_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], opts: dist.ReduceScatterOptions
    ) -> DeviceWork:
        def run(given: list[Tensor], wanted: list[Tensor]) -> None:
            for whole, part in zip(given, wanted, strict=True):
                self._gloo._reduce_scatter_base(part, whole, opts).wait()

        return self._begin(run, inputs, outputs, self._others_share() * _bytes(inputs))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> DeviceWork:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def reduce_scatter_single(  # type: ignore[override]
        self, output: Tensor, input: Tensor, opts: dist.ReduceScatterOptions
    ) -> DeviceWork:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    # What versions of PyTorch before 2.13 look for.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def alltoall_base(  # type: ignore[override]
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: dist.AllToAllOptions
    ) -> DeviceWork:
        def run(given: list[Tensor], wanted: list[Tensor]) -> None:
            self._gloo.alltoall_base(wanted[0], given[0], output_sizes, input_sizes, opts).wait()

        own = input_sizes[self.rank()] / max(1, input.shape[0]) if input_sizes else 1 / self.size()
        return self._begin(run, [input], [output], (1 - own) * _bytes([input]))

    # Later versions of PyTorch look for this name in Python.
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def broadcast(self, tensors: list[Tensor], opts: dist.BroadcastOptions) -> DeviceWork:  # type: ignore[override]
        is_root = opts.rootRank == self.rank()

        def run(given: list[Tensor], wanted: list[Tensor]) -> None:
            _copy(given, wanted)
            self._gloo.broadcast(wanted, opts).wait()

        return self._begin(run, tensors, tensors, is_root * (self.size() - 1) * _bytes(tensors))

    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: dist.ScatterOptions
    ) -> DeviceWork:
        parts = inputs[0] if inputs else []

        def run(given: list[Tensor], wanted: list[Tensor]) -> None:
            self._gloo.scatter(wanted, [given] if given else [], opts).wait()

        return self._begin(run, parts, outputs, self._others_share() * _bytes(parts))

    def barrier(self, opts: dist.BarrierOptions) -> DeviceWork:  # type: ignore[override]
        return self._begin(lambda given, wanted: self._gloo.barrier().wait(), [], [], 0.0)

    # -- the caller's thread -------------------------------------------------------------------------------------------

    def _others_share(self) -> float:
        return 1 - 1 / self.size()

    def _begin(self, collective: Collective, given: list[Tensor], wanted: list[Tensor], sent_bytes: float) -> DeviceWork:
        for tensor in (*given, *wanted):
            if tensor.device != self._stream.device or not tensor.is_contiguous():
                kind = "contiguous" if tensor.is_contiguous() else "strided"
                raise ValueError(f"expected a contiguous tensor of {self._stream.device}, got a {kind} one of {tensor.device}")
        self.sent_bytes += sent_bytes
        ready = torch.accelerator.current_stream().record_event()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._stream.device])
        job = _Job(collective, [t.detach() for t in given], [t.detach() for t in wanted], ready, future)
        job.done.acquire()
        self._jobs.put(job)
        return DeviceWork(job)

    # -- the group's thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with torch.no_grad(), self._stream, sim.label(NAME):
                    job.finished = self._run(job)
                    job.future.set_result(job.wanted)
            except Exception as error:  # whoever waits raises it
                job.error = error
                job.future.set_exception(error)  # type: ignore[arg-type]  # its stub says a result
            finally:
                job.done.release()

    def _run(self, job: _Job) -> torch.Event:
        self._stream.wait_event(job.ready)
        staged = [_pinned(tensor).copy_(tensor, non_blocking=True) for tensor in job.given]
        # Gloo reads what these copies write.
        self._stream.record_event().synchronize()
        # Gloo's own threads touch memory that the detector does not watch; this thread's copies are seen.
        given = [tensor.clone() for tensor in staged]
        wanted = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in job.wanted]
        job.collective(given, wanted)
        for tensor, value in zip(job.wanted, wanted, strict=True):
            tensor.copy_(_pinned(tensor).copy_(value), non_blocking=True)
        return self._stream.record_event()


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _copy(sources: Iterable[Tensor], targets: Iterable[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def register() -> None:
    """Tells PyTorch of the groups, for the simulated device."""
    dist.Backend.register_backend(NAME, DeviceGroup, devices=[sim.NAME])
