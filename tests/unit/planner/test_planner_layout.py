"""Offline addresses."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.covering import examples
from tests.support.outside import outside
from tieroff import _native
from tieroff.errors import ConfigError, InfeasiblePlanError
from tieroff.planner.layout import Budget, Layout, pack, pack_ring, padded

Buffers = list[tuple[int, int, int]]

_ENDLESS = Budget(nodes=10**9, steps=10_000)
_SWITCHES = ("splits", "stacks", "dominates", "bounds", "remembers", "orders_twins")
_RING = 6

_BUFFERS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 20), st.integers(1, 50)).map(lambda b: (b[0], b[0] + b[1], b[2])), max_size=14
)
_FEW = st.lists(
    st.tuples(st.integers(0, _RING - 1), st.integers(1, _RING), st.integers(1, 9)).map(lambda b: (b[0], b[0] + b[1], b[2])),
    max_size=6,
)
_ABOVE = st.lists(st.sampled_from((0, 0, 3, 7)), min_size=_RING, max_size=_RING) | st.just([0] * _RING)
_ALIGNMENT = st.sampled_from((1, 4))


def _read(name: str) -> Buffers:
    with outside(name).open(newline="") as file:
        return [(int(row["lower"]), int(row["upper"]), int(row["size"])) for row in csv.DictReader(file)]


def _times(buffer: Sequence[int], ring: int) -> set[int]:
    return {time % ring if ring else time for time in range(buffer[0], buffer[1])}


def _assert_sound(buffers: Buffers, layout: Layout, alignment: int = 1, above: Sequence[int] = ()) -> None:
    """Looks at every pair, and at every time of a ring."""
    assert len(layout.offsets) == len(buffers)
    assert all(offset >= 0 and offset % alignment == 0 for offset in layout.offsets)
    times = [_times(buffer, len(above)) for buffer in buffers] if above or len(buffers) < 20 else []
    ends = [offset + buffer[2] for buffer, offset in zip(buffers, layout.offsets, strict=True)]
    for i, k in itertools.combinations(range(len(buffers)), 2):
        is_apart = not times and (buffers[i][1] <= buffers[k][0] or buffers[k][1] <= buffers[i][0])
        is_apart = is_apart or (bool(times) and times[i].isdisjoint(times[k]))
        assert is_apart or ends[i] <= layout.offsets[k] or ends[k] <= layout.offsets[i]
    if above:
        ends = [max(end + above[time] for time in span) for end, span in zip(ends, times, strict=True)]
    assert layout.footprint_bytes == max(ends, default=0)
    assert layout.footprint_bytes >= layout.bound_bytes


def _load(buffers: Buffers) -> int:
    changes = sorted([(b[1], -b[2]) for b in buffers] + [(b[0], b[2]) for b in buffers])
    return max(itertools.accumulate((change for _, change in changes)), default=0)


def _smallest(buffers: Buffers, above: Sequence[int], alignment: int) -> int:
    """Returns the smallest footprint: some order, each as low as what was placed before and meets it allows."""
    times = [_times(buffer, len(above)) for buffer in buffers]
    best = 10**9
    for order in itertools.permutations(range(len(buffers))):
        ends: dict[int, int] = {}
        for i in order:
            floor = max((ends[k] for k in ends if times[i] & times[k]), default=0)
            ends[i] = -(-floor // alignment) * alignment + buffers[i][2]
        best = min(best, max((ends[i] + max(above[time] for time in times[i]) for i in order), default=0))
    return best


@given(buffers=_BUFFERS, alignment=st.sampled_from((1, 8, 512)))
def test_pack_overlaps_nothing_and_keeps_the_alignment(buffers: Buffers, alignment: int) -> None:
    layout = pack(buffers, alignment_bytes=alignment)
    _assert_sound(buffers, layout, alignment)
    assert layout.bound_bytes >= _load(buffers)
    assert layout == pack(buffers, alignment_bytes=alignment)


@settings(max_examples=examples(200))
@given(buffers=_FEW, above=_ABOVE, alignment=_ALIGNMENT)
def test_pack_ring_finds_the_smallest_footprint_of_few_buffers(buffers: Buffers, above: list[int], alignment: int) -> None:
    smallest = _smallest([(a, b, padded(size, alignment)) for a, b, size in buffers], above, alignment)
    layout = pack_ring(buffers, above, alignment_bytes=alignment, budget=_ENDLESS)
    _assert_sound([(a, b, padded(size, alignment)) for a, b, size in buffers], layout, alignment, above)
    assert layout.footprint_bytes == layout.bound_bytes == smallest
    assert pack_ring(buffers, above, smallest, alignment, _ENDLESS).footprint_bytes == smallest
    assert pack_ring(buffers, above, smallest - 1, alignment, _ENDLESS).footprint_bytes >= smallest


@settings(max_examples=examples(100))
@given(buffers=_FEW, alignment=_ALIGNMENT)
def test_pack_finds_the_smallest_footprint_of_few_buffers(buffers: Buffers, alignment: int) -> None:
    smallest = _smallest(buffers, [0] * 2 * _RING, alignment)
    assert pack(buffers, alignment_bytes=alignment).footprint_bytes == smallest
    assert pack(buffers, smallest, alignment).footprint_bytes == smallest
    if buffers:
        with pytest.raises(InfeasiblePlanError) as caught:
            pack(buffers, smallest - 1, alignment)
        assert (caught.value.needed_bytes, caught.value.available_bytes) == (smallest, smallest - 1)
        assert caught.value.is_proven


def _footprint(buffers: Buffers, above: Sequence[int], alignment: int, capacity: int, switches: dict[str, bool]) -> int:
    found = _native.pack(
        [b[0] for b in buffers],
        [b[1] for b in buffers],
        [b[2] for b in buffers],
        [max(above[time] for time in _times(b, _RING)) for b in buffers],
        ring=_RING,
        alignment=alignment,
        capacity=capacity,
        node_budget=10**9,
        fit_budget=0,
        **switches,
    )
    return found[1]


@pytest.mark.parametrize("off", [*((name,) for name in _SWITCHES), _SWITCHES])
@settings(max_examples=examples(60))
@given(buffers=_FEW, above=_ABOVE, alignment=_ALIGNMENT)
def test_pack_without_a_switch_of_the_search_fits_the_same(
    off: tuple[str, ...], buffers: Buffers, above: list[int], alignment: int
) -> None:
    smallest = _smallest(buffers, above, alignment)
    switches = dict.fromkeys(off, False)
    assert _footprint(buffers, above, alignment, -1, switches) == smallest
    assert _footprint(buffers, above, alignment, smallest, switches) == smallest


@pytest.mark.parametrize("name", "ABCDEF")
def test_pack_meets_the_capacity_of_the_minimalloc_instances(name: str) -> None:
    buffers = _read(f"minimalloc/{name}.1048576.csv")
    layout = pack(buffers, capacity_bytes=1048576)
    _assert_sound(buffers, layout)
    assert _load(buffers) <= layout.footprint_bytes <= 1048576


def test_pack_meets_the_capacity_of_the_small_instance() -> None:
    buffers = _read("minimalloc/input.12.csv")
    layout = pack(buffers, capacity_bytes=12)
    _assert_sound(buffers, layout)
    assert layout.footprint_bytes == 12


@pytest.mark.parametrize("name", ["iopddl-G_1", "somas_tensors-resnet50", "iopddl-S_1"])
def test_pack_comes_within_a_percent_of_the_load_of_the_idealloc_instances(name: str) -> None:
    buffers = _read(f"idealloc/{name}.csv")
    layout = pack(buffers)
    if len(buffers) < 2000:
        _assert_sound(buffers, layout)
    assert _load(buffers) == layout.bound_bytes <= layout.footprint_bytes <= 1.01 * _load(buffers)


def test_pack_takes_a_buffer_that_fills_the_capacity_though_it_is_not_aligned() -> None:
    assert pack([(0, 1, 1000)], 1000, 512).offsets == (0,)
    assert pack([(0, 4, 488), (0, 4, 512), (1, 2, 512)], 1512, 512).footprint_bytes == 1512


def test_pack_says_when_the_capacity_is_below_what_is_live_at_once() -> None:
    with pytest.raises(InfeasiblePlanError, match=r"none exists: .* live at once") as caught:
        pack([(0, 2, 5), (1, 3, 6)], capacity_bytes=10)
    assert (caught.value.needed_bytes, caught.value.available_bytes, caught.value.is_proven) == (11, 10, True)


@pytest.mark.parametrize("name", ["A", "C", "E"])
def test_pack_does_not_call_an_instance_infeasible_when_only_time_ran_out(name: str) -> None:
    """These have layouts within the capacity, which take longer to find than a microsecond."""
    buffers = _read(f"minimalloc/{name}.1048576.csv")
    with pytest.raises(InfeasiblePlanError, match=r"none was found in .* s; one may exist") as caught:
        pack(buffers, capacity_bytes=1048576, time_limit_s=1e-6)
    assert not caught.value.is_proven
    assert caught.value.needed_bytes > caught.value.available_bytes == 1048576
    assert pack(buffers, capacity_bytes=caught.value.needed_bytes).footprint_bytes <= caught.value.needed_bytes


def test_pack_refuses_empty_buffers_and_alignment() -> None:
    with pytest.raises(ConfigError, match="buffer 1"):
        pack([(0, 1, 1), (2, 2, 1)])
    with pytest.raises(ConfigError, match="alignment"):
        pack([(0, 1, 1)], alignment_bytes=0)
    with pytest.raises(ConfigError, match="buffer 0"):
        pack_ring([(0, 4, 1)], [0, 0, 0])
    with pytest.raises(ConfigError, match="below"):
        pack([(0, 1, 2**62)])
    with pytest.raises(ConfigError, match="below"):
        pack([(2**70, 2**70 + 1, 1)])


def test_pack_of_a_large_instance_is_sound_when_time_is_out() -> None:
    buffers = _read("minimalloc/F.1048576.csv")
    _assert_sound(buffers, pack(buffers, time_limit_s=0.0))
