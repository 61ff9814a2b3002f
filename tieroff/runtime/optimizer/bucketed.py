"""The user's own optimizer, whose `step` updates bucket after bucket."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import chain, zip_longest
from typing import Any, Protocol

import torch
from torch.optim import optimizer as torch_optimizer

from tieroff.errors import StateError
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.gradients import Gradients
from tieroff.runtime.hooks.unattached import has_pre_hooks, was_made
from tieroff.runtime.optimizer.buckets import Buckets, raw_step
from tieroff.runtime.optimizer.host.updates import HostUpdates, NotBelowError
from tieroff.runtime.optimizer.in_backward import AppliedGradient, EarlyUpdates
from tieroff.runtime.optimizer.state import OptimizerState
from tieroff.runtime.optimizer.update import BucketUpdate
from tieroff.runtime.settings import Settings
from tieroff.runtime.signal_safety import runs_user_code
from tieroff.runtime.step.mode import PASS
from tieroff.uncompiled import refusal

log = logging.getLogger("tieroff")

_refuse_to_be_compiled = refusal(
    StateError,
    "torch.compile was called on the step of an optimizer that tieroff.wrap has already: in compiled code nothing could move. "
    "Leave optimizer.step() out of what is compiled. Or compile it first: `optimizer.step = torch.compile(optimizer.step)`, "
    "then tieroff.wrap; it is then stepped as a whole, and everything it updates must fit the device at once",
)


class UpdateFollower(Protocol):
    """Whoever has steps end with the optimizer's update."""

    def before_update(self, *, has_closure: bool = False) -> None:
        """`optimizer.step` was called; a closure, where there is one, begins a step as a rule."""

    def before_closure(self) -> None:
        """The optimizer's own step runs its closure: a step follows, and the one that its update was in the middle of ends."""

    def after_update(self) -> None:
        """`optimizer.step` is about to return."""

    def broke(self) -> None:
        """An exception left `optimizer.step`."""


