"""The collectives of this process, from the record that torch keeps of them anyway, so that a step pays nothing."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tieroff.core.ranks.collectives import Call, Collectives

# No rank leaves one of these before all have called it. With another (a broadcast) only the root may be awaited, and torch's
# record does not say which rank that is. Those of NCCL run on the device: the record does not say when it got to them.
_MEETINGS = ("gloo:all_gather", "gloo:all_reduce", "gloo:all_to_all", "gloo:barrier")
# What is read of an entry: private to torch, whose other versions may name it otherwise. Then nothing is known of calls.
_KEYS = {"profiling_name", "is_p2p", "process_group", "collective_seq_id", "output_sizes", "output_dtypes", "time_created_ns"}
# The same in all processes on one running kernel, in whichever container: they share its clock.
_KERNEL = Path("/proc/sys/kernel/random/boot_id")


def is_one_of_several() -> bool:
    """True in a process group of several ranks."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def collectives_here() -> Collectives | None:
    """Returns the collectives that this rank called last; None without a process group of several ranks.

    They are those of gloo in torch's flight recorder, which holds the last 2000 (`TORCH_FR_BUFFER_SIZE`).
    """
    if not is_one_of_several():
        return None
    # A private name: torch has no public one that gives the record to the program itself.
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    calls = calls_in(json.loads(dump())) if dump is not None else ()
    machine = _KERNEL.read_text().strip() if _KERNEL.exists() else platform.node()
    return Collectives(distributed.get_rank(), distributed.get_world_size(), machine, calls)


def calls_in(record: Mapping[str, Any]) -> tuple[Call, ...]:
    """Returns the calls in a record of torch's flight recorder, oldest first; those that none leaves before all have called."""
    calls = []
    for entry in record.get("entries", ()):
        if entry.keys() >= _KEYS and entry["profiling_name"] in _MEETINGS and not entry["is_p2p"]:
            name, group = entry["profiling_name"].removeprefix("gloo:"), entry["process_group"][0]
            calls.append(Call(group, entry["collective_seq_id"], name, _shape(entry), entry["time_created_ns"]))
    return tuple(sorted(calls, key=lambda call: call.at_ns))


def _shape(entry: dict[str, Any]) -> str:
    sizes, types = entry["output_sizes"], entry["output_dtypes"]
    return ", ".join(f"{'x'.join(map(str, size))} {dtype}" for size, dtype in zip(sizes, types, strict=False))
