"""The correlation predictor: what follows what in forward, and the way back in backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tieroff.planner import foresight as correlation
from tieroff.planner.foresight import Correlation


def run_forward(predictor: Correlation, path: Sequence[str]) -> None:
    predictor.begin()
    for key in path:
        predictor.used(key)


def test_nothing_is_foreseen_before_anything_was_seen() -> None:
    predictor = Correlation()
    predictor.begin()
    assert list(predictor.ahead()) == []
    predictor.used("a")
    assert list(predictor.ahead()) == []


def test_path_that_repeats_is_foreseen_from_its_start() -> None:
    predictor = Correlation()
    run_forward(predictor, "abcd")
    predictor.begin()
    assert list(predictor.ahead()) == ["a", "b", "c", "d"]
    predictor.used("a")
    assert list(predictor.ahead()) == ["b", "c", "d"]


def test_window_ends_what_is_foreseen() -> None:
    predictor = Correlation(window=2)
    run_forward(predictor, "abcd")
    predictor.begin()
    assert list(predictor.ahead()) == ["a", "b"]


def test_three_last_uses_tell_paths_apart() -> None:
    predictor = Correlation()
    run_forward(predictor, ["x", "m", "n", "after x"])
    run_forward(predictor, ["y", "m", "n", "after y"])
    run_forward(predictor, ["x", "m", "n"])
    assert next(predictor.ahead()) == "after x"
    run_forward(predictor, ["y", "m", "n"])
    assert next(predictor.ahead()) == "after y"


def test_most_recent_successor_wins_and_unknown_context_falls_back_to_a_shorter_one() -> None:
    predictor = Correlation()
    run_forward(predictor, ["a", "router", "expert 1", "b"])
    run_forward(predictor, ["a", "router", "expert 2", "b"])
    predictor.begin()
    assert list(predictor.ahead()) == ["a", "router", "expert 2", "b"]
    run_forward(predictor, ["a", "router", "expert 3"])  # never seen: nothing follows
    assert list(predictor.ahead()) == []
    run_forward(predictor, ["c", "d", "expert 1"])  # seen in another context only
    assert list(predictor.ahead()) == ["b"]


def test_what_was_saved_is_foreseen_backwards_whatever_the_path() -> None:
    predictor = Correlation()
    run_forward(predictor, "abc")
    for key in ("s1", "s2", "w", "s3", "w"):
        predictor.saved(key)
    predictor.wanted("w")
    assert list(predictor.ahead()) == ["s3", "w", "s2", "s1"]
    predictor.wanted("s2")  # out of order: what lies before it counts as done
    assert list(predictor.ahead()) == ["s1"]
    predictor.wanted("never saved")
    assert list(predictor.ahead()) == ["s1"]


def test_second_micro_batch_begins_with_what_it_saves_itself() -> None:
    predictor = Correlation()
    predictor.begin()
    for batch in ("first", "second"):
        for layer in range(3):
            predictor.used(f"w{layer}")
            predictor.saved(f"{batch} {layer}")
        predictor.wanted(f"{batch} 2")
        assert list(predictor.ahead()) == [f"{batch} 1", f"{batch} 0"]
        predictor.wanted(f"{batch} 1")
        predictor.wanted(f"{batch} 0")
        assert list(predictor.ahead()) == []


def test_memory_for_what_was_seen_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correlation, "ROWS_AT_MOST", 50)
    predictor = Correlation()
    for step in range(30):
        run_forward(predictor, [f"{step} {i}" for i in range(10)])
    assert predictor.row_count == 50
    predictor.begin()
    assert next(predictor.ahead()) == "29 0"
