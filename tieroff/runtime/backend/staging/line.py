"""A line: tensors of one direction, moved piece by piece through slots of pinned memory, by a thread.

[Note: a thread's device]
A new thread's current device is the first one, whichever its process computes on. What PyTorch does on a stream of another it
does with that device as the current one, and then puts the first one back, where CUDA makes a context: half a GiB of a device
that other processes use. So each thread that works with the device begins by making it the current one.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from tieroff.runtime.backend.compute import entry_of
from tieroff.runtime.backend.staging.transfer import Part, StagedTransfer, StagingGate, StreamPart
from tieroff.runtime.backend.stamp import Anchor
from tieroff.storage.engines.base import Transfer

log = logging.getLogger("tieroff")

SLOTS = 4
"""Slots of a direction: two for the drive's queue, one for the copy under way, one on its way from one to the other."""

Move = Callable[[int, int, int], Transfer]


@dataclass(slots=True)
class Slot:
    """Pinned memory for one piece.

    Attributes:
        address: its first byte, on a page.
        memory: the same as a 1-d uint8 tensor.
        user: the second stage of the last piece that passed; None where there was none.
    """

    address: int
    memory: torch.Tensor
    user: Part | None = None

    def free(self) -> None:
        """Waits for the last piece's second stage, which may still read or write the memory.

        Raises:
            RuntimeError: of the device, which has failed.
        """
        if self.user is not None:
            self.user.wait()
            self.user = None


@dataclass(slots=True)
class Job:
    """What is asked of a line: one tensor.

    Attributes:
        transfer: what the asker holds.
        tensor: 1-d uint8, on the device; None once no piece of it is under way. The threads keep jobs for a moment longer, and
            the one that let go of its memory last may not be the one that waited for the copies from it.
        ready: behind compute's last use of the tensor's memory.
        anchor: what the device's times are counted from.
        move: starts the engine's transfer between the file and memory, called with (first byte of the tensor, address,
            size in bytes).
        piece_bytes: what moves at once: whole blocks of the file, that fit a slot.
    """

    transfer: StagedTransfer
    tensor: torch.Tensor | None
    ready: torch.Event
    anchor: Anchor
    move: Move
    piece_bytes: int


@dataclass(slots=True)
class Piece:
    """A range of a job's tensor.

    Attributes:
        job: whose.
        begin, end: first byte, and the one behind the last.
        slot: where it stays between the stages.
        first: what the first stage started; None where that failed, or was left out behind a failure.
    """

    job: Job
    begin: int
    end: int
    slot: Slot
    first: Part | None = None

    @property
    def on_device(self) -> torch.Tensor:
        """The piece in the device's memory."""
        assert self.job.tensor is not None
        return self.job.tensor[self.begin : self.end]

    @property
    def on_host(self) -> torch.Tensor:
        """The piece in its slot."""
        return self.slot.memory[: self.end - self.begin]

    def move(self) -> Transfer:
        """Starts the engine's transfer between slot and file."""
        moved = self.job.move(self.begin, self.slot.address, self.end - self.begin)
        self.job.transfer.note_moved(moved)
        return moved

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: torch.Stream) -> StreamPart:
        """Starts the device's copy between slot and tensor."""
        if self.begin == 0:  # later pieces come behind it on the same stream
            stream.wait_event(self.job.ready)
        with entry_of(stream), torch.no_grad():
            target.copy_(source, non_blocking=True)
            return StreamPart(self.job.anchor.stamp(stream))


