"""A sample of PyTorch's own databases of operators and modules, on the device, with everything moved."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

from tests.accelerator import target
from tests.parity.databases.test_module_db import builder_for
from tests.parity.databases.test_op_db import OPERATORS, Applied, first_sample
from tests.support.databases import check_step_parity, quiet

OPERATORS_OF, MODULES_OF = 16, 4  # one in so many is tried


def sampled(entries: Any, one_in: int) -> list[Any]:
    return [entry for entry in entries if zlib.crc32(entry.formatted_name.encode()) % one_in == 0]


def on_device(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().to(target.device()).requires_grad_(leaf.requires_grad)


@pytest.mark.parametrize("op", sampled(OPERATORS, OPERATORS_OF), ids=lambda op: op.formatted_name)
def test_operator_computes_the_same_wrapped(op: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with quiet():
        sample = first_sample(op)
        assert sample is not None, "no sample has an input to move"
        sample = sample.transform(on_device)

        def build() -> tuple[nn.Module, nn.Module]:
            model = Applied(op, sample).to(target.device())
            return model, model

        moved = check_step_parity(build, target.backend(), tmp_path_factory.getbasetemp())
    assert moved["parameter"] > 0


@pytest.mark.parametrize("info", sampled(module_db, MODULES_OF), ids=lambda info: info.formatted_name)
def test_module_computes_the_same_wrapped(info: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with quiet():
        build = builder_for(info, str(target.device()))
        moved = check_step_parity(build, target.backend(), tmp_path_factory.getbasetemp())
    assert moved["parameter"] > 0
