"""PyTorch's own databases of operators and modules, on the device, with everything moved; by default a sample."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db

from tests.accelerator import target
from tests.parity.databases.test_module_db import builder_for
from tests.parity.databases.test_op_db import LEFT_OUT, OPERATORS, Applied, first_sample
from tests.support.databases import Build, check_step_parity, is_repeatable, one_step, quiet

# Operators whose plain run fails on the simulated device, and why.
NOT_PLAIN = {
    "sparse_sampled_addmm": "it has no kernels for compressed rows",
    "sparse_mm_reduce": "as above",
    "to_sparse": "its kernel asks for a memory format that a sparse tensor has not",
    "nn_functional_embedding_bag": "its kernel gives results of another shape than the meta kernel tells",
    "tensor_split": "its sample has a tensor that must stay on the host",
}
# Its sample is copied to the host, asynchronously, and read there without a wait: by itself a race.
RACING = ("to",)

OPERATORS_OF, MODULES_OF = 16, 4  # one in so many is tried by default


def entries(database: Any, one_in: int) -> list[Any]:
    """Returns all entries of a database as parameters, all but one in so many marked as long."""

    def marks(entry: Any) -> Any:
        return [] if zlib.crc32(entry.formatted_name.encode()) % one_in == 0 else [pytest.mark.long]

    return [
        pytest.param(entry, marks=marks(entry), id=entry.formatted_name)
        for entry in database
        if entry.formatted_name not in RACING
    ]


def on_device(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().to(target.device()).requires_grad_(leaf.requires_grad)


def skip_what_no_plain_run_repeats(build: Build) -> None:
    if not target.IS_SIMULATED and not is_repeatable(build):
        pytest.skip("PyTorch has no deterministic kernel for it on this device, so no plain run is a reference")


@pytest.mark.parametrize("op", entries(OPERATORS, OPERATORS_OF))
def test_operator_computes_the_same_wrapped(op: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with quiet():
        sample = first_sample(op)
        assert sample is not None, "no sample has an input to move"
        sample = sample.transform(on_device)

        def build() -> tuple[nn.Module, nn.Module]:
            model = Applied(op, sample).to(target.device())
            return model, model

        def plain() -> None:
            model, run = build()
            one_step(run, model, 0)

        def check() -> dict[str, int]:
            return check_step_parity(build, target.backend(), tmp_path_factory.getbasetemp())

        if op.formatted_name in LEFT_OUT:
            with pytest.raises(AssertionError, match="differs"):
                check()
        elif op.formatted_name in NOT_PLAIN and target.IS_SIMULATED:
            with pytest.raises((RuntimeError, NotImplementedError)):
                plain()
        else:
            skip_what_no_plain_run_repeats(build)
            assert check()["parameter"] > 0


@pytest.mark.parametrize("info", entries(module_db, MODULES_OF))
def test_module_computes_the_same_wrapped(info: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with quiet():
        build = builder_for(info, str(target.device()))
        skip_what_no_plain_run_repeats(build)
        moved = check_step_parity(build, target.backend(), tmp_path_factory.getbasetemp())
    assert moved["parameter"] > 0
