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
        is_alone = any(sizes[i] > limit // 2 for i in (*bucket, *following[:1])) and limit < 32 * MIB
        assert not following or is_alone or sum(sizes[i] for i in bucket) + sizes[following[0]] > limit


def test_a_large_parameter_of_a_small_model_is_updated_alone() -> None:
    """An update takes several times the bytes of its bucket: with others it would say what the step needs at least."""
    assert buckets_of([10 * MIB, *[MIB] * 90, 10 * MIB]) == [
        range(1),
        *(range(i, i + 13) for i in range(1, 79, 13)),
        range(79, 91),
        range(91, 92),
    ]


def test_nothing_to_update_is_one_empty_bucket() -> None:
    assert buckets_of([]) == [range(0)]
    assert buckets_of([4 * MIB] * 16) == [range(i, i + 2) for i in range(0, 16, 2)]
