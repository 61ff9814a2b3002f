"""Whether an optimizer's updates may be made in host memory, and what people are told of that; see [Note: proof]."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tieroff.core.buckets import has_kernels
from tieroff.runtime.optimizer.host.capture import Capture, Kind
from tieroff.runtime.optimizer.host.proof import UPDATES_COMPARED_AT_MOST, Proof, Verdict, needed_bytes
from tieroff.units import format_bytes
from tieroff.updates.arithmetic import ARITHMETICS
from tieroff.updates.native import HAS_UPDATES

log = logging.getLogger("tieroff")

RECHECK_UPDATES = 1000
"""So often one bucket is compared again."""

# From then on a plan does not wait for more: gradients may be missing, or updates skipped. The first proves nothing.
_AWAITED_UPDATES = UPDATES_COMPARED_AT_MOST + 1


class Evidence:
    """What comparisons of an optimizer's updates with the CPU's have shown.

    Attributes:
        updates: steps of the optimizer, the one that runs included.
        is_possible: there are kernels for this optimizer, and nothing forbids them.
        lacking: what keeps plans from having the CPU update, "" for nothing; None while no step has more than fits the device.
        why_not: why none may be made in host memory; "" while that is not known.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, may_be: bool, exact: bool) -> None:
        """Begins with nothing proven.

        Args:
            optimizer: the user's.
            may_be: there is host memory below the device, and nothing else that forbids it.
            exact: no bit may differ.
        """
        self._name = type(optimizer).__name__
        self.is_possible = may_be and HAS_UPDATES and has_kernels(type(optimizer))
        self._proof, self._exact = Proof(exact=exact), exact
        self._kinds: set[Kind] = set()
        self.updates = self._compared_at = 0
        self.lacking: str | None = None
        self._is_again = False
        self.why_not = ""
        self._is_proven = False

    @property
    def is_useful(self) -> bool:
        """True where a plan may have the CPU update, if that is proven to be the same."""
        return self.is_possible and self.lacking == ""

    @property
    def is_proven(self) -> bool:
        """True while updates may be made in host memory."""
        return self._is_proven and not self.why_not

    @property
    def is_awaited(self) -> bool:
        """True while the next updates are going to tell; a plan is better made afterwards."""
        is_open = self.is_useful and not self._is_proven and not self.why_not
        return is_open and self.updates < _AWAITED_UPDATES

    @property
    def is_wanted(self) -> bool:
        """True while updates of the device are to be compared."""
        return self.is_useful and not self.why_not and (self._is_again or not self._is_proven or self._has_open())

    def _has_open(self) -> bool:
        """True while a kind of update was compared too seldom to know how it is rounded."""
        return any(self._proof.verdict_of(kind) is None for kind in self._kinds)

    def meets(self, kind: Kind) -> bool:
        """A kind of update is due; True where it is one that was not met before, and is compared next."""
        if not self.is_proven or self._proof.verdict_of(kind) is not None:
            return False
        self._kinds.add(kind)
        return True

    def begins_again(self) -> bool:
        """True once every so many updates: the next update of the device is compared again."""
        if self.updates - self._compared_at < RECHECK_UPDATES:
            return False
        self._is_again = True
        return True

    def refuse(self, why: str) -> None:
        """None may be made in host memory."""
        if not self.why_not:
            self.why_not = why
            log.warning("updates of %s stay on the device: %s", self._name, why)

    @contextmanager
    def compared(self, captures: Sequence[Capture], room_bytes: int) -> Iterator[None]:
        """Inside, the device makes these updates, of which the host has room for copies."""
        if self.why_not or not captures:
            yield
            return
        if needed_bytes(captures) > room_bytes:
            needed = format_bytes(needed_bytes(captures))
            self.refuse(
                f"to compare them with the CPU's takes {needed} of host memory, and {format_bytes(room_bytes)} are free"
            )
            yield
            return
        trial = self._proof.begin(captures)
        yield
        self._proof.end(trial, self.updates)
        self._kinds.update(capture.kind for capture in captures)
        self._is_again, self._compared_at = False, self.updates

    def update_ended(self) -> None:
        """All buckets were updated: what is known by now counts from the next update on."""
        verdicts = [self._proof.verdict_of(kind) for kind in self._kinds]
        failed = [one for one in verdicts if one is not None and one.arithmetic is None]
        if failed:
            self.refuse(_why_refused(max(failed, key=lambda one: one.share)))
        elif verdicts and None not in verdicts:
            self._is_proven = True

    def arithmetic_of(self, kind: Kind) -> str | None:
        """Returns how updates of a kind are rounded; None where that is not proven."""
        verdict = self._proof.verdict_of(kind) if self.is_proven else None
        return verdict.arithmetic if verdict is not None else None

    def words(self) -> str:
        """Returns a sentence for `explain`, "" where nothing would have updates made in host memory."""
        if self.why_not:
            return f"The device updates: {self.why_not}."
        if self.is_possible and self.lacking:
            return f"The device updates: {self.lacking}."
        if not self._is_proven:
            return ""
        found = {kind: self._proof.verdict_of(kind) for kind in self._kinds}
        names = sorted({one.arithmetic for one in found.values() if one is not None and one.arithmetic is not None})
        roundings = " and ".join(f"{name} ({ARITHMETICS[name]})" for name in names)
        share = max((one.share for one in found.values() if one is not None), default=0.0)
        if share:
            return f"The CPU's updates are rounded as {roundings}, and differ from the device's in {share:.2g} of the elements."
        return f"The CPU's updates are those of the device, bit for bit: rounded as {roundings}, proven by comparison."


def _why_refused(verdict: Verdict) -> str:
    if verdict.rival:
        return (
            f"comparison did not tell how they are rounded, {verdict.nearest} or {verdict.rival}, as with a learning rate of 0 "
            "or a power of 2; [plan] exact = false allows either"
        )
    return (
        f"the CPU's differ in the last bits of {verdict.share:.2g} of the elements ({verdict.nearest}, the nearest of the "
        "roundings that PyTorch is known to use); [plan] exact = false allows that"
    )
