"""The collectives of this process, from the record that torch keeps of them anyway, so that a step pays nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tieroff.core.ranks.collectives import Call, Collectives

# No rank leaves one of these before all have called it. With another (a broadcast) only the root may be awaited, and torch's
# record does not say which rank that is. Those of NCCL run on the device: the record does not say when it got to them.
_MEETINGS = ("gloo:all_gather", "gloo:all_reduce", "gloo:all_to_all", "gloo:barrier")
# The same in all processes on one running kernel, in whichever container: they share its clock.
_KERNEL = Path("/proc/sys/kernel/random/boot_id")


def collectives_here() -> Collectives | None:
    """Returns the collectives that this rank called last; None without a process group of several ranks.

    They are those of gloo in torch's flight recorder, which holds the last 2000 (`TORCH_FR_BUFFER_SIZE`).
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return None
    calls = sorted(_calls(), key=lambda call: call.at_ns)
    return Collectives(distributed.get_rank(), distributed.get_world_size(), _KERNEL.read_text().strip(), tuple(calls))


def _calls() -> Iterator[Call]:
    # Private names: torch has no public one that gives the record to the program itself.
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    for entry in json.loads(dump()).get("entries", ()) if dump is not None else ():
        kind = entry["profiling_name"]
        if kind in _MEETINGS and not entry["is_p2p"]:
            group, number = entry["process_group"][0], entry["collective_seq_id"]
            yield Call(group, number, kind.removeprefix("gloo:"), _shape(entry), entry["time_created_ns"])


def _shape(entry: dict[str, Any]) -> str:
    sizes, types = entry["output_sizes"], entry["output_dtypes"]
    return ", ".join(f"{'x'.join(map(str, size))} {dtype}" for size, dtype in zip(sizes, types, strict=False))
