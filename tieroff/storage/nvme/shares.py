"""How much of a store's capacity each directory takes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from tieroff.errors import ConfigError


def share_out(capacity_bytes: int, speeds: Sequence[float], limits: Sequence[int]) -> list[int]:
    """Returns the bytes of each directory: in proportion to its speed, as far as its room goes.

    What a directory has no room for is shared out over the others in the same way.

    Args:
        capacity_bytes: to be shared out, above 0.
        speeds: in any unit, above 0, one per directory.
        limits: the room of each directory in bytes, 0 or more.

    Returns:
        One number per directory, none above its limit; their sum is the capacity, or all the room there is.

    Raises:
        ConfigError: a speed is missing, or not above 0.
    """
    if len(speeds) != len(limits) or any(not speed > 0 for speed in speeds):
        raise ConfigError(f"machine file: expected a write speed above 0 for each of {len(limits)} folders, got {list(speeds)}")
    shares = [0] * len(limits)
    open_ones = list(range(len(limits)))
    left = capacity_bytes
    while open_ones and left > 0:
        total = sum(speeds[index] for index in open_ones)
        full = [index for index in open_ones if left * (speeds[index] / total) >= limits[index]]
        if not full:
            for index in open_ones[:-1]:
                shares[index] = int(left * (speeds[index] / total))
            shares[open_ones[-1]] = left - sum(shares[index] for index in open_ones[:-1])
            break
        for index in full:
            shares[index] = limits[index]
            open_ones.remove(index)
        left = capacity_bytes - sum(shares)
    return shares