class BucketedStep:
    """Replaces `optimizer.step` by one that updates bucket after bucket.

    The optimizer stays the user's: same object, same state dict, hooks fire once per step, a closure runs once.

    Attributes:
        optimizer: the user's.
        buckets: its parameters, as they are updated together.
        state: its state tensors.
        early: updates in backward.
        host: updates in host memory.
        is_removed: `optimizer.step` is the optimizer's own again.
        has_stepped: a training step was ended by its update.
        may_update_in_backward: the config asks for it, and it can be.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        context: StepContext,
        gradients: Gradients,
        follower: UpdateFollower,
        settings: Settings,
    ) -> None:
        _check(optimizer)
        self.optimizer = optimizer
        self._context, self._gradients, self._follower = context, gradients, follower
        self._previous = optimizer.__dict__.get("step")
        self._is_replaced = _is_replaced(optimizer)
        self.buckets = Buckets(optimizer, self._is_replaced)
        self.state = OptimizerState(optimizer, self.buckets, context, settings)
        self._update_one = BucketUpdate(optimizer, self.buckets, context, self.state, settings)
        self.host = HostUpdates(optimizer, self.buckets, context, settings)
        self.is_removed = self.has_stepped = False
        self.may_update_in_backward = settings.update_in_backward > 0 and self._may_update_in_backward()
        self.early = EarlyUpdates(self, context.state.updated, settings.update_in_backward)
        context.clock.at_backward_end.insert(0, self.early)  # before what moves is brought below
        self._install()

    # -- taking the place of optimizer.step ------------------------------------------------------------------------

    def _install(self) -> None:
        optimizer, this = self.optimizer, self

        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            """Performs one optimization step, bucket by bucket (tieroff)."""
            if this.is_removed:  # somebody kept this method, as trainers with a loss scale do
                return this.own(*args, **kwargs)
            if torch.compiler.is_dynamo_compiling():
                _refuse_to_be_compiled()
            return this.step(*args, **kwargs)

        step._bucketed_by = this  # type: ignore[attr-defined]
        if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        # A bound method: schedulers made later read its __func__.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Gives the optimizer its own `step` and plain state tensors back."""
        self.is_removed = True
        if self._previous is not None:
            self.optimizer.step = self._previous  # type: ignore[method-assign]
        else:
            self.optimizer.__dict__.pop("step", None)
        self._context.clock.at_backward_end.remove(self.early)
        self.state.bring_home()
        self.host.settle()
        self.host.close()
        for parameter in chain.from_iterable(group["params"] for group in self.optimizer.param_groups):
            if isinstance(parameter.grad, AppliedGradient):
                parameter.grad = None

    # -- one step ------------------------------------------------------------------------------------------------

    @runs_user_code
    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer's own `step`: that of its class, or the one that this instance had before."""
        if self._previous is not None:
            return self._previous(*args, **kwargs)
        return type(self.optimizer).step(self.optimizer, *args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One optimization step. Returns what the optimizer's own step, or its closure, returned."""
        optimizer: Any = self.optimizer
        self.has_stepped = True
        self.host.evidence.updates += 1
        optimizer._opt_called = True  # schedulers look whether a step was made before theirs
        had_grad = torch.is_grad_enabled()
        try:
            self._follower.before_update(has_closure=closure_of(args, kwargs) is not None)
            if self._moves_nothing() and not (self.may_update_in_backward or self.state.sliced):
                out = self.own(*args, **kwargs)
            elif self._is_replaced:
                out = self._step_whole(self.own, args, kwargs)  # hooks fire inside of it
            else:
                out = self._step_with_hooks(optimizer, args, kwargs)
            self._follower.after_update()
        except BaseException:
            torch.set_grad_enabled(had_grad)  # an exception may come between the guard's entry and its exit
            self._follower.broke()
            raise
        return out

    @runs_user_code
    def _step_with_hooks(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Does what torch does around each optimizer's step."""
        pre = chain(torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())
        for hook in list(pre):
            changed = hook(optimizer, (optimizer, *args), kwargs)
            if changed is not None:
                (_, *args), kwargs = changed
        out = self._step_inside(tuple(args), kwargs)
        optimizer._optimizer_step_code()
        post = chain(optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values())
        for hook in list(post):
            hook(optimizer, (optimizer, *args), kwargs)
        return out

    @runs_user_code
    def _step_inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = closure_of(args, kwargs)
        if closure is None:
            self.early.check(self.optimizer.param_groups, self._context.traffic.backend.device.type)
            self.buckets.settle(self._update_one.value_of, args, kwargs)
            out = self._update(args, kwargs)
            self.early.end()
            return out
        if not self.buckets.begins_with_closure:  # it may use the loss, or want another one
            out = self._step_whole(functools.partial(raw_step(self.optimizer), self.optimizer), args, kwargs)
            self.buckets.settle_closures(self._update_one.value_of)
            return out
        with torch.enable_grad():
            loss = closure()
        return self._step_after(loss, args, kwargs)

    def _step_after(self, loss: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Updates with the gradients of a closure that was run."""
        args, kwargs = with_closure(lambda: loss, args, kwargs)
        self.early.check(self.optimizer.param_groups, self._context.traffic.backend.device.type)
        self._update(args, kwargs)
        self.early.end()
        return loss

    def restore(self) -> None:
        """After an exception: the groups are whole again, and what belongs to an update in parts is over."""
        self._update_one.restore()
        self.host.restore()

    def keep_only(self, parameters: Container[int]) -> None:
        """The model has these parameters now, by id, and no others."""
        self._update_one.slices.keep_only(parameters)

    def _moves_nothing(self) -> bool:
        return self._context.state.mode is PASS

    def _update(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = functools.partial(raw_step(self.optimizer), self.optimizer)
        if self._moves_nothing():  # perhaps since a closure ran the step's forward, which needs nothing moved
            with self.early.hidden():
                return self._update_one.step_each(args, kwargs) if self.state.sliced else step(*args, **kwargs)
        if not self.buckets.is_split:
            return self._step_whole(step, args, kwargs)
        with self._in_update():
            return self._update_buckets(self.buckets.current, args, kwargs)

    @contextmanager
    def _in_update(self) -> Iterator[None]:
        """What holds around the buckets of an update."""
        context = self._context
        context.on_demand.release_reachable()
        self._gradients.sweep()
        self.state.forget_strangers()  # looks at the buckets anew
        yield  # after an exception the follower repairs
        context.clock.tick(("end",), lambda: "end", "")
        # User code runs from here on and may write `.data` behind every version: nothing moved stays lifted.
        context.lower_all()
        context.clock.resume()  # what that waited for is no compute

    def _update_buckets(self, buckets: list[list[torch.Tensor]], args: Any, kwargs: dict[str, Any]) -> Any:
        left = [number for number in range(len(buckets)) if number not in self.early.done]
        done = set[int]()
        out = None
        self._update_one.begin_parts()
        try:
            for number, following in zip_longest(left, left[1:]):
                if number in done:
                    continue
                with self._context.state.lock:  # other threads may read parameters, before or after
                    self._update_one.slices.decide(buckets[number], args, kwargs)
                    together = self._together(number)
                    if together:
                        out = self._update_one.step_on(self.buckets.together(together), args, kwargs)
                        done.update(together)
                        continue
                    self._tick(number)
                    if not self._submit(number, args, kwargs):
                        out = self._update_one.run(
                            buckets[number],
                            lambda bucket: self._step_on(bucket, args, kwargs),
                            buckets[following] if following is not None else [],
                            is_last=following is None,
                        )
        finally:
            self._update_one.end_parts()
        self.host.update_ended()
        return out

    def _submit(self, number: int, args: Any, kwargs: dict[str, Any]) -> bool:
        """Has the CPU update a bucket, where the plan says so; False: the device is to, with the step out of its plan."""
        if not self.host.is_planned(number):
            return False
        clock = self._context.clock
        clock.pause()  # no compute of the device's
        try:
            left = self.host.submit(self.buckets.current[number])
        except NotBelowError as error:
            why = str(error)
            if error.is_expected:
                clock.leave_plan()
            else:
                clock.diverge(lambda: f"an update on the device ({why})")
            return False
        if left:
            clock.resume()
            self._update_one.step_on(left, args, kwargs)
        return True

    def _step_on(self, bucket: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
        if self._update_one.slices.are_of(bucket):
            return self._update_one.step_on(bucket, args, kwargs)
        with self.host.compared(bucket):
            return self._update_one.step_on(bucket, args, kwargs)

    def _together(self, number: int) -> tuple[int, ...]:
        """Returns what is updated with a bucket that needs nothing of the engine, itself first; () of any other.

        See [Note: quiet events] in step/quiet.py.
        """
        numbers, buckets = self._context.runner.quiet.buckets.get(number, ()), self.buckets.current
        if numbers[:1] != (number,) or numbers[-1] >= len(buckets):
            return ()
        # Of the plan's buckets; somebody may have given the optimizer its parameters in another order since.
        return numbers if all(self._update_one.moves_nothing(buckets[other]) for other in numbers) else ()

    def _tick(self, number: int) -> None:
        if number not in self._context.runner.quiet.buckets:
            self._context.clock.tick(("bucket", number), lambda: f"bucket:{number}", "optimizer")

    def _step_whole(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Steps all parameters together, as the optimizer itself does; its closure runs when it calls it."""
        bucket = [param for group in self.optimizer.param_groups for param in group["params"]]
        self.buckets.all()  # positions, for the state that it makes
        closure = closure_of(args, kwargs)
        if closure is not None:
            args, kwargs = with_closure(lambda *a, **k: self._evaluate(bucket, closure, a, k), args, kwargs)
        with self._in_update():
            self._tick(0)
            return self._update_one.run(bucket, lambda _: step(*args, **kwargs), [], is_last=True)

    @runs_user_code
    def _evaluate(self, bucket: list[torch.Tensor], closure: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a closure in the middle of an update: forward and backward find parameters where they expect them."""
        context = self._context
        self._update_one.close()
        self._follower.before_closure()
        context.lower_all()
        try:
            return closure(*args, **kwargs)
        finally:
            context.on_demand.release_reachable()
            self._gradients.sweep()
            self._tick(0)
            self._update_one.open(bucket)
            context.clock.resume()

    # -- in backward -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step of the model begins."""
        self.early.begin(self.buckets.all() if self.may_update_in_backward and not has_pre_hooks(self.optimizer) else ())

    def before_gradient(self) -> None:
        """Another gradient arrives: hooks of users on the one before have run."""
        self.early.run()

    def gradient_arrived(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is there, of this backward and of those before it in the step."""
        if not self.early.arrived(parameter):
            return
        if self._moves_nothing():
            torch.autograd.Variable._execution_engine.queue_callback(self.early.finish)
        else:
            self._context.clock.watch_backward()

    def update_early(self, number: int) -> None:
        """Updates a bucket in backward: its gradients are final, and so nothing there uses its parameters any more."""
        context, bucket = self._context, self.buckets.current[number]
        with context.state.lock, torch.no_grad():
            self._update_one.slices.decide(bucket, (), {})
            context.clock.tick(("early", number), lambda: f"bucket:{number}", "optimizer")
            if self._moves_nothing():
                self._apply(bucket)
            else:
                self._update_one.run(bucket, self._apply, [], is_last=False)
            # What backward does next, the gradient that comes now, is no part of the update.
            context.clock.tick(("updated", number), lambda: f"after bucket:{number}", "backward")

    def _apply(self, bucket: list[torch.Tensor]) -> None:
        """Updates a bucket, and takes its gradients away."""
        with torch.autocast("cpu", enabled=False), torch.autocast(self._context.traffic.backend.device.type, enabled=False):
            self._update_one.step_on(bucket, (), {})
        # What backward saved of these, and still uses where no gradient comes from it, must not be used with new values.
        # Fused kernels do not say that they wrote.
        torch.autograd.graph.increment_version(bucket)
        self.early.note(bucket, self.optimizer.param_groups)
        self._gradients.sweep()

    def end_updates(self) -> None:
        """A backward that updated buckets ends: their state lies below, since user code runs next."""
        self.state.lower()

    def _may_update_in_backward(self) -> bool:
        """Says once where the config asks for what cannot be."""
        why = self._why_not_in_backward()
        if why:
            log.warning("[plan] update_in_backward has no effect: %s", why)
        return not why

    def _why_not_in_backward(self) -> str:
        known = self.buckets.known
        if known is None:
            return "this optimizer is stepped whole, or nobody knows it"
        if not known.may_run_early:
            return "the parts of this optimizer cannot be stepped in any order"
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return "" if is_alone else "gradients are summed over ranks after backward"

    @property
    def could_update_in_backward(self) -> bool:
        """True where the config does not ask for it, and the optimizer would allow it."""
        is_free = not self._update_one.may_write_gradients and not has_pre_hooks(self.optimizer)
        return is_free and not self.may_update_in_backward and not self._why_not_in_backward()


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """Returns the closure among the arguments of `step`, or None."""
    closure = args[0] if args else kwargs.get("closure")
    return closure if callable(closure) else None


def with_closure(
    closure: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of `step` with another closure in the place of theirs."""
    return ((closure, *args[1:]), kwargs) if args else (args, {**kwargs, "closure": closure})


def _is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """True when this instance has a `step` of its own, and not the one of its class, as schedulers wrap it."""
    own = optimizer.__dict__.get("step")
    while own is not None and getattr(own, "_wrapped_by_lr_sched", False):
        own = getattr(own, "__wrapped__", None)
    kind_step = type(optimizer).step
    return own is not None and own is not kind_step and getattr(own, "__func__", None) is not kind_step


def _check(optimizer: object) -> None:
    """Returns if this can be stepped in parts, or as a whole.

    Raises:
        StateError: it cannot, or belongs to another wrapped model.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise StateError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not was_made(optimizer):
        raise StateError(
            f"expected an optimizer that torch.optim.Optimizer.__init__ has made, got {type(optimizer).__name__}, which has "
            "none of its hooks: call super().__init__(params, defaults) in its class, or wrap with the optimizer inside of it"
        )
    if hasattr(optimizer.__dict__.get("step"), "_bucketed_by"):
        raise StateError(
            f"this {type(optimizer).__name__} already belongs to a wrapped model, and an optimizer is of one: make one for "
            "each model, which updates each parameter as before, or unwrap that model first"
        )
