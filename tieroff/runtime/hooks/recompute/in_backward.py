"""Modules that run in backward: what they save is packed as in forward.

[Note: modules in backward]
The engine's pair of saved-tensor hooks is in force round the model's forward, in the thread that called it. A checkpoint
runs modules once more in backward, in whatever thread autograd evaluates a node, and so do Functions that people write. What
autograd saves there is moved, and a parameter that it saves is fetched again, if the pair is in force there too. It is put in
force where the engine is first asked in such a run: as a Function asks for what it saved, as a checkpoint asks for its inputs,
or as a module reads a parameter with gradients enabled. It need not be taken off: autograd sets a thread's hooks for each node
that it evaluates, and backwards inside of a node begin with those of the node.

Torch's non-reentrant checkpoint has a pair of its own in force meanwhile, and keeps what that is given in its frame until
backward asks. The engine's pair then takes the place of that one and calls it, and the frame gets a dict which keeps what was
packed. The frame is torch's own (`torch.utils.checkpoint._CheckpointFrame`); one of another form is left as it is, and what
it keeps stays on the device.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch

from tieroff.recomputation import (
    RECOMPUTED,
    HooksInBackward,
    Pack,
    Recomputed,
    Unpack,
    hooks_here,
    is_of_checkpoint,
    replace_hooks,
)
from tieroff.runtime.execution.autograd import functorch_is_active, unseen_by_the_program
from tieroff.runtime.execution.on_demand import OnDemand
from tieroff.runtime.hooks.forward.own_hooks import OwnHooks
from tieroff.runtime.hooks.packed import is_packed, looks_of


class ModulesInBackward(HooksInBackward):
    """Puts the engine's hooks in force where modules run in backward; see [Note: modules in backward]."""

    def __init__(self, hooks: OwnHooks, on_demand: OnDemand) -> None:
        self._hooks, self._on_demand = hooks, on_demand

    def pair(self) -> tuple[Pack, Unpack]:
        return self._hooks.pair()

    def are_ours(self, pair: tuple[Pack, Unpack]) -> bool:
        return self._hooks.are_ours(pair)

    def read(self) -> None:
        """A module reads a parameter while a backward runs, with gradients enabled."""
        if self._hooks.are_wanted and not functorch_is_active():
            self.put_in_force()

    def unpacked(self, caller: FrameType | None) -> bool:
        self._on_demand.unpacks()
        return self._hooks.are_wanted and not functorch_is_active() and super().unpacked(caller)

    def begin_again(self) -> None:
        here = hooks_here()
        if here is not None and self._hooks.are_wanted and is_of_checkpoint(here, RECOMPUTED):
            self.take_part(here)

    def has_run_again(self) -> None:
        self._on_demand.make_way()  # what it read was used, by ops that the node comes after

    def take_part(self, here: tuple[Pack, Unpack]) -> None:
        outer_pack, (own_pack, own_unpack) = here[0], self._hooks.plain_pair()
        kept = Recomputed.of(outer_pack, own_unpack, looks_of)
        if kept is None:
            return

        def pack(tensor: torch.Tensor) -> Any:
            with unseen_by_the_program():  # a selective checkpoint counts ops, and answers some with what it kept
                packed = own_pack(tensor)
            # A tensor that stays is kept as the checkpoint has it, without a graph.
            kept.keep(outer_pack, tensor, packed if is_packed(packed) else None)
            return packed

        def unpack(packed: Any) -> torch.Tensor:
            with unseen_by_the_program():
                return own_unpack(packed)

        replace_hooks(*self._hooks.made_own(pack, unpack))
