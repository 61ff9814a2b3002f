"""How a tensor is brought from one placement to another on a mesh, one collective at a time, and the bytes of each.

What is split along the same dimension by two mesh dimensions is split by the outer one first, as DTensor has it. So a mesh
dimension can let go of a tensor's dimension, or take it, only while no inner one has it: that one gathers first and cuts again
at the end, for nothing. Plans are priced by these steps, and runs take them.
"""

from __future__ import annotations

import functools

from tieroff.core.sharding.graph import REPLICATED, moved_bytes
from tieroff.core.sharding.placements import Placements


@functools.lru_cache(maxsize=1 << 16)
def exchange_steps(source: Placements, target: Placements) -> tuple[tuple[int, Placements], ...]:
    """Returns the steps in order: the mesh dimension along which devices exchange, and the placements after it."""
    state = list(source)
    steps: list[tuple[int, Placements]] = []

    def bring(dim: int, placement: int) -> None:
        if state[dim] != placement:
            state[dim] = placement
            steps.append((dim, tuple(state)))

    for dim, wanted in enumerate(target):
        if state[dim] == wanted:
            continue
        taken = {placement for placement in (state[dim], wanted) if placement >= 0}
        for inner in range(len(state) - 1, dim, -1):
            if state[inner] in taken:
                bring(inner, REPLICATED)
        bring(dim, wanted)
    return tuple(steps)


@functools.lru_cache(maxsize=1 << 16)
def exchanged_shares(source: Placements, target: Placements) -> tuple[float, ...]:
    """Returns what all devices exchange, by mesh dimension, over the bytes of the whole tensor."""
    shares = [0.0] * len(source)
    state = source
    for dim, after in exchange_steps(source, target):
        cuts = sum(placement >= 0 for other, placement in enumerate(state) if other != dim)
        groups = 1 << (len(source) - 1)
        shares[dim] += groups * moved_bytes(0.5**cuts, state[dim], after[dim])
        state = after
    return tuple(shares)
