"""What the tests on PyTorch's own databases of operators and modules share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tieroff
from tests.support.parity import SEED, copy_of, differing, machine_file
from tieroff.runtime.backend.base import Backend

HOST_BYTES = 16 << 20
STEPS = 3  # traced, measured, planned


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def one_step(run: Callable[[], Any], model: nn.Module, step: int) -> dict[str, Tensor]:
    """Runs forward and backward with cotangents made from the seed; returns copies of outputs, gradients and buffers."""
    torch.manual_seed(SEED + step)
    outputs = tensors_in(run())
    found = {f"output {i}": copy_of(output) for i, output in enumerate(outputs)}
    roots = [output for output in outputs if output.requires_grad]
    generator = torch.Generator().manual_seed(SEED)
    cotangents = [torch.randn(root.shape, dtype=root.dtype, generator=generator).to(root.device) for root in roots]
    torch.autograd.backward(roots, cotangents)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient {name}"] = copy_of(parameter.grad)
            parameter.grad = None
    found |= {f"value {name}": copy_of(value) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Silences what torch says of its own operators (deprecated, experimental, slow)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


Build = Callable[[], tuple[nn.Module, Callable[[], Any]]]


def is_repeatable(build: Build) -> bool:
    """Returns whether PyTorch has a deterministic kernel for all of a plain step; where it has not, it warns.

    Comparing does not tell: atomic additions come in the same order as long as the device does nothing else.
    """
    model, run = build()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        one_step(run, model, 0)
    return not any("determinis" in str(warning.message) for warning in warned)


def check_step_parity(build: Build, backend: Backend, folder: Path) -> dict[str, int]:
    """Asserts that a model computes the same plain and wrapped, traced, measured and planned, with everything moved.

    Args:
        build: returns a new model and what runs one forward of it.
        backend: of the wrapped run.
        folder: for the machine's file.

    Returns:
        Bytes that the last step moved, by class.
    """
    model, run = build()
    plain = [one_step(run, model, step) for step in range(STEPS)]
    model, run = build()
    config = {
        "budget": {"device": "100%", "host": HOST_BYTES},
        "plan": {"policy": "floor", "min_bytes": 0, "machine": str(machine_file(folder))},
    }
    tieroff.wrap(model, None, config, backend=backend)
    engine = tieroff.engine(model)
    try:
        for step, expected in enumerate(plain):
            assert differing(expected, one_step(run, model, step)) == [], f"step {step} differs"
        return dict(engine.executor.traffic.counts.by_class)
    finally:
        tieroff.unwrap(model)