class Line(ABC):
    """One direction: its slots, its stream and a thread for each stage. See [Note: two stages].

    Args:
        stream: the device's, for copies of this direction.
        memory: its slots side by side; on a page, whole pages each.
        name: of the threads.
    """

    def __init__(self, stream: torch.Stream, memory: torch.Tensor, name: str) -> None:
        self._stream, self._pid = stream, os.getpid()
        self._jobs: SimpleQueue[Job | StagingGate | None] = SimpleQueue()  # nothing interrupts its put
        self._begun: SimpleQueue[Piece | StagingGate | None] = SimpleQueue()
        self._slots: SimpleQueue[Slot] = SimpleQueue()  # those between whose stages no piece lies
        for part in memory.chunk(SLOTS):
            self._slots.put(Slot(part.data_ptr(), part))
        # A thread each: the second stage waits for the end of the first one of a piece, while the next piece's first begins.
        stages = (self._run_first_stage, self._run_second_stage)
        self._threads = [threading.Thread(target=self._run, args=(stage,), name=name, daemon=True) for stage in stages]
        for thread in self._threads:
            thread.start()
        # At exit: before the I/O engine closes, which the copies need, and before the interpreter ends, which a thread in the
        # middle of a call does not survive.
        atexit.register(self.close)

    def submit(self, job: Job) -> None:
        """Has a tensor moved, behind those that were asked for before."""
        self._jobs.put(job)

    def settle(self, timeout_s: float) -> bool:
        """Waits until the second stage of all that was asked for has begun; returns False after the time-out."""
        passed = StagingGate()
        self._jobs.put(passed)
        return passed.wait(timeout_s)

    def close(self) -> None:
        """Returns when everything that was asked for is over, and the threads have ended; also called at exit."""
        if os.getpid() != self._pid:  # a forked child has neither the threads nor the I/O engine
            return
        atexit.unregister(self.close)
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        # The threads began the last pieces' second stages, which use the slots' memory until they end.
        while not self._slots.empty():
            try:
                self._slots.get().free()
            except RuntimeError as error:
                log.debug("a copy by way of pinned memory did not end well: %s", error)

    @abstractmethod
    def _begin(self, piece: Piece) -> Part:
        """The first stage."""

    @abstractmethod
    def _carry_on(self, piece: Piece) -> Part:
        """The second stage; the first has ended well."""

    def _run(self, stage: Callable[[], None]) -> None:
        torch.accelerator.set_device_index(self._stream.device_index)  # see [Note: a thread's device]
        stage()

    def _run_first_stage(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, StagingGate):
                self._begun.put(job)
            else:
                self._begin_pieces(job)
            del job  # what its asker keeps: the next one may be long in coming
        self._begun.put(None)

    def _begin_pieces(self, job: Job) -> None:
        for begin in range(0, job.transfer.size_bytes, job.piece_bytes):
            slot = self._slots.get()
            try:
                slot.free()
            except RuntimeError as error:  # of a device that has failed; whoever waits for the last piece gets it, too
                if not job.transfer.errno:
                    job.transfer.fail(error)
            if begin == 0 and not job.transfer.claim():  # it was taken back
                self._slots.put(slot)
                job.tensor = None
                return
            piece = Piece(job, begin, min(begin + job.piece_bytes, job.transfer.size_bytes), slot)
            self._try_to_begin(piece)
            self._begun.put(piece)

    def _try_to_begin(self, piece: Piece) -> None:
        if piece.job.transfer.errno:
            return
        try:
            piece.first = self._begin(piece)
        except Exception as error:  # noqa: BLE001  the thread goes on; whoever waits for the tensor gets it
            piece.job.transfer.fail(error)

    def _run_second_stage(self) -> None:
        while (piece := self._begun.get()) is not None:
            if isinstance(piece, StagingGate):
                piece.open()
            else:
                self._pass(piece)
            del piece  # as above

    def _pass(self, piece: Piece) -> None:
        transfer, is_last = piece.job.transfer, piece.end == piece.job.transfer.size_bytes
        if piece.first is not None:
            self._try_to_carry_on(piece, piece.first)
        self._slots.put(piece.slot)
        if is_last:
            piece.job.tensor = None
            transfer.end()

    def _try_to_carry_on(self, piece: Piece, first: Part) -> None:
        transfer = piece.job.transfer
        try:
            first.wait()  # the second stage reads what the first wrote into the slot, and no stream orders a drive
            if not transfer.errno:
                last = piece.slot.user = self._carry_on(piece)
                transfer.note_last(last)
        except Exception as error:  # noqa: BLE001  as above
            transfer.fail(error)


class OutLine(Line):
    """From the device to files."""

    def _begin(self, piece: Piece) -> Part:
        return piece.copy(piece.on_host, piece.on_device, self._stream)

    def _carry_on(self, piece: Piece) -> Part:
        return piece.move()


class InLine(Line):
    """From files to the device."""

    def _begin(self, piece: Piece) -> Part:
        return piece.move()

    def _carry_on(self, piece: Piece) -> Part:
        return piece.copy(piece.on_device, piece.on_host, self._stream)
