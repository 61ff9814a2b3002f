"""Who waited for whom, from calls of collectives alone."""

from __future__ import annotations

from tieroff.core.ranks.collectives import Call, Collectives
from tieroff.core.ranks.waits import waits_of


def rank(number: int, *calls_ns: int, group: str = "0") -> Collectives:
    calls = tuple(Call(group, index, "all_gather", "8 Float", at_ns) for index, at_ns in enumerate(calls_ns))
    return Collectives(number, 3, "a machine", calls)


def found(*ranks: Collectives, **signs_ns: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    signs = {int(name[1:]): moments for name, moments in signs_ns.items()}
    return [(wait.rank, wait.awaited, wait.start_ns, wait.stop_ns) for wait in waits_of(ranks, signs)]


def test_all_wait_for_the_rank_that_calls_last() -> None:
    assert sorted(found(rank(0, 10, 60), rank(1, 50, 55), rank(2, 20, 58))) == [
        (0, 1, 10, 50),
        (1, 0, 55, 60),
        (2, 0, 58, 60),
        (2, 1, 20, 50),
    ]


def test_a_rank_that_goes_on_after_its_call_waits_from_its_last_sign_of_life() -> None:
    assert found(rank(0, 10), rank(1, 50)) == [(0, 1, 10, 50)]
    assert found(rank(0, 10), rank(1, 50), r0=(5, 40, 50, 70)) == [(0, 1, 40, 50)]


def test_calls_ahead_of_need_are_counted_once() -> None:
    assert found(rank(0, 10, 20), rank(1, 50, 60)) == [(0, 1, 20, 50), (0, 1, 50, 60)]


def test_collectives_of_other_groups_and_of_one_rank_are_no_wait() -> None:
    assert found(rank(0, 10, group="1"), rank(1, 50, group="2")) == []
    assert found(rank(0, 10)) == []


def test_a_collective_that_one_rank_has_not_or_not_any_more_is_left_out() -> None:
    assert sorted(found(rank(0, 10, 60), rank(1, 50, 70), rank(2, 30))) == [(0, 1, 10, 50), (2, 1, 30, 50)]


def test_the_part_within_a_stretch_of_time() -> None:
    [wait] = waits_of([rank(0, 10), rank(1, 50)], {})
    assert [wait.within_ns(0, 30), wait.within_ns(20, 40), wait.within_ns(50, 90)] == [20, 20, 0]
