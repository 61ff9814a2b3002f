"""User access: functions of user code that get a tensor whose bytes lie below a device. See [Note: offloaded leaves].

[Note: a call on what lies below] Everything of ours among the arguments is brought up and pinned; the function runs, outside
of the engine's lock, since it may be a backward whose thread needs that lock; then the tensors count as written, for what
a fused kernel writes shows in no version. A few stay up for a moment, the others go below at once. What somebody holds an alias
of (`p.data`, a view) stays up as long as the alias lives; what somebody asked the address of, until the next step.

[Note: saved outside] Autograd saves a parameter that user code computes with outside of the model's forward (a penalty on
weights in the loss, say) as the leaf itself, which would be offloaded by the time backward asks. So the call has it saved as
what can be brought up again, and for that the call has to come here, wherever the plan has the parameter by then: while user
code runs in the midst of a step, parameters that are up and may move have the class of those that lie below. So have, all the
time, those that autograd saved so before, since each such use is an event of the step in backward.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from tieroff.core.tensor import Tier, allocated_bytes
from tieroff.errors import StateError, TieroffError
from tieroff.runtime.execution.autograd import as_the_engine, by_edges, current_graph_task, takes_no_hooks
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.host_view import value_on_host
from tieroff.runtime.hooks.packed import PackedParameter
from tieroff.runtime.hooks.parameters.assigned import AssignedParameters
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.hooks.saved import SavedTensors
from tieroff.runtime.hooks.scaled import ScaledGradients
from tieroff.runtime.items.data_functions import assigns_data, gives_data
from tieroff.runtime.items.gradient import GradientItem
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.offloaded import guard_class, guarded, is_offloaded, leaves, restore_class, set_data, untouched
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import LOWER, ON_DEVICE
from tieroff.runtime.movable import local_of
from tieroff.runtime.signal_safety import came_from_engine, leaves_modes_alone, runs_user_code
from tieroff.runtime.step.mode import DEMAND, PLANNED
from tieroff.units import format_bytes

# They give an address, which outlives every reference to the memory.
_GIVES_ADDRESS = frozenset(
    {"data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__"}
)
# What works on each tensor of its first list by itself: one after the other is up.
_ONE_BY_ONE = frozenset(
    {torch._foreach_norm, torch._foreach_mul_, torch._foreach_zero_, torch._amp_foreach_non_finite_check_and_unscale_}
)


def _is_called_by_the_program(method: Callable[..., Any]) -> Callable[..., Any]:
    """Has an interrupt that comes in a method of the guard leave modes as they were, and the engine's state repaired."""
    safe = leaves_modes_alone(method)

    @runs_user_code
    @functools.wraps(method)
    def call(self: UserAccess, *args: Any) -> Any:
        try:
            return safe(self, *args)
        except BaseException as error:
            self.left_by(error)
            raise

    return call


class _Calls(threading.local):
    """A count of each thread's own."""

    count = 0


