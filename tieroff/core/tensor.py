"""Tiers, tensor classes and the tensors of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """Where bytes live, fastest first. HOST is pinned host memory."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


class TensorClass(StrEnum):
    """What a tensor is to the step. INPUT is counted and never moved."""

    ACTIVATION = "activation"
    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    INPUT = "input"


UNIT_BYTES = 512
"""PyTorch's allocators give memory of an accelerator in multiples of this."""


def allocated_bytes(size_bytes: int, device_type: str) -> int:
    """Returns what a storage takes of a device of this type, as PyTorch's allocator for it counts."""
    return size_bytes if device_type == "cpu" else -(-size_bytes // UNIT_BYTES) * UNIT_BYTES


@dataclass(frozen=True, slots=True)
class Tensor:
    """One storage that a plan may place.

    Attributes:
        name: unique within its trace.
        size_bytes: bytes of the whole storage, > 0.
        kind: its class.
        is_persistent: outlives the step; its idle time wraps round the ring.
        is_movable: False pins it to the device for as long as it lives.
        holds: half-open op intervals, sorted and disjoint, in which the program itself keeps the tensor on the device
            beyond the ops that read or write it.
        owner: index of another tensor that decides this one's tier where the executor says so (a gradient's
            parameter), or -1.
        lives_until: a tensor that is not persistent exists up to this op (exclusive) though nothing uses it after its
            last required interval: a gradient until it is cleared, an activation of a graph that is kept. -1: it ends
            with its last required interval. The time between is a gap without a next use.
        label: what it is, for people, such as "layers.3.mlp: saved by gelu (model.py:41)"; "" where its name says it. Not part
            of a trace's structure.
    """

    name: str
    size_bytes: int
    kind: TensorClass
    is_persistent: bool = False
    is_movable: bool = True
    holds: tuple[tuple[int, int], ...] = ()
    owner: int = -1
    lives_until: int = -1
    label: str = ""

    @property
    def shown(self) -> str:
        """What it is called before people."""
        return self.label or self.name

    def part_bytes(self, first_byte: int, stop_byte: int) -> int:
        """Returns the bytes of a range of the tensor; `stop_byte` 0 means up to its end."""
        return (stop_byte or self.size_bytes) - first_byte
