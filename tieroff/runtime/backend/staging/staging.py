"""Copies between device memory and files by way of pinned slots: the link and the drive work at the same time.

[Note: two stages] Each direction has slots, pinned once, and two threads. A tensor is cut into pieces of a slot's size,
and the pieces of all tensors form one line, first in, first out:

           first stage                       second stage                       the slot is free again
    out    a copy of the device's stream     a write of the I/O engine          when the write has ended
    in     a read of the I/O engine          a copy of the device's stream      when the copy is over

One thread begins pieces as long as slots are free, the other waits for their first stage and starts the second. So
several pieces are with the slower of the two, of the same tensor or of the next, and a tensor moves at the slower one's
speed instead of at that of one after the other.

To a store, such a copy is a transfer like that of an I/O engine: with a checksum, an errno, and bytes that belong to the
transfer until it has ended.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tieroff.errors import StoreError
from tieroff.runtime.backend.staging.line import SLOTS, InLine, Job, Move, OutLine
from tieroff.runtime.backend.staging.transfer import StagedTransfer
from tieroff.runtime.backend.stamp import Anchor
from tieroff.runtime.tensors import outside_inference
from tieroff.storage.engines.base import Engine, OpenFile, Transfer
from tieroff.storage.host.slabs import Slabs
from tieroff.storage.memory import PAGE_BYTES

PIECE_BYTES_MAX = 8 * 2**20
"""Larger pieces gain nothing on either side, and make the first and the last one wait longer."""


@functools.lru_cache(maxsize=4096)
def pinned(address: int, size_bytes: int) -> torch.Tensor:
    """Returns memory at an address as a 1-d uint8 tensor, without owning it; the same one each time."""
    with outside_inference():
        return torch.frombuffer(_array_type(size_bytes).from_address(address), dtype=torch.uint8)


@functools.lru_cache(maxsize=4096)
def _array_type(size_bytes: int) -> type[ctypes.Array[ctypes.c_uint8]]:
    """Returns the type of so many bytes. One that is made for each copy would be garbage in cycles, a kilobyte each."""
    return ctypes.c_uint8 * size_bytes


class Staging:
    """Pinned memory and two lines through it.

    Args:
        size_bytes: of pinned memory; at least a page for every slot is taken.
        slabs: makes it.
        out, into: the device's streams of the two directions.
    """

    def __init__(self, size_bytes: int, slabs: Slabs, out: torch.Stream, into: torch.Stream) -> None:
        per_slot = min(size_bytes // (2 * SLOTS), PIECE_BYTES_MAX)
        self._slot_bytes = max(per_slot - per_slot % PAGE_BYTES, PAGE_BYTES)
        self._slabs = slabs
        self._slab = slabs.make(self._slot_bytes * 2 * SLOTS)
        front, back = pinned(self._slab.address, self._slot_bytes * 2 * SLOTS).chunk(2)
        self._out, self._in = OutLine(out, front, "tieroff-out"), InLine(into, back, "tieroff-in")

    def mover(self, tensor: torch.Tensor, ready: torch.Event, anchor: Anchor) -> Callable[[Engine], StagedMover]:
        """Returns what a store asks to move a device tensor (1-d uint8) between its memory and the store's files.

        Args:
            tensor: the bytes, on the device.
            ready: behind compute's last use of its memory.
            anchor: what the device's times are counted from.
        """
        return lambda engine: StagedMover(self, engine, tensor, ready, anchor)

    def submit(self, mover: StagedMover, file: OpenFile, *, is_out: bool, with_checksum: bool, move: Move) -> StagedTransfer:
        """Has a line move a tensor."""
        piece_bytes = self._slot_bytes - self._slot_bytes % file.block_bytes
        if not piece_bytes:
            raise StoreError(
                f"[nvme] staging: expected room for {2 * SLOTS} blocks of the drive of {file.block_bytes} bytes each, got "
                f"{2 * SLOTS * self._slot_bytes}; raise it",
                path=file.path,
            )
        transfer = StagedTransfer(mover.tensor.numel(), mover.engine.joined_checksum if with_checksum else None)
        line = self._out if is_out else self._in
        line.submit(Job(transfer, mover.tensor, mover.ready, mover.anchor, move, piece_bytes))
        return transfer

    def settle(self, timeout_s: float) -> bool:
        """Waits until the last copy or transfer of all that was asked for has begun; returns False after the time-out."""
        return self._out.settle(timeout_s) and self._in.settle(timeout_s)

    def close(self) -> None:
        """Ends the threads behind what they were asked for, and unpins the memory."""
        self._out.close()
        self._in.close()
        self._slabs.release(self._slab)


@dataclass(frozen=True, slots=True)
class StagedMover:
    """A Mover of one device tensor's bytes: the addresses that it is asked for are the tensor's own."""

    staging: Staging
    engine: Engine
    tensor: torch.Tensor
    ready: torch.Event
    anchor: Anchor

    def read(
        self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool, is_mapped: bool
    ) -> StagedTransfer:
        """Starts to read into the tensor."""
        engine = self.engine  # a job keeps `move` longer than the tensor

        def move(position: int, memory: int, count: int) -> Transfer:
            return engine.read(file, offset + position, memory, count, with_checksum=with_checksum, is_mapped=is_mapped)

        return self.staging.submit(self, file, is_out=False, with_checksum=with_checksum, move=move)

    def write(self, file: OpenFile, offset: int, address: int, size_bytes: int, *, with_checksum: bool) -> StagedTransfer:
        """Starts to write the tensor; the rest of the last block becomes zeros."""
        engine = self.engine

        def move(position: int, memory: int, count: int) -> Transfer:
            return engine.write(file, offset + position, memory, count, with_checksum=with_checksum)

        return self.staging.submit(self, file, is_out=True, with_checksum=with_checksum, move=move)
