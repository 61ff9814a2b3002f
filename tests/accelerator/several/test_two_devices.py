"""A model on the second of two devices, in a process whose current device is the first: what is made, is made on the second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.accelerator import target
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.accelerator import AcceleratorBackend
from tieroff.runtime.backend.place import BlockPlace
from tieroff.storage.completion import Completion
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore, Room

KIB, MIB = 2**10, 2**20
SIZE_BYTES, STAGING_BYTES = 256 * KIB, 512 * KIB
WAIT_S = 30


@pytest.fixture
def second() -> Iterator[AcceleratorBackend]:
    assert torch.accelerator.current_device_index() == 0
    backend = target.backend(1)
    backend.use_staging(STAGING_BYTES)
    yield backend
    backend.close()


class Noting:
    """An I/O engine that notes the current device of whoever calls it."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.devices = inner, set[int]()

    def read(self, *args: Any, **options: Any) -> Any:
        self.devices.add(torch.accelerator.current_device_index())
        return self._inner.read(*args, **options)

    def write(self, *args: Any, **options: Any) -> Any:
        self.devices.add(torch.accelerator.current_device_index())
        return self._inner.write(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_threads_between_the_device_and_files_have_it_as_their_current_one(second: AcceleratorBackend, tmp_path: Path) -> None:
    """Else PyTorch puts the first device back after what it does on a stream, and CUDA makes a context there."""
    engine: Any = Noting(choose("threads"))
    store = FileStore([tmp_path], 8 * MIB, engine, room=Room(grow_bytes=MIB))
    place = BlockPlace(store, SIZE_BYTES)
    value = torch.full((SIZE_BYTES,), 7, dtype=torch.uint8, device=second.device)
    second.copy_out(value, place).wait(WAIT_S)
    found = second.empty(SIZE_BYTES)
    second.copy_in(place, found).wait(WAIT_S)
    assert torch.equal(found, value)
    assert engine.devices == {second.device.index}
    place.free()
    store.close()
    engine.close()


class Direct:
    """A place whose engine takes the device's memory itself; notes the current device of the thread that hands it over."""

    tier, size_bytes, may_rest, address, takes_device_memory = Tier.NVME, SIZE_BYTES, False, None, True

    def __init__(self) -> None:
        self.devices: list[int] = []

    def write(self, source_address: int, keep: object, by: object = None) -> Completion:
        return self._noted()

    def read(self, target_address: int, keep: object, by: object = None) -> Completion:
        return self._noted()

    def _noted(self) -> Any:
        self.devices.append(torch.accelerator.current_device_index())
        return Ended()


class Ended:
    start_ns = stop_ns = 1

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """It has ended."""


def test_threads_that_wait_for_the_device_have_it_as_their_current_one(second: AcceleratorBackend) -> None:
    place: Any = Direct()
    value = second.empty(SIZE_BYTES)
    second.copy_out(value, place).wait(WAIT_S)
    second.copy_in(place, value).wait(WAIT_S)
    assert place.devices == [second.device.index] * 2


def test_links_are_measured_on_the_models_device(tmp_path: Path) -> None:
    """The first one may be full of what other processes have there."""
    first, second = target.device(0), target.device(1)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(second)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.accelerator.reset_peak_memory_stats(first)
    before_bytes = torch.accelerator.memory_allocated(first)
    config = {"plan": {"min_bytes": 0, "background": False}, "budget": {"device": "50%", "host": "16MiB"}, "nvme": {"dirs": []}}
    tieroff.wrap(model, optimizer, config)
    for _ in range(8):
        model(torch.randn(8, 64).to(second)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tieroff.engine(model).stats().phase == "planned"
    assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.max_memory_allocated(first) == before_bytes
    tieroff.unwrap(model)
