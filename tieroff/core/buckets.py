"""Buckets: parameters of an optimizer that are updated together."""

from __future__ import annotations

from collections.abc import Sequence

_LARGEST_BUCKET_BYTES = 32 << 20
_BUCKETS_AT_LEAST = 8


def buckets_of(sizes_bytes: Sequence[int]) -> list[range]:
    """Returns which parameters of an optimizer are updated together, given their bytes in its order: one range per bucket.

    A bucket holds neighbours, at most 32 MiB and an eighth of all bytes, but at least one parameter.
    """
    limit_bytes = max(min(_LARGEST_BUCKET_BYTES, sum(sizes_bytes) // _BUCKETS_AT_LEAST), 1)
    starts, filled_bytes = [0], 0
    for position, size_bytes in enumerate(sizes_bytes):
        if position > starts[-1] and filled_bytes + size_bytes > limit_bytes:
            starts.append(position)
            filled_bytes = 0
        filled_bytes += size_bytes
    return [range(*pair) for pair in zip(starts, [*starts[1:], len(sizes_bytes)], strict=True)]
