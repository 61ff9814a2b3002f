"""NUMA nodes: which CPUs are near a GPU, and what runs on them."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tieroff.storage.host import numa
from tieroff.storage.host.slabs import RegisteredSlabs

GPU = "0000:17:00.0"
needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")


def sysfs(root: Path, lists: dict[int, str], gpus: dict[str, int] | None = None) -> Path:
    for node, text in lists.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    for address, node in (gpus or {}).items():
        folder = root / f"sys/bus/pci/devices/{address}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def test_a_list_of_cpus_is_read() -> None:
    assert numa.cpus_of("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa.cpus_of("\n") == set()


def test_ranks_without_gpus_are_spread_over_the_nodes_in_order(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {0: "0-3", 1: "4-7"})
    assert numa.places(4, root=root, allowed=range(8)) == [{0, 1, 2, 3}] * 2 + [{4, 5, 6, 7}] * 2
    assert numa.places(1, root=root, allowed=range(8)) == [{0, 1, 2, 3}]


def test_a_rank_runs_where_its_gpu_hangs(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {0: "0-3", 1: "4-7"}, {"0000:17:00.0": 1, "0000:3a:00.0": 0, "0000:5d:00.0": -1})
    gpus = ["0000:17:00.0", "0000:3A:00.0", "0000:5d:00.0", "0000:ff:00.0"]
    nodes = [min(cpus) // 4 for cpus in numa.places(4, gpus, root, range(8)) or []]
    assert nodes == [1, 0, 1, 1]  # the system does not say of the last two: their share of the nodes


def test_one_node_and_a_machine_that_tells_nothing_leave_ranks_alone(tmp_path: Path) -> None:
    assert numa.places(2, root=sysfs(tmp_path / "one", {0: "0-3"}), allowed=range(4)) is None
    assert numa.places(2, root=tmp_path / "none", allowed=range(4)) is None


def test_cpus_that_are_not_allowed_and_nodes_of_memory_alone_do_not_count(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {0: "0-3", 1: "4-7", 2: ""})
    assert numa.places(2, root=root, allowed=[2, 3, 5]) == [{2, 3}, {5}]
    assert numa.places(2, root=root, allowed=[2, 3]) is None


def test_binding_holds_for_this_process() -> None:
    before = os.sched_getaffinity(0)
    try:
        numa.bind({min(before)})
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)


def test_the_address_of_a_gpu_is_what_the_system_calls_it() -> None:
    assert numa.pci_address(SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)) == GPU
    assert numa.pci_address(SimpleNamespace(pci_domain_id=0x10, pci_bus_id=0xAB, pci_device_id=0x1F)) == "0010:ab:1f.0"


def test_cpus_near_a_gpu_are_those_of_its_node_that_are_allowed(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {0: "0-3", 1: "4-7"}, {GPU: 1})
    assert numa.cpus_near(GPU, root, range(8)) == {4, 5, 6, 7}
    assert numa.cpus_near(GPU, root, [0, 5]) == {5}


@pytest.mark.parametrize(
    ("lists", "node", "allowed"),
    [
        ({0: "0-3"}, 0, range(4)),  # one node
        ({0: "0-3", 1: "4-7"}, 1, range(4)),  # bound to another
        ({0: "0-3", 1: "4-7"}, 1, range(4, 8)),  # bound to its own
        ({0: "0-3", 1: "4-7"}, -1, range(8)),  # the system does not say
        ({}, 0, range(8)),  # the system knows no nodes
    ],
)
def test_none_are_near_where_there_is_nothing_to_choose(
    lists: dict[int, str], node: int, allowed: range, tmp_path: Path
) -> None:
    assert numa.cpus_near(GPU, sysfs(tmp_path, lists, {GPU: node}), allowed) == frozenset()


def test_a_gpu_that_the_system_does_not_know_is_near_none(tmp_path: Path) -> None:
    root = sysfs(tmp_path, {0: "0-3", 1: "4-7"})
    assert numa.cpus_near(GPU, root, range(8)) == frozenset()


@needs_two_cpus
def test_a_thread_runs_on_cpus_for_a_while_and_so_do_those_that_it_starts() -> None:
    before, seen = os.sched_getaffinity(0), list[set[int]]()

    def look() -> None:
        seen.append(os.sched_getaffinity(0))

    others = threading.Event()

    def look_later() -> None:
        others.wait(30)
        look()

    other = threading.Thread(target=look_later)
    other.start()
    with pytest.raises(ValueError, match="inside"), numa.running_on({min(before)}):
        look()
        started = threading.Thread(target=look)
        started.start()
        started.join()
        others.set()
        other.join()
        raise ValueError("inside")
    assert seen == [{min(before)}, {min(before)}, before]
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("cpus", [frozenset[int](), frozenset({1023})])
def test_no_cpus_and_such_as_are_not_there_leave_a_thread_alone(cpus: frozenset[int]) -> None:
    before = os.sched_getaffinity(0)
    with numa.running_on(cpus):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@needs_two_cpus
def test_pinned_memory_is_first_touched_near_the_device() -> None:
    before, seen = os.sched_getaffinity(0), list[set[int]]()

    def register(address: int, size_bytes: int) -> None:
        seen.append(os.sched_getaffinity(0))

    slabs = RegisteredSlabs(register, lambda address: None, {max(before)})
    assert slabs.make(1 << 20).size_bytes == 1 << 20
    assert seen == [{max(before)}]
    assert os.sched_getaffinity(0) == before
