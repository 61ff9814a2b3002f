"""Steps by which a tensor is brought from one placement to another, and their bytes."""

from __future__ import annotations

import itertools

import pytest

from tieroff.core.sharding.exchange import exchange_steps, exchanged_shares
from tieroff.core.sharding.graph import PARTIAL, REPLICATED, moved_bytes

ANY = (PARTIAL, REPLICATED, 0, 1)
PAIRS = list(itertools.product(itertools.product(ANY, repeat=2), repeat=2))


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_each_step_is_one_collective_of_one_mesh_dimension(source: tuple[int, int], target: tuple[int, int]) -> None:
    state: tuple[int, ...] = source
    for dim, after in exchange_steps(source, target):
        assert [d for d in range(2) if state[d] != after[d]] == [dim]
        # What an inner mesh dimension cut along it, an outer one can neither take nor let go of.
        taken = {placement for placement in (state[dim], after[dim]) if placement >= 0}
        assert not taken.intersection(state[dim + 1 :])
        state = after
    assert state == target
    assert (exchange_steps(source, target) == ()) == (source == target)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(ANY, repeat=2)))
def test_one_mesh_dimension_costs_what_two_groups_exchange(source: int, target: int) -> None:
    assert exchanged_shares((source,), (target,)) == (moved_bytes(1.0, source, target),)


@pytest.mark.parametrize(
    ("source", "target", "shares"),
    [
        ((0, 1), (REPLICATED, REPLICATED), (1.0, 2.0)),  # each of four gets a quarter, then half
        ((REPLICATED, 0), (REPLICATED, REPLICATED), (0.0, 2.0)),
        ((0, 0), (REPLICATED, REPLICATED), (2.0, 1.0)),  # the inner one first
        ((0, 0), (REPLICATED, 0), (2.0, 1.0)),  # it gathers all the same, and cuts again
        ((PARTIAL, PARTIAL), (0, 0), (2.0, 1.0)),
        ((PARTIAL, 0), (REPLICATED, 0), (2.0, 0.0)),
    ],
)
def test_two_mesh_dimensions(source: tuple[int, int], target: tuple[int, int], shares: tuple[float, float]) -> None:
    assert exchanged_shares(source, target) == shares
