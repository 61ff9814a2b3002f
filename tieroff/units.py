"""Sizes and times at the edges: text to integer bytes and back. Inside the library everything is bytes and nanoseconds."""

from __future__ import annotations

import re

from tieroff.errors import ConfigError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
NS_PER_S = 1_000_000_000

MOST_BYTES = 2**60
"""The most that any size may be: sums of sizes stay within 64 bits."""

_FACTORS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_DIGITS_AT_MOST = 20  # of a figure; Python reads no integers of thousands of digits
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | str) -> int:
    """Returns integer bytes from an integer or text such as "6GiB", "1.5 GB" or "4096".

    Raises:
        ConfigError: the text has another form, an unknown unit, or is negative or more than any machine has.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f'expected bytes as an integer or text like "6GiB", got {value!r}')
    if isinstance(value, int):
        if value < 0:
            raise ConfigError(f"expected bytes >= 0, got {value}")
        return _possible(value, value)
    match = _SIZE.fullmatch(value)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f'expected bytes like "6GiB", "64MiB" or "4096", got {value!r}')
    figure = match[1].lstrip("0")
    if len(figure.partition(".")[0]) > _DIGITS_AT_MOST:
        raise _too_much(value)
    return _possible(round(float(match[1]) * factor) if "." in figure else int(figure or "0") * factor, value)


def _possible(size_bytes: int, given: int | str) -> int:
    if size_bytes > MOST_BYTES:
        raise _too_much(given)
    return size_bytes


def _too_much(given: int | str) -> ConfigError:
    return ConfigError(f"expected bytes, at most {format_bytes(MOST_BYTES)}, got {given!r}")


def format_bytes(size_bytes: float) -> str:
    """Returns bytes as short text in binary units, such as "1.50 GiB"."""
    size = float(size_bytes)
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size) >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def pasteable(size_bytes: int) -> str:
    """Returns a size of at least these bytes, and at most 1/32 more, as text that `parse_bytes` reads: "119MiB" or "12416".

    Rounded up, it still suffices where the same step needs a few pages more in another process.
    """
    granule = 1 << max(size_bytes.bit_length() - 6, 0)
    rounded = -(-size_bytes // granule) * granule
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if rounded and rounded % factor == 0:
            return f"{rounded // factor}{unit}"
    return str(rounded)


def format_seconds(seconds: float) -> str:
    """Returns a duration as short text, such as "3.20 s", "12.4 ms" or "80 us"."""
    if abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"
