"""The native search: windows that fit, and the order in which links serve transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.covering import examples
from tieroff import _native

Gap = tuple[int, int, int, int, int]
"""start, stop, size_bytes, away_start, away_stop."""


def _array(values: Any) -> np.ndarray:
    return np.array(list(values), np.int64)


def _fit(
    required: list[int], gaps: list[Gap], budget: int, *, repair: int = 2, passes: str = "LRlr", **limits: list[int]
) -> tuple[bool, list[int], list[tuple[int, int]]]:
    start, stop, size, away_start, away_stop = (_array(column) for column in zip(*gaps, strict=True))
    usage = _array(required)
    order = np.arange(len(gaps), dtype=np.int64)
    op_count = len(required)
    load_from = _array(limits.get("load_from", [0] * len(gaps)))
    release_until = _array(limits.get("release_until", [2 * op_count] * len(gaps)))
    is_done = _native.fit_windows(
        usage,
        _array(range(0, 10 * op_count + 1, 10)),
        budget,
        start,
        stop,
        size,
        away_start,
        away_stop,
        repair,
        order,
        order,
        load_from,
        release_until,
        passes,
    )
    return is_done, usage.tolist(), list(zip(away_start.tolist(), away_stop.tolist(), strict=True))


def test_a_gap_that_is_kept_leaves_only_where_an_op_is_over_the_budget() -> None:
    assert _fit([5, 5, 9, 5, 5], [(1, 4, 3, 1, 1)], 10) == (True, [5, 8, 9, 8, 5], [(2, 3)])


def test_a_window_shrinks_to_what_the_budget_needs_and_vanishes_when_it_needs_none() -> None:
    assert _fit([5, 5, 9, 5, 5], [(1, 4, 3, 1, 4)], 10) == (True, [5, 8, 9, 8, 5], [(2, 3)])
    assert _fit([5, 5, 7, 5, 5], [(1, 4, 3, 1, 4)], 10)[1] == [5, 8, 10, 8, 5]


def test_limits_hold_in_the_passes_with_capital_letters_alone() -> None:
    limits: dict[str, Any] = {"load_from": [3], "release_until": [1]}
    assert _fit([5] * 5, [(1, 4, 3, 1, 4)], 10, passes="L", **limits)[2] == [(1, 3)]
    assert _fit([5] * 5, [(1, 4, 3, 1, 4)], 10, passes="R", **limits)[2] == [(1, 4)]
    away = _fit([5] * 5, [(1, 4, 3, 1, 4)], 10, passes="l", **limits)[2][0]
    assert away[0] == away[1]


def test_a_gap_round_the_end_counts_at_both_ends() -> None:
    is_done, usage, away = _fit([9, 1, 1, 9], [(3, 5, 2, 3, 3)], 10)
    assert (is_done, usage, away) == (True, [9, 1, 1, 9], [(3, 5)])


def test_an_op_that_never_fits_is_told() -> None:
    assert _fit([11, 5], [(1, 2, 1, 1, 2)], 10)[0] is False


@pytest.mark.parametrize(
    ("gap", "message"), [((1, 9, 1, 1, 2), "on the ring"), ((2, 1, 1, 1, 1), "on the ring"), ((1, 3, 1, 0, 2), "on the ring")]
)
def test_gaps_off_the_ring_are_refused(gap: Gap, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _fit([1, 1, 1, 1], [gap], 10)


def test_unknown_passes_are_refused() -> None:
    with pytest.raises(ValueError, match="passes"):
        _fit([1, 1, 1], [(1, 2, 1, 1, 2)], 10, passes="x")


@st.composite
def _cases(draw: st.DrawFn) -> tuple[list[int], list[Gap], int]:
    op_count = draw(st.integers(2, 10))
    gaps: list[Gap] = []
    for _ in range(draw(st.integers(1, 8))):
        start = draw(st.integers(0, op_count - 1))
        stop = draw(st.integers(start + 1, start + op_count - 1))
        first, last = sorted((draw(st.integers(start, stop)), draw(st.integers(start, stop))))
        gaps.append((start, stop, draw(st.integers(1, 9)), first, last))
    required = draw(st.lists(st.integers(0, 20), min_size=op_count, max_size=op_count))
    return required, gaps, draw(st.integers(5, 40))


@settings(max_examples=examples(300), deadline=None)
@given(case=_cases(), repair=st.integers(0, 3), passes=st.sampled_from(("", "LR", "RL", "LRlr", "rl")))
def test_windows_fit_whenever_every_op_does_with_all_away(
    case: tuple[list[int], list[Gap], int], repair: int, passes: str
) -> None:
    required, gaps, budget = case
    is_done, usage, away = _fit(required, gaps, budget, repair=repair, passes=passes)
    assert is_done == (max(required) <= budget)
    if not is_done:
        return
    expected = list(required)
    for (start, stop, size, _, _), (first, last) in zip(gaps, away, strict=True):
        assert first >= last or start <= first < last <= stop
        for position in range(start, stop):
            if not first <= position < last:
                expected[position % len(required)] += size
    assert usage == expected
    assert max(usage) <= budget
    assert _fit(required, gaps, budget, repair=repair, passes=passes) == (is_done, usage, away)


Job = tuple[int, int, int, int]
"""link, issue_from, ready_by, size_bytes."""
_D2H, _NVME_WRITE, _H2D, _NVME_READ = range(4)


def _dispatch(
    durations: list[int], jobs: list[Job], *, shares: bool = False, duplex: float = 1.0, latency: float = 0.0, steps: int = 3
) -> tuple[float, list[float], list[int], list[int]]:
    link, issue_from, ready_by, size_bytes = (_array(column) for column in zip(*jobs, strict=True))
    step, waits, served, ticks = _native.dispatch(
        _array(durations), link, issue_from, ready_by, size_bytes, [1.0, 0.5, 1.0, 0.5], [latency] * 4, shares, duplex, steps
    )
    return step, waits, served.tolist(), ticks.tolist()


def test_the_nearest_deadline_goes_first() -> None:
    step, waits, served, ticks = _dispatch([9, 9, 9, 13], [(_D2H, 0, 3, 9), (_D2H, 0, 1, 10), (_D2H, 0, 2, 10)])
    assert step == pytest.approx(42.0)
    assert sorted(range(3), key=served.__getitem__) == [1, 2, 0]
    assert ticks == [2, 0, 1]
    assert waits == pytest.approx([0.0, 1.0, 1.0, 0.0])


def test_an_op_waits_for_what_is_late_and_the_rest_shifts_with_it() -> None:
    step, waits, _, _ = _dispatch([10, 10], [(_H2D, 0, 1, 25)])
    assert step == pytest.approx(35.0)
    assert waits == pytest.approx([0.0, 15.0])


def test_transfers_cross_the_end_of_the_step() -> None:
    step, _, _, ticks = _dispatch([10, 10, 10], [(_H2D, 2, 4, 15)])
    assert step == pytest.approx(30.0)
    assert ticks == [2]
    assert _dispatch([10, 10, 10], [(_H2D, 2, 4, 25)])[0] == pytest.approx(35.0)


def test_a_copy_out_that_is_due_where_it_is_issued_blocks() -> None:
    assert _dispatch([10, 10], [(_D2H, 1, 1, 7)])[0] == pytest.approx(27.0)


def test_links_that_share_take_from_each_other() -> None:
    both = [(_D2H, 0, 1, 20), (_NVME_WRITE, 0, 1, 10)]
    assert _dispatch([0, 10], both)[0] == pytest.approx(30.0)
    # The drive's 0.5 bytes per ns fill half of the host link for 20 ns; 10 bytes are left for the other 10 ns.
    assert _dispatch([0, 10], both, shares=True)[0] == pytest.approx(40.0)
    ways = [(_D2H, 0, 1, 20), (_H2D, 0, 1, 20)]
    assert _dispatch([0, 10], ways, duplex=0.5)[0] == pytest.approx(50.0)


def test_latency_comes_before_the_bytes() -> None:
    assert _dispatch([0, 10], [(_H2D, 0, 1, 20)], latency=5.0)[0] == pytest.approx(35.0)


@pytest.mark.parametrize("job", [(7, 0, 1, 1), (_D2H, 1, 0, 1), (_D2H, 0, 1, 0), (_D2H, -3, 0, 1), (_D2H, 0, 5, 1)])
def test_jobs_that_make_no_sense_are_refused(job: Job) -> None:
    with pytest.raises(ValueError, match="expected transfers"):
        _dispatch([10, 10], [job])
