"""Fetched parameters: every use of a moved parameter in forward or backward sees a device copy.

A module's `_parameters` becomes a dict whose item access, while a wrapped forward or a backward runs, makes sure that the
home's device copy is there; iteration yields homes. So every use is seen, whoever reads it.

[Note: lifted or minted]
Where home and device are of one kind (the CPU backend) the home itself is lifted: its `.data` lies on the device copy for
a while, and item access returns the home. Where they are not (a host tensor as home, a CUDA device), item access returns a
tensor minted on the device copy: it carries the edge of one autograd node that belongs to the home and lives as long as
its item, so gradients of all uses are summed in the order of the plain run, and hooks, accumulation and DDP act on the
home. One node per access would sum them in another order.

[Note: computed in another type]
With a compute type every read of a floating parameter gives its value cast to that type, minted on any backend, with homes
that stay on the device too. The copy in the home's own type may go as soon as the cast is made. Autograd keeps no casts,
also where nothing moves: they are made again in backward, which sees a home that was written meanwhile. Gradients of one
backward are summed in the compute type and reach the home in its own, which is what FSDP2 does on one rank. The cast belongs
to nobody: a write to it would be lost, so it is an error (of one through `.data`, in the recorded step).
"""

from __future__ import annotations

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tieroff.runtime.execution.autograd import current_graph_task, functorch_is_active
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.execution.fetch import ParameterFetch
from tieroff.runtime.hooks.parameters.autocast import AutocastReads
from tieroff.runtime.hooks.parameters.casting import Casts
from tieroff.runtime.hooks.parameters.live import LiveValues, Stays
from tieroff.runtime.hooks.parameters.mint import Mints
from tieroff.runtime.items.homes import ParameterItem
from tieroff.runtime.tensors import bytes_of


class Gate:
    """Says whether item access fetches, and how. One per engine, shared by all its dicts.

    Attributes:
        is_open: accesses are intercepted.
        depth: how many wrapped forwards are running.
        updated: ids of parameters that were updated in the backward that runs.
        fetch: brings parameters to the device.
        live: device values by their storage.
        casts: of the running forward.
        autocast: homes read under autocast in the running forward.
        mints: tensors through which gradients reach homes.
    """

    def __init__(self, context: StepContext, compute_dtype: torch.dtype | None = None) -> None:
        self._context = context
        self._lifts = context.traffic.backend.lifts_homes  # see [Note: lifted or minted]
        self.is_open = False
        self.depth = 0
        self.updated = context.state.updated
        self.fetch = ParameterFetch(context)
        self.live = LiveValues()
        self.casts = Casts(compute_dtype)
        self.autocast = AutocastReads()
        self.mints = Mints(context.homes)

    def intercept(self, is_needed: bool) -> None:
        """Enables or disables interception of parameter reads; it is always on when there is a compute type."""
        self.is_open = is_needed or self.casts.dtype is not None

    def value_for(self, home: torch.Tensor, is_looked_up: bool = False) -> torch.Tensor:
        """Returns what item access gives for a home: itself, or its fetched value.

        Args:
            home: what the module's dict holds.
            is_looked_up: the module only takes rows of it, which autocast does not cast.
        """
        item = self._context.homes.parameter(home)
        if item is None and not self.casts.applies_to(home):
            return home
        if item is None and self.depth and not isinstance(home, torch.nn.Parameter):
            return home.to(self.casts.dtype)  # it stands in for a parameter, for one call
        if self.depth == 0:
            if current_graph_task() == -1:
                return home
            # In backward: a recomputation runs with grad enabled; a hook that looks at the parameter wants the home.
            if not torch.is_grad_enabled() and (item is None or home.device == item.compute_device):
                return home
        if functorch_is_active():
            # Tensors made under a transform are its wrappers, which no home may lie on.
            with temporarily_clear_interpreter_stack():
                return self._fetched(item, home, is_looked_up)
        return self._fetched(item, home, is_looked_up)

    def _fetched(self, item: ParameterItem | None, home: torch.Tensor, is_looked_up: bool) -> torch.Tensor:
        dtype = self.casts.dtype
        if dtype is not None and self.casts.applies_to(home):
            return self._cast(item, home, dtype)
        if item is None:
            return home
        lifts = self._lifts
        if not lifts and torch.is_autocast_enabled(item.compute_device.type):
            # Autocast keeps the casts of leaves only: a minted weight would be cast, and its gradient rounded, per use.
            lifts = home.device == item.compute_device
            if not lifts and not is_looked_up:
                self.autocast.note(item, home)
        if not lifts:
            return self._minted(item, home)
        self.live.add(item, self.fetch.home(item))
        if item.lower is not None:
            # Of many that are read before they are used (a recurrent layer's), the first lie below again by then.
            self.live.add(item, item.lower)
        return home

    def _minted(self, item: ParameterItem, home: torch.Tensor) -> torch.Tensor:
        value = self.fetch.value(item)
        self.live.add(item, value)
        return self.mints.on(value, home, item)

    def _cast(self, item: ParameterItem | None, home: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept: ParameterItem | Stays = item if item is not None else Stays(home, dtype)
        if isinstance(kept, Stays):
            value = kept.cast()
        else:
            value = self._as_computed(kept, self.fetch.home(kept).detach() if self._lifts else self.fetch.value(kept))
        self.live.add(kept, value)
        if self.depth and not value.is_inference():
            self.casts.give(kept.name, value, self._context.state.record.recorder)
        return self.mints.on(value, home, item)

    def _as_computed(self, item: ParameterItem, value: torch.Tensor) -> torch.Tensor:
        """Returns a fetched value in the type that is computed with; the copy it was made from may leave."""
        if not self.casts.applies_to(value):
            return value
        cast = value.to(self.casts.dtype)
        if not item.is_lifted:
            item.may_be_written = False  # nobody else has seen that copy
        self.fetch.dismiss(item)
        return cast

    def saved_bytes(self, item: ParameterItem | Stays) -> torch.Tensor:
        """Returns, as a 1-d uint8 tensor, the device bytes of a parameter that autograd saved and backward asks for."""
        if isinstance(item, Stays):
            return bytes_of(item.cast())
        value = self.fetch.saved(item)
        computed = self._as_computed(item, value)
        self.live.add(item, computed)
        return item.device if item.device is not None and computed is value else bytes_of(computed)

    def check_casts(self) -> None:
        """Checks that the running forward did not write to a cast; see `Casts.check`."""
        self.casts.check(self._context.state.record.recorder)

    def forget_casts(self) -> None:
        """The running forward is over."""
        if self.casts.forget():
            self.live.sweep()