class UserAccess:
    """The guard of one engine's offloaded tensors.

    Attributes:
        saved_outside: parameters that autograd saved outside of the model's forward; see [Note: saved outside].
        assignments: those that user code gives other memory.
        at_interrupt: called where an exception has come between two lines of the engine that user code has called.
    """

    assignments: AssignedParameters

    def __init__(self) -> None:
        self.at_interrupt: Callable[[], None] | None = None
        self._context: StepContext | None = None
        self._reads: ParameterReads | None = None
        self._saved: SavedTensors | None = None
        self._scaled: ScaledGradients | None = None
        self._addressed: deque[HomeItem] = deque()  # pinned until the next step
        self._on_host = _Calls()  # of `state_dict`, under way in each thread
        self._thread = threading.get_ident()  # that runs the steps
        self.saved_outside: weakref.WeakSet[ParameterItem] = weakref.WeakSet()
        self._is_updated = False  # what user code does now is between two steps

    def serve(self, context: StepContext, reads: ParameterReads, saved: SavedTensors, scaled: ScaledGradients) -> None:
        """Begins to serve the tensors of this engine."""
        self._context, self._reads, self._saved, self._scaled = context, reads, saved, scaled
        self.assignments = AssignedParameters(context, reads)

    def watches(self, item: GradientItem) -> bool:
        """True when functions that get this gradient while it is shown below are to go through the guard."""
        return self._scaled is not None and self._scaled.watches(item)

    def multiplying(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a gradient that came up is multiplied in the place of the program."""
        return contextlib.nullcontext() if self._context is None else self._context.clock.computing()

    def leaves(self, item: GradientItem) -> None:
        """A gradient is about to be copied out."""
        if self._scaled is not None:
            self._scaled.leaves(item)

    def begin(self) -> None:
        """A step begins: addresses that were given out are not used any more."""
        self._thread = threading.get_ident()
        self._is_updated = False
        while self._addressed:
            self._addressed.popleft().pins -= 1

    def user_code_begins(self, movable: Iterable[HomeItem] = ()) -> None:
        """User code runs next; `movable`: what the step that runs may move. See [Note: saved outside]."""
        assert self._context is not None
        if self._context.state.mode not in (DEMAND, PLANNED):
            return
        for item in (*self.saved_outside, *movable):
            if item.is_lifted and not item.is_shown_below and type(item) is ParameterItem and item.tensor is not None:
                guard_class(item)

    def pass_ended(self) -> None:
        """A backward, or the update, is over and user code runs next, which may give parameters other memory."""
        self.user_code_begins()
        self.assignments.user_code_begins()

    def update_begins(self) -> None:
        """The optimizer uses parameters next, as what they are."""
        self._is_updated = True
        self.assignments.engine_begins()
        for item in self.saved_outside:
            if item.is_lifted:
                restore_class(item)

    def repair(self) -> None:
        """An exception may have left calls half begun: none is under way any more, and nothing stays up for one."""
        assert self._context is not None
        self._addressed.clear()
        self._on_host.count = 0
        for item in self._context.homes:
            item.pins = 0
            if item.device is None and item.state is LOWER and not item.is_shown_below:
                guard_class(item)

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Inside, `detach` of a tensor that lies below gives its bytes there, as memory of the host."""
        self._on_host.count += 1
        try:
            yield
        finally:
            self._on_host.count -= 1

    def left_by(self, error: BaseException) -> None:
        """An exception left a call: one of the engine's own leaves all as it should be, an interrupt may have left anything."""
        is_own = isinstance(error, TieroffError) or threading.get_ident() != self._thread
        if not is_own and self.at_interrupt is not None and came_from_engine(error):
            self.at_interrupt()

    @_is_called_by_the_program
    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a function with everything of ours among its arguments on the device."""
        assert self._context is not None and self._scaled is not None
        answer = self._scaled.call(function, args, kwargs)
        if answer is not None:
            return answer[0]
        below = self._own(leaf for leaf in leaves((args, kwargs)) if is_offloaded(leaf))
        if shown := [item for item in below if item.is_shown_below]:
            return self._run_below(shown, function, args, kwargs)
        if assigns_data(function) and local_of(args[0]) is args[0] and not guarded(args[0]).others:
            return self._assign_from(args[0], args[1])
        if self._on_host.count and function is torch.Tensor.detach:
            return guarded(args[0]).on_memory(args[0], self.value_on_host(guarded(args[0])))
        if function is torch.autograd.grad:
            args, kwargs, is_changed = by_edges(args, kwargs)
            if is_changed:
                return function(*args, **kwargs)
        if function in _ONE_BY_ONE and isinstance(args[0], (list, tuple)):
            return self._one_by_one(function, args, kwargs)
        return self._run(function, args, kwargs)

    def _own(self, tensors: Iterable[Any]) -> list[HomeItem]:
        """Returns the items of those that this engine looks after: another's bytes are no business of its traffic."""
        return [item for tensor in tensors if (item := guarded(tensor)) is not None and item.guard is self]

    def value_on_host(self, item: HomeItem) -> torch.Tensor:
        """Returns the value of an item's tensor as memory of the host: where it lies below, or a copy."""
        assert self._context is not None
        with self._context.state.lock, as_the_engine():
            return value_on_host(item, self._context.traffic)

    def _one_by_one(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(arg, (list, tuple)) for arg in args[1:]):
            return self._run(function, args, kwargs)  # a scalar for each
        outs = [self._run(function, ([tensor], *args[1:]), kwargs) for tensor in args[0]]
        return [value for out in outs for value in out] if outs and outs[0] is not None else None

    @runs_user_code
    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = {id(item): item for item in self._own(leaves((args, kwargs)))}
        keeps = getattr(function, "__name__", "") in _GIVES_ADDRESS or takes_no_hooks()
        assert self._context is not None
        backend = self._context.traffic.backend
        with self._up(list(found.values()), keeps=keeps), backend.lending(), self._saving():
            out = function(*args, **kwargs)
        if gives_data(function):
            for item in found.values():
                item.touch(self._context.traffic)
        return out

    @_is_called_by_the_program
    def reaches_data(self, item: HomeItem) -> None:
        """User code is about to reach a watched parameter's memory through `.data`; see [Note: watched parameters]."""
        assert self._context is not None and self._reads is not None
        if isinstance(item, ParameterItem) and not self._reads.is_interrupting():
            with self._context.state.lock, as_the_engine():
                item.reaches_data(self._context.traffic)
                self.assignments.look(item)

    def assigned(self, item: HomeItem) -> None:
        """User code gave a watched parameter other memory."""
        if isinstance(item, ParameterItem):
            self.assignments.assigned(item)

    @runs_user_code
    def _run_below(self, shown: list[HomeItem], function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function on tensors that lie below and are shown there, as what they are: memory of the host."""
        assert self._context is not None and self._scaled is not None
        with self._context.state.lock, as_the_engine():
            for item in shown:
                self._scaled.used(item)
                if isinstance(item, GradientItem):
                    item.multiply_below(self._context.traffic)
                elif isinstance(item, ParameterItem):
                    item.reaches_data(self._context.traffic)  # it rested: see `ParameterItem.rest`
                restore_class(item)
        try:
            return function(*args, **kwargs)
        finally:
            for item in shown:
                is_at_rest = isinstance(item, ParameterItem)
                if not is_at_rest and not item.is_lifted and item.tensor is not None and item.is_current():
                    guard_class(item)

    @contextlib.contextmanager
    def _up(self, items: list[HomeItem], *, keeps: bool) -> Iterator[None]:
        """Has these on the device, as plain tensors; see [Note: a call on what lies below]."""
        assert self._context is not None
        context, lock = self._context, self._context.state.lock
        is_outside = threading.get_ident() != self._thread and current_graph_task() == -1
        is_in_pass = self._is_in_pass and not is_outside and (not keeps or self._is_in_model)
        computing = context.traffic.backend.computing  # FSDP2 adds to gradients under a stream of its own
        recorder = context.state.record.recorder if not is_in_pass and not is_outside else None
        with lock, as_the_engine(), computing():
            raised = [item for item in items if is_offloaded(item.tensor)]
            unplanned = [i for i in raised if i.state not in ON_DEVICE or not (is_in_pass or i.is_lifted)]
            self._check_room([item for item in raised if item.device is None], items, may_free=not is_outside)
            try:
                for item in items:
                    if item in raised:
                        if is_outside and (item.device is None or context.on_demand.is_resting(item)):
                            context.on_demand.stray(item)
                        self._raise(item, is_in_pass)
                    item.pins += 1
            except BaseException:
                self._unpin(items[: items.index(item)], raised, is_in_pass)
                raise
        context.runner.note_more()
        if recorder is not None:
            recorder.begin_user_call({item.key: item.size_bytes for item in context.homes.kept()})
        try:
            yield
        finally:
            if recorder is not None:
                recorder.end_user_call()
            with lock, as_the_engine(), computing():
                if keeps:
                    for item in items:
                        item.pins += 1
                        self._addressed.append(item)
                if is_outside:  # what the step uses meanwhile is the step's
                    raised = [item for item in raised if context.on_demand.is_stray(item)]
                self._unpin(items, raised, is_in_pass)
                for item in raised if context.state.mode is not PLANNED else unplanned:
                    if item.device is not None and not is_outside:
                        context.on_demand.keep_read(item)  # the plan says when the others leave
                if recorder is not None:
                    context.on_demand.make_way()  # a use by an op is another one, and counts

    def _check_room(self, items: list[HomeItem], used: list[HomeItem], *, may_free: bool) -> None:
        """Makes room for items that are about to come up, as far as anything can leave.

        Args:
            items: those.
            used: all that the call uses.
            may_free: False where another thread than the step's calls: all that the step has there may be used by its next op.

        Raises:
            StateError: they do not fit the device's budget beside what user code holds there.
        """
        assert self._context is not None
        context = self._context
        planned = context.runner.planned
        if planned is None or not items:
            return
        device_type = context.traffic.backend.device.type
        size_bytes = sum(allocated_bytes(item.size_bytes, device_type) for item in items)
        budget_bytes = planned.plan.budget_bytes[Tier.DEVICE]
        if may_free:
            context.on_demand.make_room(size_bytes, budget_bytes, used)
        if context.traffic.device_bytes + size_bytes <= budget_bytes:
            return
        for item in context.homes:
            item.end_copy_out(context.traffic)
        held_bytes = sum(item.size_bytes for item in context.homes.kept())
        if held_bytes + size_bytes > budget_bytes:
            raise StateError(
                f"expected parameters, gradients and optimizer state that are used together to fit the device's budget of "
                f"{format_bytes(budget_bytes)}, got {format_bytes(size_bytes)} in this call ({items[0].name}, ...) and "
                f"{format_bytes(held_bytes)} that the program holds (views, aliases through .data, addresses); use one after "
                "the other, or parameters and gradients inside tieroff.on_host(model), where they are memory of the host, as "
                "is all of optimizer.state_dict(); unwrap the model to make parameters that share their memory (weight norm)"
            )

    def _unpin(self, items: Iterable[HomeItem], raised: list[HomeItem], is_in_pass: bool) -> None:
        assert self._context is not None
        for item in items:
            item.pins -= 1
            if item in raised and item.device is not None and item.tensor is not None:
                if is_in_pass and isinstance(item, ParameterItem):
                    assert self._reads is not None
                    self._reads.fetch.note_use(item)
                else:
                    item.touch(self._context.traffic)
                if not item.pins or item in self._addressed:
                    guard_class(item)

    def _raise(self, item: HomeItem, is_in_pass: bool) -> None:
        """Lifts one; no tick, since where an earlier use left it up, nobody comes here."""
        assert self._context is not None and self._reads is not None
        context = self._context
        if self._scaled is not None:
            self._scaled.used(item)
        item.refresh(context.traffic)
        item.lift(context.traffic)
        restore_class(item)  # the function may look at it
        self._note_raised(item, is_in_pass)

    def _note_raised(self, item: HomeItem, is_in_pass: bool) -> None:
        assert self._context is not None and self._reads is not None
        context = self._context
        recorder = context.state.record.recorder
        if recorder is not None and item.device is not None:
            # In user code a use needs no place in the plan: the tensor comes up for it, wherever it lies.
            recorder.bind(item.device.untyped_storage(), item.key, is_below=not is_in_pass, is_new=is_in_pass)
        if isinstance(item, ParameterItem):
            self._reads.live.add(item, item.living)

    @property
    def _is_in_model(self) -> bool:
        """True in forward and its recomputations."""
        assert self._reads is not None
        return self._reads.depth > 0 or (current_graph_task() != -1 and torch.is_grad_enabled())

    @property
    def _is_in_pass(self) -> bool:
        """True in forward and recomputations, and where user code goes on with a graph in a step: those uses are planned."""
        assert self._context is not None
        is_in_step = self._context.state.mode in (DEMAND, PLANNED) and not self._is_updated
        return self._is_in_model or (is_in_step and torch.is_grad_enabled())

    def _saving(self) -> contextlib.AbstractContextManager[None]:
        """Has autograd save parameters that come up for this call as what can be brought up again."""
        assert self._context is not None and self._reads is not None and self._saved is not None
        is_elsewhere = self._reads.depth > 0 or current_graph_task() != -1 or takes_no_hooks()
        if is_elsewhere or not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False):
            return contextlib.nullcontext()  # others' hooks see it; what those keep stays up
        live, saved, clock = self._reads.live, self._saved, self._context.clock

        def pack(tensor: torch.Tensor) -> Any:
            with untouched():
                item = live.on(tensor.untyped_storage())
            if not isinstance(item, ParameterItem):
                return tensor
            self.saved_outside.add(item)
            if not self._is_updated:  # else that is no part of a step
                clock.tick(("outside", item.position), lambda: f"outside:{item.name}", None)
            return PackedParameter(tensor, item)

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else saved.unpack(packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _assign_from(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """`tensor.data = value`, whatever the value is: `model.to(device)` assigns each parameter to itself."""
        if value is tensor:
            return
        with self._up(self._own([value]) if is_offloaded(value) else [], keeps=False):
            self._assign(tensor, value)

    def _assign(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """`tensor.data = value` by user code: that is what the tensor lies on, until it goes below.

        Of another type or form, it is the user's own from here on, and taken over again when a step begins.
        """
        assert self._context is not None and self._reads is not None
        context, is_in_pass = self._context, self._is_in_pass  # asked before the engine turns gradients off
        with context.state.lock, as_the_engine():
            item = guarded(tensor)
            with untouched():
                takes = value.device == tensor.device and item.may_take(value)
            if takes:
                set_data(tensor, value)
                item.take(context.traffic)
                if isinstance(item, ParameterItem):
                    self._reads.live.add(item, item.living)
                    return self.assignments.taken(item)
                self._note_raised(item, is_in_pass)
                context.on_demand.keep_read(item)
                return
            context.runner.unassign(item)
            context.on_demand.forget_read(item)
            context.on_demand.forget(item)
            context.homes.drop(item)
            item.forsake(context.traffic)
            with untouched():
                tensor.data = value
