"""Buckets: parameters of an optimizer that are updated together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tieroff.core.tensor import Tier

UPDATED_ON_HOST = "updated_on_host"
"""The key in a trace's `meta` that names the optimizer where the runtime may have the CPU run its ops."""

UPDATED_ON_DEVICE = "updated_on_device"
"""The key in a trace's `meta` that names, one per line, the parameters which the CPU updates nowhere; see `fills_vectors`."""

BYTES_BELOW = "bytes_below"
"""The key in a trace's `meta` that says what lies below all the time and is no tensor of the trace, as "host=1024 nvme=0"."""

BYTES_APART = "bytes_apart"
"""The key in a trace's `meta` that says how many bytes of the device the program has apart from the step; see `bytes_apart`."""

ELEMENTWISE = "elementwise"
"""The key in a trace's `meta` that names the optimizer where it is known to update each element by itself."""

SMALLEST_SLICED_BYTES = 1 << 20
"""No smaller parameter is updated in slices: even its whole update takes less than what a process varies by."""

SLICED_AT_LEAST_BYTES = 8 << 20
"""The same with the least that a step runs in as the budget: slices of smaller ones are not worth their time."""

_SLICES, _SLICE_BYTES = 16, 16 << 20
_VECTOR_ELEMENTS = 32  # of two bytes in the widest registers, 512 bits

_HAVE_KERNELS = frozenset(f"torch.optim.{name}" for name in ("adagrad.Adagrad", "adam.Adam", "adamw.AdamW", "sgd.SGD"))
_LARGEST_BUCKET_BYTES = 32 << 20
_BUCKETS_AT_LEAST = 8


def buckets_of(sizes_bytes: Sequence[int]) -> list[range]:
    """Returns which parameters of an optimizer are updated together, given their bytes in its order: one range per bucket.

    A bucket holds neighbours, at most 32 MiB and an eighth of all bytes, but at least one parameter. Where an eighth is less, a
    parameter of more than half of that is updated alone: an update takes several times the bytes of its bucket, and in so
    small a model that of the largest parameter, an embedding mostly, says what the step needs at least.
    """
    eighth_bytes = sum(sizes_bytes) // _BUCKETS_AT_LEAST
    limit_bytes = max(min(_LARGEST_BUCKET_BYTES, eighth_bytes), 1)
    alone_bytes = limit_bytes // 2 if eighth_bytes < _LARGEST_BUCKET_BYTES else limit_bytes
    starts, filled_bytes, is_alone = [0], 0, False
    for position, size_bytes in enumerate(sizes_bytes):
        was_alone, is_alone = is_alone, size_bytes > alone_bytes
        if position > starts[-1] and (filled_bytes + size_bytes > limit_bytes or is_alone or was_alone):
            starts.append(position)
            filled_bytes = 0
        filled_bytes += size_bytes
    return [range(*pair) for pair in zip(starts, [*starts[1:], len(sizes_bytes)], strict=True)]


def as_bytes_below(taken: Mapping[Tier, int]) -> str:
    """Returns the value of `BYTES_BELOW`; "" for nothing."""
    return " ".join(f"{tier.value}={size_bytes}" for tier, size_bytes in taken.items() if size_bytes)


def bytes_below(meta: Mapping[str, str]) -> dict[Tier, int]:
    """Returns what a trace's `meta` says of `BYTES_BELOW`."""
    pairs = (entry.split("=") for entry in meta.get(BYTES_BELOW, "").split())
    return {Tier(tier): int(size_bytes) for tier, size_bytes in pairs}


def bytes_apart(meta: Mapping[str, str]) -> int:
    """Returns what of the device, by a trace's `meta`, the program has all the time, while no op uses and nobody moves it."""
    return int(meta.get(BYTES_APART, 0))


def fills_vectors(element_count: int) -> bool:
    """False for a tensor some of whose elements come after the last whole vector of a kernel.

    Kernels may round those otherwise than the ones before, as torch's fused AdamW does on the CPU in some of a hundred. They
    are too few for a comparison to show it.
    """
    return element_count % _VECTOR_ELEMENTS == 0


def updated_on_device(meta: Mapping[str, str]) -> frozenset[str]:
    """Returns the names of the parameters that a trace's `meta` lists as `UPDATED_ON_DEVICE`."""
    return frozenset(filter(None, meta.get(UPDATED_ON_DEVICE, "").split("\n")))


def slice_bytes(size_bytes: int) -> int:
    """Returns how large the slices are in which a parameter of this size is updated: a sixteenth, and at most 16 MiB."""
    return min(size_bytes // _SLICES, _SLICE_BYTES)


def has_kernels(kind: type) -> bool:
    """True for a class of optimizers whose updates native kernels can make: by itself, since a subclass may do anything."""
    return f"{kind.__module__}.{kind.__qualname__}" in _HAVE_KERNELS
