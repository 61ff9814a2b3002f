"""A walk over a model: what it says of storages holds for as long as it is kept."""

from __future__ import annotations

import torch
from torch import nn

from tieroff.runtime.hooks.forward.walk import Walk


def test_nobody_gets_the_identity_of_an_input_that_died() -> None:
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    fixed = Walk(model).fixed((x,))
    assert x.untyped_storage()._cdata in fixed and model.weight.untyped_storage()._cdata in fixed
    del x
    later = [torch.randn(4, 8) for _ in range(1000)]
    assert not fixed.keys() & {tensor.untyped_storage()._cdata for tensor in later}


def test_an_identity_alone_is_given_again() -> None:
    """What the test above would not show if it were not so."""
    given = set()
    for _ in range(1000):
        given.add(torch.randn(4, 8).untyped_storage()._cdata)
    assert len(given) < 1000
