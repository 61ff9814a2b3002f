"""What of the process's memory counts as tensors of the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tieroff.runtime.resident import Resident

ELEMENTS = 8 << 20
SIZE_BYTES = ELEMENTS * 4


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.alone
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_resident_takes_parameters_for_tensors_when_they_are_whole_or_shards(is_sharded: bool) -> None:
    value = torch.ones(ELEMENTS)
    if is_sharded:
        value = distribute_tensor(value, init_device_mesh("cpu", (1,)), [Shard(0)])
    model = nn.Module()
    model.weight = nn.Parameter(value)
    # No engine holds the parameter yet, so all of it is memory that nobody accounts for.
    overhead_bytes = Resident(model).overhead_bytes()
    assert overhead_bytes == pytest.approx(SIZE_BYTES, abs=SIZE_BYTES // 8)
