"""Which entries of torch's flight recorder tell who was waited for."""

from __future__ import annotations

from typing import Any

import pytest

from tieroff.core.ranks.collectives import Call
from tieroff.runtime.collectives import calls_in, collectives_here


def entry(name: str, number: int, **other: Any) -> dict[str, Any]:
    """Returns an entry as torch 2.13 writes it."""
    return {
        "profiling_name": name,
        "collective_seq_id": number,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "output_sizes": [[8, 4], [2]],
        "output_dtypes": ["Float", "Long"],
        "time_created_ns": 1000 - number,
        **other,
    }


def test_calls_are_in_order_of_time() -> None:
    entries = [entry("gloo:all_gather", 1), entry("gloo:barrier", 2, output_sizes=[], output_dtypes=[])]
    assert calls_in({"entries": entries}) == (
        Call("0", 2, "barrier", "", 998),
        Call("0", 1, "all_gather", "8x4 Float, 2 Long", 999),
    )


@pytest.mark.parametrize(
    "other",
    [
        entry("gloo:broadcast", 2),
        entry("gloo:gather", 2),
        entry("gloo:reduce", 2),
        entry("gloo:scatter", 2),
        entry("nccl:all_reduce", 2),
        entry("gloo:all_gather", 2, is_p2p=True),
        {"profiling_name": "gloo:all_gather"},
    ],
)
def test_collectives_that_not_all_wait_in_and_unknown_entries_are_left_out(other: dict[str, Any]) -> None:
    assert [call.number for call in calls_in({"entries": [entry("gloo:all_gather", 1), other]})] == [1]
    assert calls_in({}) == ()


def test_process_without_a_group_has_none() -> None:
    assert collectives_here() is None
