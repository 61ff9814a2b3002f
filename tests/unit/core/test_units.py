"""Sizes and times as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieroff.errors import ConfigError
from tieroff.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("12B", 12),
        ("6GiB", 6 * 2**30),
        ("1.5 GB", 1_500_000_000),
        (" 64 MiB ", 64 * 2**20),
        ("2tib", 2 * 2**40),
        ("3 kb", 3000),
        ("15.754GiB", 16915728695),
    ],
)
def test_parse_bytes_reads_units(text: int | str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "5 parsecs", "25%", "1,5GB", -1, True, None, 1.5])
def test_parse_bytes_refuses_what_is_no_size(text: object) -> None:
    with pytest.raises(ConfigError, match="expected bytes"):
        parse_bytes(text)  # type: ignore[arg-type]


@given(st.integers(0, 2**60))
def test_parse_bytes_keeps_integers_exactly(size_bytes: int) -> None:
    assert parse_bytes(str(size_bytes)) == parse_bytes(size_bytes) == size_bytes


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (6 * 2**30, "6.00 GiB"), (-(2**20), "-1.00 MiB"), (2**41, "2.00 TiB")],
)
def test_format_bytes_is_short(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(3.2, "3.20 s"), (0.0124, "12.4 ms"), (80e-6, "80 us"), (0, "0 us")])
def test_format_seconds_is_short(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
