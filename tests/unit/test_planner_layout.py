"""Offline addresses."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieroff.errors import ConfigError, InfeasiblePlanError
from tieroff.planner.layout import Layout, pack

_FOLDER = Path(__file__).parent.parent / "data" / "minimalloc"

_BUFFERS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 50)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    max_size=14,
)


def _read(name: str) -> list[tuple[int, int, int]]:
    with (_FOLDER / name).open(newline="") as file:
        return [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


def _assert_sound(buffers: list[tuple[int, int, int]], layout: Layout) -> None:
    assert len(layout.offsets) == len(buffers)
    placed = list(zip(buffers, layout.offsets, strict=True))
    for index, ((lower, upper, size), offset) in enumerate(placed):
        assert offset >= 0
        for (other_lower, other_upper, other_size), other in placed[:index]:
            is_apart = upper <= other_lower or other_upper <= lower
            assert is_apart or offset + size <= other or other + other_size <= offset
    assert layout.footprint_bytes == max((offset + b[2] for b, offset in placed), default=0)


@given(buffers=_BUFFERS, alignment=st.sampled_from((1, 8, 512)))
def test_pack_overlaps_nothing_and_keeps_the_alignment(buffers: list[tuple[int, int, int]], alignment: int) -> None:
    layout = pack(buffers, alignment_bytes=alignment, time_limit_s=0.01)
    _assert_sound(buffers, layout)
    assert all(offset % alignment == 0 for offset in layout.offsets)
    assert layout.footprint_bytes >= layout.bound_bytes


def test_pack_meets_the_capacity_of_the_small_instance() -> None:
    buffers = _read("input.12.csv")
    layout = pack(buffers, capacity_bytes=12)
    _assert_sound(buffers, layout)
    assert layout.footprint_bytes == 12


def test_pack_says_when_the_capacity_is_below_what_is_live_at_once() -> None:
    with pytest.raises(InfeasiblePlanError, match="live at once") as caught:
        pack([(0, 2, 5), (1, 3, 6)], capacity_bytes=10)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (11, 10)


def test_pack_refuses_empty_buffers_and_alignment() -> None:
    with pytest.raises(ConfigError, match="buffer 1"):
        pack([(0, 1, 1), (2, 2, 1)])
    with pytest.raises(ConfigError, match="alignment"):
        pack([(0, 1, 1)], alignment_bytes=0)


def test_pack_of_a_large_instance_is_sound() -> None:
    buffers = _read("F.1048576.csv")
    _assert_sound(buffers, pack(buffers, time_limit_s=0.0))
