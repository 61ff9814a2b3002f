"""Whether updates in host memory have the bits of the optimizer's own: found by comparison, never assumed.

[Note: proof]
The device updates as ever while the CPU updates copies in every arithmetic that there is; then all elements of parameters and
state are compared. The first update of a parameter proves nothing: from moments that are zero, roundings that differ give the
same. So the two updates after it count, and one of them alone does not. Where one arithmetic is equal in both, it is the
proven one; where none is, the device goes on to update. What was proven is compared again from time to time: another build of
a library, or another device, may round in another way. An arithmetic that differed once is not tried again, unless the
nearest is wanted, so that most of the work is one update by the CPU.

Some updates prove nothing of the next ones: where the learning rate is a power of 2, or 0, or gradients are 0, products are
exact, and roundings that differ give the same. So arithmetics that are told apart by numbers that are nothing special have to
be told apart by the comparison as well; see `told_apart`.

| state | next |
|---|---|
| open: fewer than two updates compared, or they did not tell arithmetics apart | proven, or refused |
| proven: an arithmetic had all bits | refused, by a comparison that fails, whatever other one has them |
| refused: the nearest, and the share of elements that differ | for good |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tieroff.runtime.optimizer.host.apart import count_that_differs, results_of, told_apart
from tieroff.runtime.optimizer.host.capture import Capture, Kind
from tieroff.updates.arithmetic import candidates
from tieroff.updates.rule import Rule

UPDATES_COMPARED = 2
"""That prove an arithmetic, each of a parameter that has moments already."""

UPDATES_COMPARED_AT_MOST = 5
"""Where so many have not told arithmetics apart, those to come are not expected to."""

SLICE_ELEMENTS = 1 << 20
"""Compared at once, so that no second copy of what was written is made."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What comparison found for one kind of update.

    Attributes:
        arithmetic: the one to update with in host memory; None leaves the update to the device.
        nearest: the one whose results differ in the fewest elements.
        share: of elements, of the tensor where most of them differ, by `nearest`.
        rival: an arithmetic that made the same bits as `nearest`, and will not of other numbers; "" where there is none.
    """

    arithmetic: str | None
    nearest: str
    share: float
    rival: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """Copies of what an update reads, made before the device's update; `end` compares its results with theirs."""

    captures: tuple[Capture, ...]
    copies: tuple[tuple[torch.Tensor, ...], ...]


def needed_bytes(captures: Sequence[Capture]) -> int:
    """Returns the host memory that a trial of these takes at most: copies, and slices of what was written and of results."""
    tensors = [tensor for capture in captures for tensor in capture.tensors]
    sliced = (len(one.tensors) * _sliced_bytes(one.tensors[0]) for one in captures)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + max(sliced, default=0)


def _sliced_bytes(tensor: torch.Tensor) -> int:
    """Returns what a slice takes as it was written, as a result and as the one before, with the masks of its comparison."""
    return min(tensor.numel(), SLICE_ELEMENTS) * (3 * tensor.element_size() + 1)


@dataclass(slots=True)
class _Kind:
    rule: Rule
    type_name: str
    shares: dict[str, float]
    steps: set[int] = field(default_factory=set)
    is_refused: bool = False
    taken: str = ""  # the one that was proven, by which updates were made


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
        self._kinds: dict[Kind, _Kind] = {}
        self._verdicts: dict[Kind, Verdict | None] = {}

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
            known = self._kinds.get(capture.kind)
            kind = known or _Kind(capture.rule, capture.type_name, dict.fromkeys(names, 0.0))
            self._kinds[capture.kind] = kind
            equal = [name for name in names if kind.shares[name] == 0]
            nearest = min(names, key=lambda name: kind.shares[name])
            shares = _shares_that_differ(capture, copies, equal or ([nearest] if self._exact else names))
            kind.shares |= {name: max(kind.shares[name], share) for name, share in shares.items()}
            kind.steps.add(step)
            kind.is_refused = kind.is_refused or (len(kind.steps) >= UPDATES_COMPARED and min(kind.shares.values()) > 0)
            # Updates were made by it: no other one may take its place unseen.
            kind.is_refused = kind.is_refused or (self._exact and bool(kind.taken) and kind.shares[kind.taken] > 0)
            self._verdicts[capture.kind] = verdict = self._verdict(kind)
            kind.taken = kind.taken or (verdict.arithmetic or "" if verdict is not None else "")

    def verdict(self, capture: Capture) -> Verdict | None:
        """Returns what is known of an update, or None while that is open."""
        return self.verdict_of(capture.kind)

    def verdict_of(self, which: Kind) -> Verdict | None:
        """Returns what is known of a kind of update, or None while it is open."""
        return self._verdicts.get(which)

    def _verdict(self, kind: _Kind) -> Verdict | None:
        if len(kind.steps) < UPDATES_COMPARED and min(kind.shares.values()) == 0:
            return None
        nearest = kind.taken if self._exact and kind.taken else min(kind.shares, key=lambda name: kind.shares[name])
        share = kind.shares[nearest]
        rival = _rival_of(nearest, kind) if self._exact and share == 0 else ""
        if rival and len(kind.steps) < UPDATES_COMPARED_AT_MOST:
            return None
        is_taken = not self._exact or (share == 0 and not kind.is_refused and not rival)
        return Verdict(nearest if is_taken else None, nearest, share, rival)


def _rival_of(nearest: str, kind: _Kind) -> str:
    """Returns an arithmetic that no comparison told from the nearest, although numbers that are nothing special do; or ""."""
    equal = [name for name, share in kind.shares.items() if share == 0 and name != nearest]
    return next((name for name in equal if told_apart(kind.rule, kind.type_name, nearest, name)), "")


def _shares_that_differ(capture: Capture, copies: Sequence[torch.Tensor], arithmetics: Sequence[str]) -> dict[str, float]:
    """Returns for each arithmetic the share of elements in which its results differ, of the tensor where most do."""
    before, after = [*map(_flat, copies)], [_flat(t) for index, t in enumerate(capture.tensors) if index != 1]
    count, differing = before[0].numel(), {name: [0] * len(after) for name in arithmetics}
    for first in range(0, count, SLICE_ELEMENTS):
        inputs = [tensor[first : first + SLICE_ELEMENTS] for tensor in before]
        written = [tensor[first : first + SLICE_ELEMENTS].to("cpu") for tensor in after]
        for name in arithmetics:
            made = results_of(capture.rule, name, capture.type_name, inputs)
            for number, (one, other) in enumerate(zip(made, written, strict=True)):
                differing[name][number] += count_that_differs(one, other)
    return {name: max(counts) / max(count, 1) for name, counts in differing.items()}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor's elements in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
