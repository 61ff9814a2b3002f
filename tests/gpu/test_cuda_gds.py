"""The `gds` engine on a device: bytes arrive, compute is waited for, training computes the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tieroff
from tests.support.models import GPT_WORKLOAD, MLP_WORKLOAD
from tests.support.parity import (
    NVME,
    Workload,
    assert_all_moved,
    assert_equal,
    assert_planned,
    config_for,
    run_plain,
    run_wrapped,
)
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.accelerator import AcceleratorBackend
from tieroff.runtime.backend.place import BlockPlace, HomePlace, Place
from tieroff.runtime.engine import Engine
from tieroff.storage.engines.gds import GdsEngine
from tieroff.storage.nvme.file_store import FileStore
from tieroff.storage.nvme.gds_status import gds_status

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed (tieroff[gds])"),
]

MIB = 2**20
SIZES = [1, 511, 4096, 4097, MIB - 1, 32 * MIB, 33 * MIB + 77]


@pytest.fixture
def backend() -> Iterator[AcceleratorBackend]:
    backend = AcceleratorBackend(torch.device("cuda", 0))  # without staging: what is not direct would fail
    yield backend
    backend.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    engine = GdsEngine()
    store = FileStore([tmp_path], 512 * MIB, engine, checksum="always")
    yield store
    store.close()
    engine.close()


@pytest.mark.parametrize("make_place", [BlockPlace, HomePlace])
@pytest.mark.parametrize("shift", [0, 512, 1])
def test_device_memory_comes_back_as_it_left(
    backend: AcceleratorBackend, store: FileStore, make_place: type[BlockPlace | HomePlace], shift: int
) -> None:
    for size in SIZES:
        source = torch.randint(0, 256, (size + shift,), dtype=torch.uint8, device="cuda")[shift:]
        place: Place = make_place(store, size)
        assert place.takes_device_memory
        backend.copy_out(source, place).wait(60)
        place.publish()
        around = torch.full((size + shift + 4096,), 0x5A, dtype=torch.uint8, device="cuda")
        backend.copy_in(place, around[shift : shift + size]).wait(60)
        assert torch.equal(around[shift : shift + size], source)
        assert bool((around[:shift] == 0x5A).all()) and bool((around[shift + size :] == 0x5A).all())
        place.free()


def test_home_shows_on_the_host_what_the_device_wrote(backend: AcceleratorBackend, store: FileStore) -> None:
    place = HomePlace(store, 8 * MIB)
    source = torch.randint(0, 256, (8 * MIB,), dtype=torch.uint8, device="cuda")
    backend.copy_out(source, place).wait(60)
    place.publish()
    shown = torch.frombuffer(place.home, dtype=torch.uint8)
    assert torch.equal(shown, source.cpu())
    shown[5] += 1
    target = backend.empty(8 * MIB)
    backend.copy_in(place, target).wait(60)
    assert torch.equal(target.cpu(), shown)


def test_transfers_wait_for_compute_and_compute_for_them(backend: AcceleratorBackend, store: FileStore) -> None:
    size, rounds = 16 * MIB, 8
    place = BlockPlace(store, size)
    for seed in range(rounds):
        source = torch.zeros(size, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(50_000_000)  # the write below is asked for long before this value is there
        source += seed + 1
        backend.copy_out(source, place).wait(60)
        del source  # its memory may be given to the next tensor
        target = backend.empty(size)
        torch.cuda._sleep(50_000_000)
        target.fill_(0xFF)  # earlier work on the target's memory comes before the read
        backend.copy_in(place, target).wait(60)
        assert int(target.min()) == int(target.max()) == seed + 1


def test_status_names_the_path_of_the_folder(tmp_path: Path) -> None:
    status = gds_status([tmp_path])[0]
    assert status.path in ("nvidia-fs", "cufile", "compatibility"), status.reason
    assert (status.reason == "") == (status.path == "nvidia-fs")


@pytest.mark.parametrize("workload", [MLP_WORKLOAD, GPT_WORKLOAD], ids=["mlp", "gpt"])
def test_training_computes_the_same_through_gds(workload: Workload, tmp_path: Path) -> None:
    config = config_for(NVME, tmp_path)
    config["nvme"]["engine"] = "gds"

    def after_step(index: int, engine: Engine) -> None:
        store = engine.stores[Tier.NVME]
        assert isinstance(store, FileStore) and isinstance(store.engine, GdsEngine)
        assert store.engine.statuses.keys() == {str(tmp_path)}
        if index >= workload.steps - 3:
            assert_planned(engine, NVME)
            assert_all_moved(engine, workload, NVME)

    plain = run_plain(workload, torch.device("cuda"), clip=tieroff.clip_grad_norm_)
    assert_equal(
        plain,
        run_wrapped(workload, config, AcceleratorBackend(torch.device("cuda", 0)), after_step, clip=tieroff.clip_grad_norm_),
    )
