"""Whether a measurement can be true. A result that cannot is refused, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tieroff.probe.nvme import NvmeRates
from tieroff.units import format_bytes

COUNTED_SHARE_MIN = 0.5
"""Share of the bytes read that the system must have taken from a drive. Reads of a second pass over a buffered file, and
pages that were still on their way to the drive, leave some room; a file in the page cache is far below."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes that this process had moved to and from drives, as the system counts them."""

    written_bytes: int
    read_bytes: int

    def since(self, before: Counters) -> Counters:
        """Returns what was added since."""
        return Counters(self.written_bytes - before.written_bytes, self.read_bytes - before.read_bytes)


def read_counters(path: Path = Path("/proc/self/io")) -> Counters:
    """Returns the system's counters; zeros where it keeps none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return Counters(0, 0)
    values = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return Counters(values.get("write_bytes", 0), values.get("read_bytes", 0))


def doubt(rates: NvmeRates, read_bytes: int, counted: Counters, memory_bytes_per_s: float) -> str:
    """Returns why rates cannot be true, or "".

    Args:
        rates: what was measured.
        read_bytes: what the engine says it read.
        counted: what the system says was moved to and from drives meanwhile.
        memory_bytes_per_s: what several cores copy in memory at once.
    """
    fastest = max(rates.read_bytes_per_s, rates.both_read_bytes_per_s)
    if fastest > memory_bytes_per_s:
        return (
            f"reads of {format_bytes(fastest)}/s are faster than memory, which copies {format_bytes(memory_bytes_per_s)}/s: "
            "they did not come from a drive"
        )
    # Counters that show nothing at all are those of a file system that does its I/O elsewhere: they say nothing.
    is_silent = counted.written_bytes == 0 and counted.read_bytes == 0
    if not is_silent and counted.read_bytes < COUNTED_SHARE_MIN * read_bytes:
        return (
            f"of {format_bytes(read_bytes)} that were read, {format_bytes(counted.read_bytes)} came from a drive: the rest "
            "lay in the page cache"
        )
    return ""
