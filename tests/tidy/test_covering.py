"""The covering arrays that parametrizations are made of leave no pair out."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.covering import pairwise


@pytest.mark.parametrize("sizes", [(2,), (3, 2), (18, 3, 2), (7, 2, 2), (4, 3, 2), (2, 2, 2, 2), (5, 4, 3, 2)])
def test_every_pair_of_values_is_in_a_case(sizes: tuple[int, ...]) -> None:
    factors = [[f"{factor}={value}" for value in range(size)] for factor, size in enumerate(sizes)]
    cases = pairwise(*factors)
    for one, other in combinations(range(len(sizes)), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(factors[one], factors[other]))


@pytest.mark.parametrize(("sizes", "most"), [((18, 3, 2), 54), ((7, 2, 2), 14), ((4, 3, 2), 12), ((5, 4, 3, 2), 24)])
def test_there_are_hardly_more_cases_than_the_two_largest_factors_need(sizes: tuple[int, ...], most: int) -> None:
    assert len(pairwise(*(range(size) for size in sizes))) <= most
