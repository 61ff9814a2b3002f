"""Which CPUs each rank runs on: those of the NUMA node that its GPU hangs on, or of its share of the nodes.

Memory follows: the system gives a page to the node of the CPU that touches it first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


def cpus_of(text: str) -> set[int]:
    """Returns the numbers in a list such as "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def nodes(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> dict[int, set[int]]:
    """Returns the CPUs of each NUMA node, as far as this process may run on them; nodes without any are left out.

    Args:
        root: where /sys is found.
        allowed: the CPUs that this process may run on; None asks the system.
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            cpus = cpus_of((folder / "cpulist").read_text()) & usable
        except OSError:
            continue  # a node that went away meanwhile
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def node_of_gpu(address: str, root: Path = Path("/")) -> int | None:
    """Returns the NUMA node of a PCI device such as "0000:17:00.0"; None where the system does not say."""
    try:
        node = int((root / "sys/bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def places(
    count: int, gpus: Sequence[str] = (), root: Path = Path("/"), allowed: Iterable[int] | None = None
) -> list[set[int]] | None:
    """Returns the CPUs of each of `count` local ranks; None on a machine with one node, where there is nothing to choose.

    A rank whose GPU's node is not known, and every rank without a GPU, takes its share of the nodes in their order.

    Args:
        count: of local ranks.
        gpus: PCI addresses by local rank.
        root: where /sys is found.
        allowed: the CPUs that this process may run on; None asks the system.
    """
    found = nodes(root, allowed)
    if len(found) < 2:
        return None
    order = list(found)
    chosen = []
    for rank in range(count):
        node = node_of_gpu(gpus[rank], root) if rank < len(gpus) else None
        chosen.append(found[node if node in found else order[rank * len(order) // count]])
    return chosen


def bind(cpus: Iterable[int]) -> None:
    """Binds this process, and what it starts from now on, to these CPUs."""
    os.sched_setaffinity(0, cpus)
