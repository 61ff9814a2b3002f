"""Updates of a wrapped model that belong to no step of it, and are said: by an optimizer that was never attached, or without a
forward."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from tieroff.errors import StateError

log = logging.getLogger("tieroff")

# Updates by another optimizer than the one that is attached, and none by that, after which something is wrong; or by that
# one, and none of them after a forward.
_UPDATES_MIN = 3


class Unattached:
    """Watches for updates of a model's parameters by optimizers that its engine does not know.

    None is attached by itself: an engine takes one optimizer, may refuse this one, and changes how it is stepped. Only who
    wrote the loop knows whether it is the one, or a second of several. What they have made lies on the device all the same: it
    is a part of what a step finds as it begins, and of what does not move.

    Args:
        model: whose parameters.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._attached: weakref.ref[torch.optim.Optimizer] | None = None
        self._updates: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._others: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # how many parameters
        self._is_inside = self._has_own = self._has_told = False
        self._make_room: Callable[[], None] = lambda: None

    def watch(self, make_room: Callable[[], None]) -> None:
        """Watches from now on, until `stop`.

        Args:
            make_room: called before one makes its first update, which makes its state.
        """
        self._make_room = make_room
        _listen()
        _watching.add(self)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """This is the model's optimizer from here on."""
        self._attached = weakref.ref(optimizer)
        self._updates.pop(optimizer, None)
        self._has_told = False

    def stop(self) -> None:
        """Ends watching."""
        _watching.discard(self)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Returns those that have updated the model, and have state of their own, in the order of their first updates."""
        own = self._attached() if self._attached is not None else None
        return [one for one in self._updates if own is None or one.state is not own.state]

    def begins_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to make an update."""
        if self._attached is not None and optimizer is self._attached():
            self._is_inside = True
        elif not self._is_inside and optimizer not in self._updates and self._shared_count(optimizer):
            self._make_room()

    def note_update(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made an update."""
        if self._attached is not None and optimizer is self._attached():
            self._is_inside, self._has_own = False, True
            return
        count = self._shared_count(optimizer)
        if not count:
            return
        self._updates[optimizer] = updates = self._updates.get(optimizer, 0) + 1
        # As of two models that share layers: the model's own may come next. Inside of the attached one's it is a part of that.
        if self._has_told or self._is_inside or (self._attached is not None and updates < _UPDATES_MIN):
            return
        what = f"{type(optimizer).__name__} updates {count} parameters of the wrapped {type(self._model()).__name__}"
        if self._attached is None:
            log.warning(
                "%s, which has no optimizer attached: its state stays on the device and counts as memory that cannot move. "
                "Write tieroff.engine(model).attach(optimizer) after you have made it, or make it first and write "
                "tieroff.wrap(model, optimizer)",
                what,
            )
        elif not self._has_own:
            log.warning(
                "%s, and is not the optimizer that was given to tieroff.wrap, whose step() ends a training step: none has "
                "ended yet, and none is planned before one does. %s",
                what,
                self._hint(optimizer),
            )
        elif optimizer.state and any(map(_has_tensors, optimizer.state.values())):
            log.warning(
                "%s beside the %s that is attached: its state stays on the device and counts as memory that cannot move. A "
                "wrapped model has one optimizer: give it these parameters as a group of their own (add_param_group)",
                what,
                type(self._attached()).__name__,
            )
        else:
            return  # it takes no memory
        self._has_told = True

    def _hint(self, optimizer: torch.optim.Optimizer) -> str:
        """Returns what has steps end with another optimizer than the one that is attached."""
        attached = self._attached() if self._attached is not None else None
        for name, value in getattr(attached, "__dict__", {}).items():
            if value is optimizer:  # as SAM has it, of which a loop calls first_step() and second_step()
                kind = type(attached).__name__
                return f"It is the {kind}'s own, and the {kind}'s step() is never called: tieroff.wrap(model, optimizer.{name})"
        return "If the optimizer was made anew, make it first and wrap then"

    def _shared_count(self, optimizer: torch.optim.Optimizer) -> int:
        """Returns how many of its parameters are the model's; none of an optimizer that another engine looks after."""
        model, count = self._model(), sum(len(group["params"]) for group in optimizer.param_groups)
        if model is None or self._others.get(optimizer) == count or hasattr(optimizer.__dict__.get("step"), "_bucketed_by"):
            return 0
        shared = shared_count(model, optimizer)
        if not shared:
            self._others[optimizer] = count
        return shared


def _has_tensors(values: Any) -> bool:
    return isinstance(values, dict) and any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in values.values())


_watching: weakref.WeakSet[Unattached] = weakref.WeakSet()


@functools.cache
def _listen() -> None:
    """Registers hooks for all that watch. They stay: torch goes over its hooks as it calls them, so none may go meanwhile."""
    torch_optimizer.register_optimizer_step_pre_hook(_steps)
    torch_optimizer.register_optimizer_step_post_hook(_stepped)


