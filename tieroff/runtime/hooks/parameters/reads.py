"""Fetched parameters: every use of a moved parameter in forward or backward sees a device copy.

A module's `_parameters` becomes a dict whose item access, while a wrapped forward or a backward runs, lifts the parameter: its
`.data` lies on the device copy for a while. Iteration yields parameters as they are. So every use through a module is seen,
whoever reads it; other uses are seen as hooks/user_access.py says, on every device but the host.

[Note: computed in another type]
With a compute type every read of a floating parameter gives its value cast to that type (cast_nodes.py), also
where the home stays on the device. The copy in the home's own type may go as soon as the cast is made. Autograd keeps no casts,
also where nothing moves: they are made again in backward, which sees a home that was written meanwhile. Gradients of one
backward are summed in the compute type and reach the home in its own, which is what FSDP2 does on one rank. The cast belongs
to nobody: a write to it would be lost, so it is an error (of one through `.data`, in the recorded step).

[Note: threads beside the step]
One thread runs the steps. What others read, they read where it lies: parameters do not move while a forward of theirs runs,
and what they read in a forward of the step's thread (branches in a pool of threads) does not move before the next step. They
make no events, so the step follows its plan. Signal handlers: see [Note: handlers] in signal_safety.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tieroff.runtime.execution.autograd import current_graph_task, functorch_is_active
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.execution.fetch import ParameterFetch
from tieroff.runtime.hooks.forward.rebound import Rebound
from tieroff.runtime.hooks.parameters.cast_nodes import CastNodes
from tieroff.runtime.hooks.parameters.casting import Casts
from tieroff.runtime.hooks.parameters.live import LiveValues, UnmovedParameter
from tieroff.runtime.items.joined.items import JoinedParameter
from tieroff.runtime.items.offloaded import is_offloaded, restore_class
from tieroff.runtime.items.parameter import ParameterItem, ShardItem, nothing_shown
from tieroff.runtime.signal_safety import is_interrupting
from tieroff.runtime.step.quiet import NOTHING, Quiet
from tieroff.runtime.tensors import bytes_of


class InBackward(Protocol):
    """What is told that modules may run in backward; see recompute/in_backward.py."""

    def read(self) -> None:
        """A module reads a parameter while a backward runs, with gradients enabled."""

    def unpacked(self, caller: FrameType | None) -> bool:
        """A saved tensor is asked for in a backward, by autograd or by code in Python; may it be saved again?"""


class ParameterReads:
    """Says whether item access fetches, and how. One per engine, shared by all its dicts.

    Attributes:
        is_open: accesses are intercepted.
        depth: how many wrapped forwards are running.
        updated: ids of parameters that were updated in the backward that runs.
        fetch: brings parameters to the device.
        live: device values by their storage.
        rebound: what Functions keep of parameters beside what they save.
        casts: of the running forward.
        cast_nodes: tensors through which gradients reach homes.
        beside: how many wrapped forwards the calling thread runs beside the step.
        quiet: ids of parameters that are read as they are; see [Note: quiet events] in step/quiet.py.
        in_backward: is told of reads in backward.
    """

    in_backward: InBackward

    def __init__(self, context: StepContext, compute_dtype: torch.dtype | None = None) -> None:
        self._context = context
        self.is_open = False
        self.depth = 0
        self.updated = context.state.updated
        self.fetch = ParameterFetch(context)
        self.live = LiveValues()
        self.rebound = Rebound(context, self.fetch, self.live)
        self.casts = Casts(compute_dtype)
        self.cast_nodes = CastNodes(context.homes)
        self.beside = _Depth()
        self._lent: list[ParameterItem] = []
        self.quiet: frozenset[int] = frozenset()
        self._quiet_of: tuple[Quiet, list[ParameterItem], frozenset[int]] = NOTHING, [], frozenset()
        context.clock.at_divergence.append(self)

    def begin(self) -> None:
        """A step begins: what threads read in the one before may move."""
        while self._lent:
            self._lent.pop().readers -= 1
        self.rebound.begin()
        quiet, outside = self._context.runner.quiet, self._context.guard.saved_outside
        if quiet is not self._quiet_of[0] or not outside.isdisjoint(self._quiet_of[1]):
            # Those that user code had before need a look, whether or not they are an event.
            known = self._context.homes.parameters.values()
            items = [item for item in known if item.position in quiet.reads and item not in outside]
            # Of one of several parts each read counts: who keeps it on a ctx keeps other tensors there, which are events.
            items = [item for item in items if not isinstance(item, JoinedParameter)]
            self._quiet_of = quiet, items, frozenset(id(item.leaf) for item in items)
        _, items, self.quiet = self._quiet_of
        for item in items:
            # A quiet read notes nothing, and after a step that left its plan they lie elsewhere than in the one before.
            if item.value is not None and item.shown() is not item.value:
                self._note(item, item.value)

    def left_plan(self) -> None:
        """The step goes on without its plan."""
        self.quiet = frozenset()

    def end(self) -> None:
        """The step's last op is over."""
        self.quiet = frozenset()

    def intercept(self, is_needed: bool) -> None:
        """Enables or disables interception of parameter reads; it is always on when there is a compute type."""
        self.is_open = is_needed or self.casts.dtype is not None

    def value_for(self, home: torch.Tensor) -> torch.Tensor:
        """Returns what item access gives for a home: itself, lifted, or its value in the type that is computed with."""
        item = self._context.homes.parameter(home)
        if item is not None and item.stays_resident and self._is_plain_read(item):
            value = self.fetch.home(item)
            if item.shown() is not item.value:
                self._note(item, value)
            return home
        if isinstance(item, ShardItem):
            return home  # FSDP2 asks for its bytes when it gathers them
        if item is None and not self.casts.applies_to(home):
            return home
        if self.beside.count or self.is_apart():
            return self._where_it_lies(item, home)
        if not torch.is_grad_enabled() and (self.depth or current_graph_task() != -1) and is_interrupting():
            return home.detach().to(self.casts.dtype) if self.casts.applies_to(home) else home  # see [Note: handlers]
        if item is None and self.depth and not isinstance(home, torch.nn.Parameter):
            return home.to(self.casts.dtype)  # it stands in for a parameter, for one call
        if self.depth == 0:
            if current_graph_task() == -1:
                return home
            # In backward: a recomputation runs with grad enabled; a hook that looks at the parameter wants the home.
            if not torch.is_grad_enabled():
                return home
            self.note_recomputation()
        if functorch_is_active():
            # Tensors made under a transform are its wrappers, which no home may lie on.
            with temporarily_clear_interpreter_stack():
                return self._fetched(item, home)
        return self._fetched(item, home)

    def note_recomputation(self) -> None:
        """A module reads a parameter in backward."""
        if torch.is_grad_enabled():
            self.in_backward.read()

    def _is_plain_read(self, item: ParameterItem) -> bool:
        """True for what most reads are: by a module's forward in the step's own thread, of the home itself."""
        return (
            self.depth > 0
            and type(item) is ParameterItem
            and self.casts.dtype is None
            and threading.get_ident() == self._context.state.thread
            and not self.beside.count
            and torch.is_grad_enabled()
            and not functorch_is_active()
        )

    def _note(self, item: ParameterItem, value: torch.Tensor) -> None:
        """Notes where a parameter lies; where the plan has it there all the time, that holds for later reads."""
        self.live.add(item, value)
        if item.lower is not None and item.is_shown_below:
            # Of many that are read before they are used (a recurrent layer's), the first lie below again by then.
            self.live.add(item, item.lower)
        stays = self._context.runner.is_resident(item) and item.value is not None
        item.shown = weakref.ref(item.value) if stays else nothing_shown

    def is_apart(self) -> bool:
        """True for a thread beside the step; a backward is of the step, in whatever thread."""
        return threading.get_ident() != self._context.state.thread and current_graph_task() == -1

    def is_interrupting(self) -> bool:
        """True in a signal handler that runs while the engine moves something; see [Note: threads beside the step]."""
        owned: bool = self._context.state.lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def _where_it_lies(self, item: ParameterItem | None, home: torch.Tensor) -> torch.Tensor:
        """Returns what a thread beside the step gets for a home: itself, which is not moved while the thread may use it."""
        if item is not None and item.is_shown_below and is_offloaded(home):
            with self._context.state.lock:  # between two passes; compiled code is guarded by the class
                item.reaches_data(self._context.traffic)
                restore_class(item)
        if item is not None and item.is_shown_below and not self.beside.count:
            with self._context.state.lock:
                item.readers += 1
                self._lent.append(item)
        dtype = self.casts.dtype
        if dtype is None or not self.casts.applies_to(home):
            return home
        with self._context.state.lock:
            return self.cast_nodes.on(home.detach().to(dtype), home, item)

    def _fetched(self, item: ParameterItem | None, home: torch.Tensor) -> torch.Tensor:
        dtype = self.casts.dtype
        if dtype is not None and self.casts.applies_to(home):
            return self._cast(item, home, dtype)
        if item is None:
            return home
        self._note(item, self.fetch.home(item))
        self.rebound.read(item)
        return home

    def _cast(self, item: ParameterItem | None, home: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kept: ParameterItem | UnmovedParameter = item if item is not None else UnmovedParameter(home, dtype)
        value = kept.cast() if isinstance(kept, UnmovedParameter) else self._as_computed(kept, self.fetch.home)
        self.live.add(kept, value)
        if self.depth and not value.is_inference():
            self.casts.give(kept.name, value, self._context.state.record.recorder)
        return self.cast_nodes.on(value, home, item)

    def _as_computed(self, item: ParameterItem, fetch: Callable[[ParameterItem], torch.Tensor]) -> torch.Tensor:
        """Returns what is fetched in the type that is computed with; the copy that the cast was made from may leave."""
        value = fetch(item).detach()
        if not self.casts.applies_to(value):
            return value
        cast = value.to(self.casts.dtype)
        del value  # a copy that something holds stays
        if not item.is_lifted:
            item.may_be_written = False  # nobody else has seen that copy
        self.fetch.dismiss(item)
        return cast

    def saved_bytes(self, item: ParameterItem | UnmovedParameter) -> torch.Tensor:
        """Returns, as a 1-d uint8 tensor, the device bytes of a parameter that autograd saved and backward asks for."""
        if isinstance(item, UnmovedParameter):
            return bytes_of(item.cast())
        computed = self._as_computed(item, self.fetch.saved) if self.casts.dtype is not None else self.fetch.saved(item)
        self.live.add(item, computed)
        return item.device if item.device is not None and computed.dtype is item.dtype else bytes_of(computed)

    def check_casts(self) -> None:
        """Checks that the running forward did not write to a cast; see `Casts.check`."""
        self.casts.check(self._context.state.record.recorder)

    def forget_casts(self) -> None:
        """The running forward is over."""
        if self.casts.forget():
            self.live.sweep()


class _Depth(threading.local):
    """A count of each thread's own."""

    count = 0
