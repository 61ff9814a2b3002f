"""What differs between vendors: how host memory is pinned, and what happens when a driver refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.accelerator import sim, target, vendor
from tests.support.models import GPT_WORKLOAD, MLP_WORKLOAD
from tests.support.parity import HOST, MIXED, Tiers, Workload, check_parity
from tieroff.errors import StoreError
from tieroff.probe.links import near_cpus
from tieroff.runtime.backend.vendor import AnyVendor, Cuda, register_vendor
from tieroff.storage.host import numa
from tieroff.storage.memory import PAGE_BYTES

MIB = 1 << 20
PROPERTIES = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x17, pci_device_id=0)


@pytest.fixture
def any_vendor() -> Iterator[None]:
    """Nothing is known of the device but what PyTorch says."""
    register_vendor(sim.NAME, AnyVendor())
    yield
    vendor.install()


@pytest.mark.usefixtures("any_vendor")
@pytest.mark.parametrize(("workload", "tiers"), [(MLP_WORKLOAD, HOST), (GPT_WORKLOAD, MIXED)], ids=["mlp", "gpt"])
def test_a_device_that_nothing_is_known_of_computes_the_same(workload: Workload, tiers: Tiers, tmp_path: Path) -> None:
    check_parity(workload, tiers, target.backend, tmp_path)


@pytest.mark.usefixtures("any_vendor")
def test_memory_is_pinned_on_the_host_whatever_the_programs_default_device_is() -> None:
    with torch.device(sim.NAME):
        slab = target.backend().slabs.make(PAGE_BYTES)
    assert sim.is_pinned(slab.address, PAGE_BYTES)


@pytest.mark.parametrize("kind", ["cpu", sim.NAME])
def test_what_lies_below_has_no_address_where_pytorch_cannot_forbid_all_access(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_set_storage_data_ptr_access_error_msg", raising=False)  # builds with CUDA have it
    storage: Any = torch._C._construct_storage_from_data_pointer(0, torch.device(kind), 64)
    offloaded = torch.empty(0, device=kind).set_(storage, 0, (16,), (1,))
    AnyVendor().forbid_access(storage, "it lies below")
    with pytest.raises(RuntimeError, match="data"):
        offloaded.data_ptr()
    if kind == "cpu":  # the simulated device's kernels ask for no address, they have a mapping of their own
        with pytest.raises(RuntimeError, match="data"):
            offloaded.fill_(1)


@pytest.mark.usefixtures("any_vendor")
def test_pytorchs_pinned_memory_takes_no_more_than_was_asked_for() -> None:
    """Its allocator rounds up to a power of two: one page more would be twice as much."""
    slab = target.backend().slabs.make(4 * MIB)
    assert slab.address % PAGE_BYTES == 0
    assert slab.size_bytes == 4 * MIB
    assert sim.is_pinned(slab.address, 4 * MIB)
    assert not sim.is_pinned(slab.address, 4 * MIB + PAGE_BYTES)


def test_a_gpu_is_asked_which_node_it_hangs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: PROPERTIES)
    asked = list[str]()

    def near(address: str) -> frozenset[int]:
        asked.append(address)
        return frozenset({3})

    monkeypatch.setattr(numa, "cpus_near", near)
    assert Cuda().near_cpus(torch.device("cuda:0")) == near_cpus("cuda") == {3}
    assert asked == ["0000:17:00.0"] * 2
    assert near_cpus(target.device().type) == near_cpus("cpu") == frozenset()


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PyTorch has of CUDA's runtime, on the simulated device: it has no call that takes an error that was left behind."""
    calls = SimpleNamespace(
        cudaHostRegister=lambda address, size_bytes, flags: sim.host_register(address, size_bytes),
        cudaHostUnregister=sim.host_unregister,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)


@pytest.mark.usefixtures("cudart")
def test_an_error_that_cuda_leaves_behind_is_no_kernels() -> None:
    slabs = Cuda().slabs(target.device())
    sim.set_pin_limit(MIB)
    with pytest.raises(StoreError, match="cudaHostRegister returned 2"):
        slabs.make(2 * MIB)
    torch.zeros(1, device=target.device()).add_(1)


@pytest.mark.usefixtures("cudart")
def test_memory_that_cuda_does_not_unpin_is_told(caplog: pytest.LogCaptureFixture) -> None:
    slabs = Cuda().slabs(target.device())
    slab = slabs.make(MIB)
    slabs.release(slab)
    assert caplog.text == ""
    slabs.release(slab)
    assert "cudaHostUnregister returned 713" in caplog.text
    torch.zeros(1, device=target.device()).add_(1)
