"""NUMA nodes: the CPUs that are near a GPU, and what runs on them.

Ranks of a launch run there. Of a process that nobody bound, the threads that update parameters in host memory do, and the host
memory that its device copies to and from lies there: the system gives a page to the node of the CPU that touches it first.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

log = logging.getLogger("tieroff")


class OnPciBus(Protocol):
    """What `torch.cuda.get_device_properties` says of where a GPU is."""

    pci_domain_id: int
    pci_bus_id: int
    pci_device_id: int


def pci_address(gpu: OnPciBus) -> str:
    """Returns the address of a GPU, such as "0000:17:00.0"."""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"


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


def cpus_near(gpu: str, root: Path = Path("/"), allowed: Iterable[int] | None = None) -> frozenset[int]:
    """Returns the CPUs of the node that a GPU hangs on, as far as this process may run on them.

    None where there is nothing to choose: on a machine with one node, in a process that was bound to one, and where the system
    does not say.

    Args:
        gpu: its PCI address.
        root: where /sys is found.
        allowed: the CPUs that this process may run on; None asks the system.
    """
    found = nodes(root, allowed)
    node = node_of_gpu(gpu, root) if len(found) > 1 else None
    return frozenset(found.get(node, ())) if node is not None else frozenset()


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


@contextlib.contextmanager
def running_on(cpus: Collection[int]) -> Iterator[None]:
    """Inside, the calling thread runs on these CPUs, and so do threads that it starts; none of them leaves it alone."""
    before = os.sched_getaffinity(0)
    if not cpus or not _bound(cpus):
        yield
        return
    try:
        yield
    finally:
        _bound(before)


def _bound(cpus: Collection[int]) -> bool:
    """Binds the calling thread; False where the system refuses, as when CPUs were taken away meanwhile: slower, not wrong."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        log.debug("a thread could not be bound to the processors %s: %s", sorted(cpus), error)
        return False
    return True
