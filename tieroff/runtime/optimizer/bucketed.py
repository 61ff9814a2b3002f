"""The user's own optimizer, stepped bucket by bucket: bring a bucket's tensors, run its `step` on them, send them back."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from itertools import chain, zip_longest
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from tieroff.core.buckets import buckets_of
from tieroff.core.tensor import TensorClass
from tieroff.errors import StateError
from tieroff.runtime.execution.executor import Executor
from tieroff.runtime.items.homes import HomeItem, local_of, why_unmovable
from tieroff.runtime.items.residency import Event, State
from tieroff.runtime.optimizer.in_backward import AppliedGradient, EarlyUpdates
from tieroff.runtime.optimizer.splitting import raw_step, split_differs
from tieroff.runtime.step.program import Mode
from tieroff.storage.nvme.pages import MappedFiles

log = logging.getLogger("tieroff")

# Optimizers of torch whose update of one parameter does not depend on the others: splitting them was tried, bit for bit.
_PER_PARAMETER = frozenset({
    "SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adagrad", "Adadelta", "Adafactor",
    "SparseAdam",
})  # fmt: skip


class BucketedStep:
    """Replaces `optimizer.step` by one that updates bucket after bucket.

    The optimizer stays the user's: same object, same state dict, hooks fire once per step, a closure runs once.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        executor: Executor,
        begin: Callable[[], None],
        ended: Callable[[], None],
        min_bytes: int,
        in_backward: bool = False,
    ) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise StateError(
                "expected an optimizer that updates parameters one by one, got LBFGS, whose step evaluates the model "
                "again and keeps one flat vector of all parameters; use another optimizer or do not wrap this model"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise StateError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if hasattr(optimizer.__dict__.get("step"), "_bucketed_by"):
            raise StateError("this optimizer already belongs to a wrapped model; unwrap that one first")
        self.optimizer = optimizer
        self.items: dict[tuple[int, str], HomeItem] = {}
        self._executor = executor
        self._begin, self._ended = begin, ended
        self._min_bytes = min_bytes
        self._buckets: list[list[torch.Tensor]] = []
        self._bucketed_ids: tuple[int, ...] = ()
        self._positions: dict[int, int] = {}
        self._state_taken_over: Any = None
        self.is_removed = False
        self.is_split = self._can_be_split()
        self._in_backward = in_backward and self._may_update_in_backward()
        self.early = EarlyUpdates(self._update_early, self._lower_state)
        executor.ends_backward, executor.gate.updated = self.early.backward_ended, self.early.updated
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
        for item in self.items.values():
            item.bring_home(self._executor.traffic)
        self.items.clear()
        for parameter in chain.from_iterable(group["params"] for group in self.optimizer.param_groups):
            if isinstance(parameter.grad, AppliedGradient):
                parameter.grad = None

    # -- one step ------------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """One optimization step. Returns what the closure returned, or None."""
        optimizer: Any = self.optimizer
        optimizer._opt_called = True  # schedulers look whether a step was made before theirs
        self._begin()
        if self._moves_nothing() and not self._in_backward:
            out = type(optimizer).step(optimizer, *args, **kwargs)
            self._ended()
            return out
        pre = chain(torch_optimizer._global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values())
        for hook in list(pre):
            changed = hook(optimizer, (optimizer, *args), kwargs)
            if changed is not None:
                (_, *args), kwargs = changed
        loss, args, kwargs = self._run_closure(args, kwargs)
        self.early.check(optimizer.param_groups, self._executor.traffic.backend.device.type)
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
        self._ended()
        return loss

    def _moves_nothing(self) -> bool:
        return self._executor.mode is Mode.PASS

    def _run_closure(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        kwargs = dict(kwargs)
        closure = args[0] if args else kwargs.pop("closure", None)
        if closure is None:
            return None, args[1:], kwargs
        with torch.enable_grad():
            return closure(), args[1:], kwargs

    def _update(self, args: Any, kwargs: dict[str, Any]) -> None:
        executor = self._executor
        executor.on_demand.let_go()
        executor.gradients.sweep()
        buckets = self.buckets()
        self._let_go_of_strangers()
        try:
            self._update_buckets(buckets, args, kwargs)
        except BaseException:
            self.lower_all()  # user code runs next
            raise
        executor.tick(("end",), lambda: "end", "")
        # User code runs from here on and may write `.data` behind every version: nothing moved stays lifted.
        self.lower_all()

    def _update_buckets(self, buckets: list[list[torch.Tensor]], args: Any, kwargs: dict[str, Any]) -> None:
        executor = self._executor
        left = [number for number in range(len(buckets)) if number not in self.early.done]
        for number, following in zip_longest(left, left[1:]):
            executor.tick(("bucket", number), lambda number=number: f"bucket:{number}", "optimizer")  # type: ignore[misc]
            self._update_bucket(
                buckets[number],
                lambda bucket: self._run_on(bucket, args, kwargs),
                self._items_of(buckets[following]) if following is not None else [],
            )

    def _update_bucket(
        self, bucket: list[torch.Tensor], run: Callable[[list[torch.Tensor]], None], ahead: list[HomeItem]
    ) -> None:
        """Updates one bucket, whose tick began; `ahead` is needed next."""
        executor = self._executor
        moved = self._lift(bucket)
        executor.on_demand.fetch(ahead)
        executor.resume()
        try:
            run(bucket)
        finally:
            executor.pause()
            moved += self._adopt_state(bucket)
            moved = [item for item in moved if item.device is not None]  # but for state and gradients that are gone
            for item in moved:
                # Fused kernels write without a trace in any version; only gradients are usually left alone.
                if item.kind is not TensorClass.GRADIENT or self._may_write_gradients():
                    item.touch(executor.traffic)
                else:
                    item.refresh(executor.traffic)
            if executor.mode is not Mode.PLANNED:
                executor.on_demand.let_leave(*moved)
                for item in moved:
                    executor.bind(item)

    # -- in backward -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step of the model begins."""
        self.early.begin(self.buckets() if self._in_backward and not self._has_pre_hooks() else ())

    def gradient_arrived(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is final."""
        if not self.early.arrived(parameter):
            return
        if self._moves_nothing():
            torch.autograd.Variable._execution_engine.queue_callback(self.early.finish)
        else:
            self._executor.watch_backward()

    def _update_early(self, number: int) -> None:
        """Updates a bucket in backward: its gradients are final, and so nothing there uses its parameters any more."""
        executor, bucket = self._executor, self._buckets[number]
        with executor.lock, torch.no_grad():
            executor.tick(("early", number), lambda: f"bucket:{number}", "optimizer")
            if self._moves_nothing():
                self._apply(bucket)
            else:
                self._update_bucket(bucket, self._apply, [])

    def _apply(self, bucket: list[torch.Tensor]) -> None:
        """Updates a bucket, and takes its gradients away."""
        with torch.autocast("cpu", enabled=False), torch.autocast(self._executor.traffic.backend.device.type, enabled=False):
            self._run_on(bucket, (), {})
        # What backward saved of these, and still uses where no gradient comes from it, must not be used with new values.
        # Fused kernels do not say that they wrote.
        torch.autograd.graph.increment_version(bucket)
        self.early.note(bucket, self.optimizer.param_groups)
        self._executor.gradients.sweep()

    def _lower_state(self) -> None:
        """Has state that was updated in backward lie below: user code runs next. Parameters are seen to there."""
        for item in self.items.values():
            if item.device is not None and item.is_lifted and not self._executor.keeps(item):
                item.leave(self._executor.traffic)

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
        if not self.is_split:
            return "this optimizer is stepped whole"
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        return "" if is_alone else "gradients are summed over ranks after backward"

    @property
    def could_update_in_backward(self) -> bool:
        """True where the config does not ask for it, and the optimizer would allow it."""
        is_free = not self._may_write_gradients() and not self._has_pre_hooks()
        return is_free and not self._in_backward and not self._why_not_in_backward()

    def _may_write_gradients(self) -> bool:
        optimizer = self.optimizer
        return getattr(optimizer, "grad_scale", None) is not None or type(optimizer).__name__ not in _PER_PARAMETER

    def lower_all(self) -> None:
        """Has every moved home, gradient and state lie below, with its latest value."""
        executor = self._executor
        executor.on_demand.let_go()
        for item in chain(executor.gate.items.values(), executor.gradients.values(), self.items.values()):
            if item.device is not None and not executor.keeps(item):
                item.leave(executor.traffic)

    def _run_on(self, bucket: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        """Runs the optimizer's own step on a subset of its parameters; groups without any are left out meanwhile."""
        optimizer = self.optimizer
        wanted = {id(p) for p in bucket}
        groups = optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = [p for p in params if id(p) in wanted]
            optimizer.param_groups = [group for group in groups if group["params"]]
            raw_step(optimizer)(optimizer, *args, **kwargs)
        finally:
            optimizer.param_groups = groups
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    # -- what a bucket's update needs ------------------------------------------------------------------------------

    def buckets(self) -> list[list[torch.Tensor]]:
        """Returns the parameters in update order, in lists of bounded size; one list when it cannot be split."""
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        ids = tuple(map(id, params))
        if ids == self._bucketed_ids:
            return self._buckets
        ranges = buckets_of([_size(p) for p in params]) if self.is_split else [range(len(params))]
        buckets = [params[r.start : r.stop] for r in ranges]
        self._buckets, self._bucketed_ids = buckets, ids
        self._positions = {key: position for position, key in enumerate(ids)}
        return buckets

    def take_over_state(self) -> None:
        """Puts state that exists already below: that of a resumed run, or what `load_state_dict` put in its place.

        State that the optimizer makes in a step is taken over bucket by bucket in that step.
        """
        state = self.optimizer.state
        if state is self._state_taken_over:
            return
        self._state_taken_over = state
        mapped = MappedFiles()
        executor = self._executor
        device = executor.traffic.backend.device
        for bucket in self.buckets():
            for param, key, tensor in self.tensors_of(bucket):
                # A counter of steps may stay on the host; everything else goes where its parameter is updated.
                is_updated_there = id(param) in executor.gate.items or param.device == device
                if executor.is_elsewhere(tensor) and is_updated_there and key != "step":
                    tensor.data = tensor.data.to(device)
            for item in self._adopt_state(bucket):
                item.settle_below(executor.traffic, mapped)

    def _let_go_of_strangers(self) -> None:
        """Ends the care for state of parameters that left the optimizer."""
        for key, item in [(key, item) for key, item in self.items.items() if key[0] not in self._positions]:
            item.detach(self._executor.traffic)
            del self.items[key]

    def tensors_of(self, bucket: list[torch.Tensor]) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
        """Returns (parameter, key, tensor) of the state tensors of a bucket; of a sharded one, this rank's shard."""
        state = self.optimizer.state
        return [
            (param, key, local_of(value))
            for param in bucket
            if param in state
            for key, value in state[param].items()
            if isinstance(value, torch.Tensor)
        ]

    def _items_of(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        """Returns what of a bucket's tensors is looked after, and its update needs."""
        executor = self._executor
        moved: list[HomeItem] = []
        for param in bucket:
            item = executor.gate.items.get(id(param))
            if item is None or item.tensor is not param:
                continue
            gradient = executor.gradients.get(item.position)
            # Without a gradient the update leaves the parameter alone.
            if param.grad is None and not self.optimizer.state.get(param):
                continue
            moved.append(item)
            if gradient is not None:
                moved.append(gradient)
        for param, key, tensor in self.tensors_of(bucket):
            known = self.items.get((id(param), key))
            if known is not None and known.tensor is tensor:
                moved.append(known)
        return moved

    def _lift(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        executor = self._executor
        moved = self._items_of(bucket)
        executor.on_demand.claim(*moved)
        for known in moved:
            known.refresh(executor.traffic)
            if known.state is State.LOWER:
                executor.traffic.counts.faults += 1
                executor.traffic.send(known, Event.FETCH)
        for known in moved:
            known.lift(executor.traffic)
            executor.bind(known)
        return moved

    def _adopt_state(self, bucket: list[torch.Tensor]) -> list[HomeItem]:
        """Takes state tensors that are new, or were replaced, under the engine's care."""
        executor = self._executor
        if TensorClass.OPTIMIZER not in executor.covers:
            return []
        adopted: list[HomeItem] = []
        names = executor.names_by_id
        for param, key, tensor in self.tensors_of(bucket):
            known = self.items.get((id(param), key))
            if known is not None and known.tensor is tensor and known.is_current():
                continue
            if known is not None:
                known.detach(executor.traffic)
                del self.items[id(param), key]
            owner = names.get(id(param)) or f"parameter {self._positions[id(param)]} of the optimizer, outside the model"
            name = f"{key} of {owner}"
            if _size(tensor) < max(self._min_bytes, 1) or executor.is_elsewhere(tensor) or why_unmovable(tensor):
                continue
            item = HomeItem(("state", name), name, TensorClass.OPTIMIZER, tensor, executor.tier_for(_size(tensor)))
            executor.assign(item)
            item.adopt(executor.traffic)
            self.items[id(param), key] = item
            executor.bind(item, is_new=False)
            adopted.append(item)
        return adopted

    # -- may it be split? ------------------------------------------------------------------------------------------

    def _can_be_split(self) -> bool:
        kind = type(self.optimizer)
        if kind.__module__.startswith("torch.optim") and kind.__name__ in _PER_PARAMETER:
            return True
        if sum("step" in base.__dict__ for base in kind.__mro__[:-1]) > 2:  # its own, torch's abstract one, and another
            log.warning("%s builds on the step of another optimizer: it is stepped whole", kind.__name__)
            return False
        reason = split_differs(self.optimizer)
        if reason:
            log.warning(
                "%s couples its parameters (%s): it is stepped whole, so all of them, their gradients and their state "
                "have to fit the device at once", kind.__name__, reason,
            )  # fmt: skip
        return not reason


def _size(tensor: torch.Tensor) -> int:
    """Returns the bytes that a tensor has on this rank."""
    tensor = local_of(tensor)
    return tensor.numel() * tensor.element_size()