def _steps(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    for each in list(_watching):
        each.begins_update(optimizer)


def _stepped(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    for each in list(_watching):
        each.note_update(optimizer)


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether anybody but the engine is called before each update, and may look at gradients or change them."""
    own = optimizer._optimizer_step_pre_hooks
    return bool(own) or any(hook is not _steps for hook in torch_optimizer._global_optimizer_pre_hooks.values())


class WithoutForward:
    """Counts updates of a model of which no forward was ever seen, and says so once.

    Before the last of them it looks which of the model's methods run its parts with gradients: a loss is made of that one.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self._updates = 0
        self._looks: list[torch.utils.hooks.RemovableHandle] = []
        self._ran: str | None = None
        self._was_said = False

    def is_due(self) -> bool:
        """The attached optimizer begins an update, and no step has begun yet; True when that has to be said, and later."""
        self._updates += 1
        model = self._model()
        if model is None:
            return False
        if self._updates == _UPDATES_MIN - 1:
            self._looks = [part.register_forward_pre_hook(self._part_runs) for part in model.modules() if part is not model]
        elif self._looks:
            for look in self._looks:
                look.remove()
            self._looks = []
        return self._updates >= _UPDATES_MIN

    def _part_runs(self, _part: torch.nn.Module, _args: Any) -> None:
        model, frame = self._model(), sys._getframe(1)
        if not torch.is_grad_enabled() or model is None:
            return
        names = own_methods(model)
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name in names and frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")) is model:
                self._ran = frame.f_code.co_name  # the outermost

    def say(self, *, rests: bool) -> None:
        """Says that no step begins, once.

        Args:
            rests: all of the model is on the device until one does.
        """
        model = self._model()
        if model is None or self._was_said:
            return
        self._was_said = True
        methods = own_methods(model)
        if self._ran is not None:
            methods = [self._ran, *(name for name in methods if name != self._ran)]
        hint = "call the model itself, not its parts"
        if methods:
            hint = f"name the method that computes the loss in its place: tieroff.engine(model).begin_in({methods[0]!r})"
        others = f" (there are also {', '.join(methods[1:6])})" if methods[1:] else ""
        meanwhile = "it trains as without tieroff, all of it on the device" if rests else "what is above the budget stays there"
        log.warning(
            "%s was updated %d times and its forward was never called: no step begins, none is planned, and %s; %s%s",
            type(model).__name__,
            self._updates,
            meanwhile,
            hint,
            others,
        )


def own_methods(model: torch.nn.Module) -> list[str]:
    """Returns the public methods that a model's own classes define beside `forward`, in order; torch's containers have none."""
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, torch.nn.Module)]
    kinds = [kind for kind in kinds if not kind.__module__.startswith("torch.nn.")]
    names = dict.fromkeys(name for kind in kinds for name, made in vars(kind).items() if inspect.isfunction(made))
    return [name for name in names if not name.startswith("_") and not hasattr(torch.nn.Module, name)]


def check_shares(model: torch.nn.Module, optimizer: object) -> None:
    """Returns when an optimizer updates some of a model's parameters, or is none of torch's, which others refuse.

    Raises:
        StateError: all its parameters are others.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or shared_count(model, optimizer):
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    raise StateError(
        f"expected an optimizer of this model's parameters, got {type(optimizer).__name__} with {count} others, none of "
        f"{type(model).__name__}; wrap each model with its own optimizer, made from model.parameters()"
    )


def shared_count(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns how many of the optimizer's parameters are the model's."""
    own = {id(parameter) for parameter in model.parameters()}
    return sum(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"])


def inside(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer inside one (accelerate's, Fabric's, timm's Lookahead) that is one by its type and was made as none.

    Raises:
        StateError: the trainer's has a loss scale, and puts back the inner one's `step` after each of its own.
    """
    if was_made(optimizer):
        return optimizer  # Fabric's shows attributes of the inner one as its own
    named = getattr(optimizer, "optimizer", None)
    held = {id(one): one for one in (named, *vars(optimizer).values()) if isinstance(one, torch.optim.Optimizer)}
    if len(held) != 1:
        return optimizer
    (inner,) = held.values()
    if getattr(optimizer, "scaler", None) is not None:
        raise StateError(
            f"expected the program's own optimizer, got {type(optimizer).__name__} with a loss scale, which replaces its step; "
            "write tieroff.integrations.accelerate.prepare(accelerator, ...) in the place of accelerator.prepare(...)"
        )
    return inner


def was_made(optimizer: object) -> bool:
    """Returns whether `torch.optim.Optimizer.__init__` has run on this, so that hooks can be registered on it."""
    return "_optimizer_state_dict_pre_hooks" in getattr(optimizer, "__dict__", ())
