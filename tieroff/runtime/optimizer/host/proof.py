"""Whether updates in host memory have the bits of the optimizer's own: found by comparison, never assumed.

[Note: proof]
The device updates as ever while the CPU updates copies in every arithmetic that there is; then all elements of parameters and
state are compared. The first update of a parameter proves nothing: from moments that are zero, roundings that differ give the
same. So the two updates after it count, and one of them alone does not. Where one arithmetic is equal in both, it is the
proven one; where none is, the device goes on to update. What was proven is compared again from time to time: another build of
a library, or another device, may round in another way. An arithmetic that differed once is not tried again, unless the
nearest is wanted, so that most of the work is one update by the CPU.

| state | next |
|---|---|
| open: fewer than two updates compared | proven, or refused |
| proven: an arithmetic had all bits | refused, by a comparison that fails |
| refused: the nearest, and the share of elements that differ | for good |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tieroff.runtime.optimizer.host.capture import Capture, Kind
from tieroff.updates.arithmetic import candidates

UPDATES_COMPARED = 2
"""That prove an arithmetic, each of a parameter that has moments already."""

_SLICE_ELEMENTS = 1 << 20  # compared at once: what that takes is next to nothing beside the copies


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comparison found for one kind of update.

    Attributes:
        arithmetic: the one to update with in host memory; None leaves the update to the device.
        nearest: the one whose results differ in the fewest elements.
        share: of elements, of the tensor where most of them differ, by `nearest`.
    """

    arithmetic: str | None
    nearest: str
    share: float


@dataclass(frozen=True, slots=True)
class Trial:
    """Copies of what an update reads, made before the device's update; `end` compares its results with theirs."""

    captures: tuple[Capture, ...]
    copies: tuple[tuple[torch.Tensor, ...], ...]


def copied_bytes(captures: Sequence[Capture]) -> int:
    """Returns the host memory that a trial of these takes."""
    return sum(tensor.numel() * tensor.element_size() for capture in captures for tensor in capture.tensors)


@dataclass(slots=True)
class _Kind:
    shares: dict[str, float]
    steps: set[int] = field(default_factory=set)
    is_refused: bool = False


class Proof:
    """The verdicts of an optimizer; see [Note: proof]."""

    def __init__(self, *, exact: bool = True, only: Sequence[str] | None = None) -> None:
        """Begins with nothing proven.

        Args:
            exact: False takes the nearest arithmetic where none has all bits.
            only: the arithmetics to try; None tries all that a rule has.
        """
        self._exact = exact
        self._only = only
        self._kinds: dict[tuple[Any, ...], _Kind] = {}

    def begin(self, captures: Sequence[Capture]) -> Trial:
        """Copies what these updates read; the device updates next."""
        copies = tuple(tuple(tensor.to("cpu", copy=True) for tensor in c.tensors) for c in captures)
        return Trial(tuple(captures), copies)

    def end(self, trial: Trial, step: int) -> None:
        """Compares what the device made with what every arithmetic makes of the copies.

        Args:
            trial: from before the device's update.
            step: the number of the update; several trials of one step count as one update.
        """
        for capture, copies in zip(trial.captures, trial.copies, strict=True):
            names = self._only or candidates(capture.rule)
            kind = self._kinds.setdefault(capture.kind, _Kind(dict.fromkeys(names, 0.0)))
            written = [tensor.to("cpu") for index, tensor in enumerate(capture.tensors) if index != 1]
            equal = [name for name in names if kind.shares[name] == 0]
            nearest = min(names, key=lambda name: kind.shares[name])
            for name in equal or ([nearest] if self._exact else names):
                kind.shares[name] = max(kind.shares[name], _share_that_differs(capture, copies, written, name))
            kind.steps.add(step)
            kind.is_refused = kind.is_refused or (len(kind.steps) >= UPDATES_COMPARED and min(kind.shares.values()) > 0)

    def verdict(self, capture: Capture) -> Verdict | None:
        """Returns what is known of an update, or None while that is open."""
        return self.verdict_of(capture.kind)

    def verdict_of(self, which: Kind) -> Verdict | None:
        """Returns what is known of a kind of update, or None while it is open."""
        kind = self._kinds.get(which)
        if kind is None or (len(kind.steps) < UPDATES_COMPARED and min(kind.shares.values()) == 0):
            return None
        nearest = min(kind.shares, key=lambda name: kind.shares[name])
        share = kind.shares[nearest]
        is_taken = not self._exact or (share == 0 and not kind.is_refused)
        return Verdict(nearest if is_taken else None, nearest, share)


def _share_that_differs(
    capture: Capture, copies: Sequence[torch.Tensor], written: Sequence[torch.Tensor], arithmetic: str
) -> float:
    """Returns the share of elements in which an arithmetic's results differ, of the tensor where most do."""
    before, after = [*map(_flat, copies)], [*map(_flat, written)]
    count, differing = before[0].numel(), [0] * len(written)
    for first in range(0, count, _SLICE_ELEMENTS):
        inputs = [tensor[first : first + _SLICE_ELEMENTS] for tensor in before]
        results = [tensor if index == 1 else torch.empty_like(tensor) for index, tensor in enumerate(inputs)]
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (inputs, results)]
        capture.rule.part(arithmetic, capture.type_name, inputs[0].numel(), *addresses).run()
        made = (tensor for index, tensor in enumerate(results) if index != 1)
        for number, (one, other) in enumerate(zip(made, after, strict=True)):
            differing[number] += _count_that_differs(one, other[first : first + _SLICE_ELEMENTS])
    return max(differing) / max(count, 1)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _count_that_differs(one: torch.Tensor, other: torch.Tensor) -> int:
    """Returns how many elements have other bits; what is no number equals what is none, whatever its bits."""
    as_bits = torch.int32 if one.dtype is torch.float32 else torch.int16
    differs = (one.view(as_bits) != other.view(as_bits)) & ~(one.isnan() & other.isnan())
    return int(differs.count_nonzero())
