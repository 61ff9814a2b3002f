"""A device budget as people write it: bytes, a share of a step's peak, or the least."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tieroff.errors import ConfigError
from tieroff.units import MOST_BYTES, format_bytes, parse_bytes

_LEAST = "min"
# A number without a unit up to here is meant as a share: no step runs in so few bytes.
LIKELY_SHARE = re.compile(r"\s*(100|[1-9][0-9]?|0?\.[0-9]+|[1-9][0-9]?\.[0-9]+)\s*")
_MOST_PERCENT = 10**6
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A limit on the device tier: bytes, a share of a trace's peak, or the least that a step runs in.

    Attributes:
        size_bytes: the limit, or None when it is another one.
        share: the limit over the trace's peak of live bytes with nothing moved (0.25 is a quarter), or None.
        is_least: the limit is the least that each kind of step runs in.
    """

    size_bytes: int | None = None
    share: float | None = None
    is_least: bool = False

    def __post_init__(self) -> None:
        if (self.size_bytes is not None) + (self.share is not None) + self.is_least != 1:
            raise ConfigError(f'expected bytes, a share or "{_LEAST}", got {self.size_bytes!r} and {self.share!r}')

    @classmethod
    def parse(cls, value: int | str | DeviceBudget) -> DeviceBudget:
        """Returns the budget that an integer or text such as "6GiB", "25%" or "min" stands for.

        Raises:
            ConfigError: the value has another form, the share is zero, or it is 50 or "50", which lack their "%".
        """
        if isinstance(value, DeviceBudget):
            return value
        if isinstance(value, float):
            raise _wrong(value)
        if isinstance(value, str) and value.strip().lower() == _LEAST:
            return cls(is_least=True)
        if not isinstance(value, bool) and LIKELY_SHARE.fullmatch(text := str(value).strip()):
            share = f"{float(text) * 100:.12g}%" if float(text) < 1 else f"{text}%"
            raise ConfigError(
                f'expected bytes with a unit, a share like "25%" or "{_LEAST}", got {value!r}, which would be {text} bytes; '
                f'for a share of the peak write "{share}", for bytes a unit: "{text}GiB"'
            )
        match = _SHARE.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            try:
                return cls(size_bytes=parse_bytes(value))
            except ConfigError:
                raise _wrong(value) from None
        if float(match[1]) == 0:
            raise ConfigError(f'expected a share above 0%, got {value!r}; write "{_LEAST}" for the least that a step runs in')
        if float(match[1]) > _MOST_PERCENT:
            raise ConfigError(f'expected a share of at most {_MOST_PERCENT}%, got {value!r}; "100%" is what the step needs')
        return cls(share=float(match[1]) / 100)

    def resolve(self, peak_bytes: int) -> int:
        """Returns the limit in bytes for a step whose live bytes peak at `peak_bytes` with nothing moved.

        Of the least that a step runs in nothing is known here: 0, which whoever asks has to raise.
        """
        return self.size_bytes if self.size_bytes is not None else int((self.share or 0.0) * peak_bytes)

    def written(self) -> int | str:
        """Returns the value that `parse` reads as this budget: integer bytes or text such as "25%" or "min"."""
        if self.is_least:
            return _LEAST
        return self.size_bytes if self.size_bytes is not None else f"{(self.share or 0.0) * 100:.12g}%"

    def raised_from(self, peak_bytes: int, budget_bytes: int) -> str:
        """Returns this budget for people, where a step of this peak got `budget_bytes`, which is more; else ""."""
        if self.is_least or budget_bytes <= self.resolve(peak_bytes):
            return ""
        written = self.written()
        return written if isinstance(written, str) else format_bytes(written)


def _wrong(value: object) -> ConfigError:
    return ConfigError(f'expected bytes like "6GiB", a share like "25%" or "{_LEAST}", got {value!r}; write "{_meant(value)}"')


def _meant(value: object) -> str:
    """Returns the budget that a wrong one was probably meant to be."""
    if isinstance(value, Mapping) and len(value) == 1:  # a table of a config: {"device": ...}
        return _meant(next(iter(value.values())))
    text = str(value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value).strip()
    if (figure := _figure(text)) is not None:
        return _of_figure(figure)
    number = re.match(r"([0-9]*(?:[.,][0-9]+)|[0-9]+)\s*([a-zA-Z%]?)", text)
    if number is None:
        return _LEAST
    unit, digits = number[2].upper(), number[1].replace(",", ".")
    digits = f"0{digits}" if digits.startswith(".") else digits
    if float(digits) > _MOST_PERCENT:
        return _LEAST
    return f"{digits}{unit}iB" if unit in ("K", "M", "G", "T") else f"{digits}%"


def _figure(text: str) -> float | None:
    """Returns the number that a text is, as Python's or with commas between thousands; None for another text."""
    try:
        return float(text.replace(",", "") if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", text) else text)
    except ValueError:
        return None


def _of_figure(figure: float) -> str:
    """Returns the budget that a number without a unit is: a fraction, a percentage, or bytes such as half of what is free."""
    if not 0 < figure <= MOST_BYTES:
        return _LEAST
    share = figure * 100 if figure <= 1 else figure
    return f"{share:.12g}%" if share <= 100 else str(int(figure))
