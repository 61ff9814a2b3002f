"""Likeness: which steps may be taken for a step that was recorded, although their tensors are smaller.

What a plan moves, and when, is right for smaller tensors too, and they take no more memory. So a program whose batches are ever
of other sizes is planned for the largest. A step shows with each event whether it goes on like the recorded one.

[Note: turns]
Steps that begin alike may have other events, by turns: two heads in turn, a penalty in every fourth step. Which one a step
is shows only in its midst, when its plan should have begun long ago. So what came so far says what comes next: the period that
the last steps repeated longest. Steps in turn are kinds of their own; where no period holds, one kind is there for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from operator import sub
from typing import Any

# The events around a pass without gradients.
PASS_BEGINS, PASS_ENDS = ("pass",), ("passed",)

Signature = tuple[Any, ...]

# The longest period that is looked for: a regularization in each 16th step.
_PERIOD_MAX = 16


def structure_of(signature: Signature) -> Signature:
    """Returns what a signature says but for sizes: steps that share it differ at most in how large their inputs are."""
    return tuple((part[0], len(part[1]), part[2]) if isinstance(part, tuple) else part for part in signature)


def is_within(signature: Signature, known: Signature) -> bool:
    """Returns whether a step differs from a known one at most in smaller inputs."""
    if structure_of(signature) != structure_of(known):
        return False
    pairs = ((part[1], other[1]) for part, other in zip(signature, known, strict=True) if isinstance(part, tuple))
    return all(size <= most for shape, limit in pairs for size, most in zip(shape, limit, strict=True))


def suits(key: Hashable, known: Hashable) -> bool:
    """Returns whether an event of a step is the known one, with inputs or a saved tensor that may be smaller."""
    if key == known:
        return True
    if not isinstance(key, tuple) or not isinstance(known, tuple) or key[0] != known[0]:
        return False
    if key[0] == "pack":
        return bool(key[1] <= known[1])
    return key[0] == "forward" and is_within(key[1], known[1])


def is_like_but_for_passes(keys: Sequence[Hashable], known: Sequence[Hashable]) -> bool:
    """Returns whether a step is not like the known one, and would be if neither had passes without gradients."""
    return not is_like(keys, known) and is_like(_without_passes(keys), _without_passes(known))


def _without_passes(keys: Sequence[Hashable]) -> list[Hashable]:
    left, is_in_pass = list[Hashable](), False
    for key in keys:
        is_in_pass = is_in_pass or key == PASS_BEGINS
        if not is_in_pass:
            left.append(key)
        is_in_pass = is_in_pass and key != PASS_ENDS
    return left


def is_like(keys: Sequence[Hashable], known: Sequence[Hashable]) -> bool:
    """Returns whether each event of a step suits the known one in its place."""
    return len(keys) == len(known) and all(map(suits, keys, known))


def same_events(keys: Sequence[Hashable], known: Sequence[Hashable]) -> int:
    """Returns how many events of a step, from its first on, suit the known ones; at most all but the last that is known."""
    count = 0
    for key, other in zip(keys, known[:-1], strict=False):
        if not suits(key, other):
            break
        count += 1
    return count


def saved_bytes(keys: Sequence[Hashable]) -> int:
    """Returns how much a step's saved tensors have, one with the other."""
    return sum(key[1] for key in keys if isinstance(key, tuple) and key[0] == "pack")


def likeness_of(keys: Sequence[Hashable]) -> int:
    """Returns a number that steps share whose events differ in sizes, and in passes without gradients, at most."""
    return hash(tuple(map(_without_sizes, _without_passes(keys))))


def _without_sizes(key: Hashable) -> Hashable:
    if not isinstance(key, tuple) or key[0] not in ("pack", "forward"):
        return key
    return (key[0], structure_of(key[1])) if key[0] == "forward" else ("pack",)


class Turns:
    """What steps that began alike turned out to be, each by its likeness; see [Note: turns]."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=3 * _PERIOD_MAX)

    def note(self, likeness: int) -> None:
        """A step has ended."""
        self._seen.append(likeness)

    @property
    def alternate(self) -> bool:
        """True when the last steps were not all alike."""
        return len(set(self._seen)) > 1

    def awaits(self, likeness: int) -> bool:
        """Returns whether the last step was another, and such a one may come after no more others than it came after before."""
        at = [i for i, one in enumerate(self._seen) if one == likeness]
        others = len(self._seen) - 1 - at[-1] if at else 0
        return 0 < others < max(map(sub, at[1:], at), default=0)

    def next(self) -> int | None:
        """Returns the likeness of the step that begins, or None where no period says it."""
        if not self.alternate:
            return None
        repeated = {period: self._repeated(period) for period in range(1, min(_PERIOD_MAX, len(self._seen) // 2) + 1)}
        held = [period for period, count in repeated.items() if count >= 2 * period]
        period = max(held, key=lambda period: repeated[period] - period, default=1)
        return self._seen[-period] if period > 1 else None

    def _repeated(self, period: int) -> int:
        """Returns how many of the last steps repeat with this period."""
        seen, length = self._seen, period
        while length < len(seen) and seen[-length - 1] == seen[-length - 1 + period]:
            length += 1
        return length

    def name(self, foreseen: int, likeness: int) -> bool:
        """A step that was foreseen is traced; returns False if it is a known other one, which is out of turn.

        What was noted of such steps while they left another's plan may lack events, which were not looked at there.
        """
        if likeness != foreseen and likeness in self._seen:
            return False
        self._seen = deque((likeness if one == foreseen else one for one in self._seen), self._seen.maxlen)
        return True
