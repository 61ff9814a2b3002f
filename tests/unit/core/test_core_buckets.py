"""What the runtime and tracing share: buckets of the optimizer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tieroff.core.buckets import buckets_of

MIB = 1 << 20


@given(st.lists(st.integers(0, 64 * MIB), max_size=40))
def test_buckets_are_neighbours_within_their_limit(sizes: list[int]) -> None:
    buckets = buckets_of(sizes)
    assert [position for bucket in buckets for position in bucket] == list(range(len(sizes)))
    limit = max(min(32 * MIB, sum(sizes) // 8), 1)
    for bucket, following in zip(buckets, [*buckets[1:], range(0)], strict=True):
        assert len(bucket) == 1 or sum(sizes[i] for i in bucket) <= limit or not sizes
        assert not following or sum(sizes[i] for i in bucket) + sizes[following[0]] > limit


def test_nothing_to_update_is_one_empty_bucket() -> None:
    assert buckets_of([]) == [range(0)]
    assert buckets_of([4 * MIB] * 16) == [range(i, i + 2) for i in range(0, 16, 2)]
