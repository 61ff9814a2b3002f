"""The user's own optimizer, whose `step` updates bucket after bucket."""

from __future__ import annotations

import logging
import types
from itertools import chain, zip_longest
from typing import Any, Protocol

import torch
from torch.optim import optimizer as torch_optimizer

from tieroff.errors import StateError
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.gradients import Gradients
from tieroff.runtime.optimizer.buckets import Buckets
from tieroff.runtime.optimizer.in_backward import AppliedGradient, EarlyUpdates
from tieroff.runtime.optimizer.splitting import raw_step
from tieroff.runtime.optimizer.state import OptimizerState
from tieroff.runtime.optimizer.update import BucketUpdate
from tieroff.runtime.settings import Settings
from tieroff.runtime.step.mode import Mode

log = logging.getLogger("tieroff")


class UpdateFollower(Protocol):
    """Whoever has steps end with the optimizer's update."""

    def before_update(self) -> None:
        """`optimizer.step` was called."""

    def after_update(self) -> None:
        """`optimizer.step` is about to return."""


class BucketedStep:
    """Replaces `optimizer.step` by one that updates bucket after bucket.

    The optimizer stays the user's: same object, same state dict, hooks fire once per step, a closure runs once.

    Attributes:
        optimizer: the user's.
        buckets: its parameters, as they are updated together.
        state: its state tensors.
        early: updates in backward.
        is_removed: `optimizer.step` is the optimizer's own again.
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
        self.buckets = Buckets(optimizer)
        self.state = OptimizerState(optimizer, self.buckets, context, settings)
        self._update_one = BucketUpdate(optimizer, context, self.state)
        self.is_removed = False
        self._in_backward = settings.update_in_backward and self._may_update_in_backward()
        self.early = EarlyUpdates(self, context.state.updated)
        context.clock.at_backward_end.insert(0, self.early)  # before what moves is brought below
        self._install()

    # -- taking the place of optimizer.step ------------------------------------------------------------------------

    def _install(self) -> None:
        optimizer, this = self.optimizer, self
        self._previous = optimizer.__dict__.get("step")

        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            """Performs one optimization step, bucket by bucket (tieroff)."""
            if this.is_removed:  # somebody kept this method, as trainers with a loss scale do
                return type(self).step(self, *args, **kwargs)
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
        for parameter in chain.from_iterable(group["params"] for group in self.optimizer.param_groups):
            if isinstance(parameter.grad, AppliedGradient):
                parameter.grad = None

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One optimization step. Returns what the closure returned, or None."""
        optimizer: Any = self.optimizer
        optimizer._opt_called = True  # schedulers look whether a step was made before theirs
        self._follower.before_update()
        if self._moves_nothing() and not self._in_backward:
            out = type(optimizer).step(optimizer, *args, **kwargs)
            self._follower.after_update()
            return out
        pre = chain(torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())
        for hook in list(pre):
            changed = hook(optimizer, (optimizer, *args), kwargs)
            if changed is not None:
                (_, *args), kwargs = changed
        loss, args, kwargs = self._run_closure(args, kwargs)
        self.early.check(optimizer.param_groups, self._context.traffic.backend.device.type)
        if self._moves_nothing():  # perhaps since a closure ran the step's forward, which needs nothing moved
            with self.early.hidden():
                raw_step(optimizer)(optimizer, *args, **kwargs)
        else:
            self._update(args, kwargs)
        self.early.end()
        optimizer._optimizer_step_code()
        post = chain(optimizer._optimizer_step_post_hooks.values(), torch_optimizer._global_optimizer_post_hooks.values())
        for hook in list(post):
            hook(optimizer, (optimizer, *args), kwargs)
        self._follower.after_update()
        return loss

    def _moves_nothing(self) -> bool:
        return self._context.state.mode is Mode.PASS

    def _run_closure(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        closure = args[0] if args else kwargs.pop("closure", None)
        if closure is None:
            return None, args[1:], kwargs
        with torch.enable_grad():
            return closure(), args[1:], kwargs

    def _update(self, args: Any, kwargs: dict[str, Any]) -> None:
        context = self._context
        context.on_demand.release_reachable()
        self._gradients.sweep()
        buckets = self.buckets.all()
        self.state.forget_strangers()
        try:
            self._update_buckets(buckets, args, kwargs)
        except BaseException:
            context.lower_all()  # user code runs next
            raise
        context.clock.tick(("end",), lambda: "end", "")
        # User code runs from here on and may write `.data` behind every version: nothing moved stays lifted.
        context.lower_all()

    def _update_buckets(self, buckets: list[list[torch.Tensor]], args: Any, kwargs: dict[str, Any]) -> None:
        left = [number for number in range(len(buckets)) if number not in self.early.done]
        for number, following in zip_longest(left, left[1:]):
            self._context.clock.tick(("bucket", number), lambda number=number: f"bucket:{number}", "optimizer")  # type: ignore[misc]
            self._update_one.run(
                buckets[number],
                lambda bucket: self._update_one.step_on(bucket, args, kwargs),
                buckets[following] if following is not None else [],
            )

    # -- in backward -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step of the model begins."""
        self.early.begin(self.buckets.all() if self._in_backward and not self._has_pre_hooks() else ())

    def before_gradient(self) -> None:
        """Another gradient arrives: hooks of users on the one before have run."""
        self.early.run()

    def gradient_arrived(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is final."""
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
            context.clock.tick(("early", number), lambda: f"bucket:{number}", "optimizer")
            if self._moves_nothing():
                self._apply(bucket)
            else:
                self._update_one.run(bucket, self._apply, [])

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

    def _has_pre_hooks(self) -> bool:
        """True while there are hooks that may change gradients just before the update."""
        optimizer: Any = self.optimizer
        return bool(optimizer._optimizer_step_pre_hooks or torch_optimizer._global_optimizer_pre_hooks)

    def _may_update_in_backward(self) -> bool:
        """Says once where the config asks for what cannot be."""
        why = self._why_not_in_backward()
        if why:
            log.warning("[plan] update_in_backward has no effect: %s", why)
        return not why

    def _why_not_in_backward(self) -> str:
        if not self.buckets.is_split:
            return "this optimizer is stepped whole"
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return "" if is_alone else "gradients are summed over ranks after backward"

    @property
    def could_update_in_backward(self) -> bool:
        """True where the config does not ask for it, and the optimizer would allow it."""
        is_free = not self._update_one.may_write_gradients and not self._has_pre_hooks()
        return is_free and not self._in_backward and not self._why_not_in_backward()


def _check(optimizer: object) -> None:
    """Returns if this can be stepped in parts, or as a whole.

    Raises:
        StateError: it cannot, or belongs to another wrapped model.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StateError(
            "expected an optimizer that updates parameters one by one, got LBFGS, whose step evaluates the model "
            "again and keeps one flat vector of all parameters; use another optimizer or do not wrap this model"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise StateError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if hasattr(optimizer.__dict__.get("step"), "_bucketed_by"):
        raise StateError("this optimizer already belongs to a wrapped model; unwrap that one first")
