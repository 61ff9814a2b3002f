"""The engine's pair of saved-tensor hooks, as torch's selective checkpoint asks about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tieroff.runtime.hooks.forward.own_hooks import OwnPack


def are_torchs_own(pack: Any) -> bool:
    """Asks as torch does, which looks from the pair in force for one that is not a checkpoint's."""
    return bool(getattr(pack, "_checkpoint_internal", False))


class Checkpoint:
    """Stands in for the mode of a selective checkpoint of torch 2.14, which earlier ones have not.

    Attributes:
        respect_saved_tensors_hooks: as the program gave it; None: it said nothing.
    """

    def __init__(self, respect: bool | None) -> None:
        self.respect_saved_tensors_hooks = respect

    def __torch_dispatch__(self, pack: Any) -> bool:
        return are_torchs_own(pack)

    def enter(self, pack: Any) -> bool:
        return are_torchs_own(pack)


class Other:
    """A mode of somebody's that knows no such option."""

    def __torch_dispatch__(self, pack: Any) -> bool:
        return are_torchs_own(pack)


def _pack() -> OwnPack:
    own: Any = None
    return OwnPack(torch.Tensor.detach, None, own)


@pytest.mark.parametrize(("said", "after"), [(None, True), (True, True), (False, False)])
def test_a_selective_checkpoint_respects_hooks_unless_the_program_said_otherwise(said: bool | None, after: bool) -> None:
    checkpoint = Checkpoint(said)
    assert checkpoint.__torch_dispatch__(_pack()) is False
    assert checkpoint.respect_saved_tensors_hooks is after


def test_nothing_is_said_for_who_asks_outside_of_a_dispatch() -> None:
    checkpoint = Checkpoint(None)
    assert checkpoint.enter(_pack()) is False
    assert checkpoint.respect_saved_tensors_hooks is None


def test_other_modes_are_left_as_they_are() -> None:
    other = Other()
    assert other.__torch_dispatch__(_pack()) is False
    assert vars(other) == {}
