"""Likeness: which steps may be taken for a step that was recorded, although their tensors are smaller.

What a plan moves, and when, is right for smaller tensors too, and they take no more memory. So a program whose batches are ever
of other sizes is planned for the largest. A step shows with each event whether it goes on like the recorded one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

# The events around a pass without gradients.
PASS_BEGINS, PASS_ENDS = ("pass",), ("passed",)

Signature = tuple[Any, ...]


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
