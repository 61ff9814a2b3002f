"""A new value that arrived but could not be made visible: the device copy stays the truth."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StoreError
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.backend.place import HomePlace
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.residency import State
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.table import bring_home
from tieroff.runtime.items.traffic import Traffic
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore


def test_a_home_keeps_its_new_value_when_publishing_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = choose("threads")
    store = FileStore([tmp_path], 1 << 20, engine)
    traffic = Traffic(CpuBackend(), Spill({Tier.NVME: store}, (Tier.NVME,)))
    tensor = torch.ones(1024)
    item = HomeItem(("state", "x"), "x", TensorClass.OPTIMIZER, tensor, Tier.NVME)
    item.adopt(traffic)
    item.leave(traffic)
    item.lift(traffic)
    tensor.fill_(2.0)

    def refuse(place: HomePlace) -> None:
        raise StoreError("the value read back is another")

    with monkeypatch.context() as patched, pytest.raises(StoreError, match="another"):
        patched.setattr(HomePlace, "publish", refuse)
        item.leave(traffic)

    states = [item.state]
    assert torch.equal(tensor, torch.full((1024,), 2.0))
    item.leave(traffic)
    assert [*states, item.state] == [State.DEVICE, State.LOWER]
    assert torch.equal(tensor, torch.full((1024,), 2.0))
    bring_home(item, traffic)
    assert torch.equal(tensor, torch.full((1024,), 2.0))
    store.close()
    engine.close()
