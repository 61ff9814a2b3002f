"""A trial of an optimizer that nobody knows: its first real update, whole and one parameter at a time, on copies.

[Note: the trial]
It runs once, right before the first update, with the real gradients, values, state, groups and attributes. The copies are of
all parameters or, where these take more than a bucket, of the smallest of each group, number of dimensions and type. Both
runs begin with the same random numbers; the generators, and plain values in globals, classes and closures of the
optimizer's code, are put back afterwards. The steps after the first have the same gradients, larger and smaller, some for
every other parameter only: what depends on a threshold, or on another parameter's counter, shows. Where one run does
something that the other does not, or parameters reach each other (see coupling.py), the optimizer is stepped whole.
"""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tieroff.errors import StateError
from tieroff.runtime.items.offloaded import own_class
from tieroff.runtime.movable import is_wrapper, plain_parts, tensors_in
from tieroff.runtime.optimizer.coupling import Watch, WatchReads
from tieroff.runtime.optimizer.shared import SharedValues, is_plain
from tieroff.units import format_bytes

# Of the gradients, step by step: more steps than most schedules within an optimizer take, and both sides of thresholds.
FACTORS = (1.0, 1.0, 1e3, 1e-3, 1.0, 1e3, 1.0, 1e-3, 1.0, 1.0, 1e6, 1.0)
# Of those steps, these have a gradient for every other parameter only: counters of single parameters come to differ.
_PARTIAL = frozenset({3, 7})
_OWN = frozenset({"state", "param_groups", "step", "defaults"})
_LEAVES = (torch.dtype, torch.device, type, types.FunctionType, types.BuiltinFunctionType, numpy.generic, range)

Values = Callable[[torch.Tensor], torch.Tensor]
Step = Callable[..., Any]


class NotTriableError(Exception):
    """The optimizer cannot be tried; the message says why."""


class NeedsGradientsError(Exception):
    """Its step fails where a parameter has no gradient, as it would in the plain loop."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried: an optimizer, its step without hooks, its arguments, and where the values are.

    Attributes:
        optimizer: the user's, which is not changed.
        step: its `step`, called with the copy first.
        value_of: returns where a parameter, gradient or state tensor has its value now.
        limit_bytes: of parameters that are copied.
    """

    optimizer: torch.optim.Optimizer
    step: Step
    value_of: Values
    limit_bytes: int

    def why_not(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Returns why the optimizer cannot be stepped in parts, or "" when the trial shows nothing against it."""
        outside = _Outside(type(self.optimizer))
        with _disable_current_modes(), random_numbers_put_back(), torch.no_grad():
            try:
                return self._compare(args, kwargs, outside)
            except NotTriableError as error:
                return str(error)
            except Exception as error:  # noqa: BLE001  any failure of foreign code on copies means: do not split it
                return f"a trial on copies failed: {type(error).__name__}: {error}"
            finally:
                outside.put_back()

    def begins_with_closure(self) -> bool:
        """Returns whether `step` calls a closure once, before it changes anything, and returns what that gave, and no more."""
        outside = _Outside(type(self.optimizer))
        with _disable_current_modes(), random_numbers_put_back(), torch.no_grad():
            try:
                one = copied(self.optimizer, self._sample(), self.value_of)
                return all(one.begins_with_closure(self.step, factor) for factor in FACTORS)
            except Exception:  # noqa: BLE001  as above: it takes none, or uses what it gave
                return False
            finally:
                outside.put_back()

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any], outside: _Outside) -> str:
        taken = self._sample()
        before = _generators()
        partial = _PARTIAL
        whole = copied(self.optimizer, taken, self.value_of)
        try:
            why = whole.run_whole(self.step, args, kwargs, partial)
        except NeedsGradientsError:
            partial = frozenset()  # the program's parameters always have one
        if not partial:  # not in the handler: its error holds the copies, and there is room for one
            outside.put_back()
            _put_generators(before)
            del whole
            whole = copied(self.optimizer, taken, self.value_of)
            why = whole.run_whole(self.step, args, kwargs, partial)
        if why:
            return why
        if outside.has_changed():
            return "its step changes values outside of the optimizer"
        after, expected = _generators(), whole.outcome()
        _put_generators(before)
        del whole
        split = copied(self.optimizer, taken, self.value_of)
        split.run_split(self.step, args, kwargs, partial)
        if not is_same(after, _generators()):
            return "it draws random numbers in another order"
        got = split.outcome()
        different = [name for name in got if not is_same(expected[name], got[name])]
        return f"{different[0]} differ when they are stepped one by one" if different else ""

    def _sample(self) -> dict[int, torch.Tensor]:
        """Returns by id the parameters that are tried: those with a gradient, as far as the limit allows."""
        groups = enumerate(self.optimizer.param_groups)
        everything = [((n, p.dim(), p.dtype), p) for n, group in groups for p in group["params"] if p.grad is not None]
        everything.sort(key=lambda pair: pair[1].numel())
        smallest = dict(reversed(everything))
        wanted: dict[int, torch.Tensor] = {}
        size_bytes = 0
        for param in (*smallest.values(), *(param for _, param in everything)):
            own_bytes = param.numel() * param.element_size()
            if id(param) in wanted or size_bytes + own_bytes > self.limit_bytes:
                continue
            size_bytes += own_bytes
            wanted[id(param)] = param
        if len(everything) < 2:
            raise NotTriableError(f"a trial of its first update takes two gradients, and there are {len(everything)}")
        if len(wanted) < 2 or any(id(param) not in wanted for param in smallest.values()):
            raise NotTriableError(
                f"copies for a trial of its first update take more than the {format_bytes(self.limit_bytes)} there are for them"
            )
        return wanted


@dataclass(frozen=True, slots=True)
class Copied:
    """An optimizer on copies of parameters, with the gradients that they get."""

    optimizer: torch.optim.Optimizer
    params: list[torch.nn.Parameter]
    grads: list[torch.Tensor]

    def set_gradients(self, factor: float, *, is_partial: bool = False) -> None:
        """Gives each parameter, or every other one and no other, its gradient times a factor."""
        for position, (param, grad) in enumerate(zip(self.params, self.grads, strict=True)):
            param.grad = None if is_partial and position % 2 else grad * factor

    def run_whole(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], partial: Collection[int]) -> str:
        """Steps all parameters together; returns what couples them, or "".

        Raises:
            NeedsGradientsError: it failed in one of the `partial` steps.
        """
        watch = Watch()
        for owner, param in enumerate(self.params):
            state = self.optimizer.state.get(param)
            entries = state.values() if isinstance(state, dict) else ()
            # Of earlier updates, and so of this parameter; one number of them counts as a plain one would.
            watch.mark((one for entry in entries for one in tensors_in(entry) if one.numel() > 1), owner)
        for index, factor in enumerate(FACTORS):
            self.set_gradients(factor, is_partial=index in partial)
            for owner, param in enumerate(self.params):
                watch.mark((param, param.grad), owner)
            try:
                with watch, WatchReads(watch):
                    step(self.optimizer, *args, **kwargs)
            except Exception as error:
                if index in partial:
                    raise NeedsGradientsError from error
                raise
            if watch.why:
                return watch.why
        return ""

    def begins_with_closure(self, step: Step, factor: float) -> bool:
        """See `Trial.begins_with_closure`; of one step of these copies."""
        self.set_gradients(factor)
        before = tree_map_only(torch.Tensor, torch.clone, self.outcome())  # on the CPU that is not a copy
        seen, given = list[bool](), object()  # of which nothing can be read

        def closure() -> object:
            now = self.outcome()
            seen.append(all(is_same(before[name], now[name]) for name in before))
            return given

        returned = step(self.optimizer, closure)
        return returned is given and seen == [True]

    def run_split(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], partial: Collection[int]) -> None:
        """Steps each parameter by itself.

        Raises:
            NotTriableError: two of them change what they share differently.
        """
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        for index, factor in enumerate(FACTORS):
            self.set_gradients(factor, is_partial=index in partial)
            shared = SharedValues(self.optimizer)
            for param in (p for params in whole for p in params):
                for group, params in zip(groups, whole, strict=True):
                    group["params"] = [p for p in params if p is param]
                step(self.optimizer, *args, **kwargs)
                try:
                    shared.take_back()
                except StateError as error:
                    raise NotTriableError("values that they share differ") from error
            shared.finish()
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def outcome(self) -> dict[str, Any]:
        """Returns what was stepped, by names for people, in host memory."""
        state: dict[Any, Any] = self.optimizer.state
        own = {k: v for k, v in self.optimizer.__dict__.items() if k not in _OWN and not k.startswith("_optimizer_")}
        found = {
            "parameters": list(self.params),
            "attributes of the parameters": [dict(vars(param)) for param in self.params],
            "gradients": [param.grad for param in self.params],
            "state": [state.get(param) for param in self.params],
            "entries of the groups": [
                {k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups
            ],
            "attributes of the optimizer": own,
            "state that they share": {k: v for k, v in state.items() if not isinstance(k, torch.Tensor)},
        }
        return dict(tree_map_only(torch.Tensor, lambda leaf: leaf.detach().cpu(), found))


def copied(optimizer: torch.optim.Optimizer, taken: dict[int, torch.Tensor], value_of: Values) -> Copied:
    """Returns a copy of an optimizer on copies of some of its parameters.

    Args:
        optimizer: is not changed.
        taken: by id, parameters with a gradient.
        value_of: returns where a parameter, gradient or state tensor has its value now.

    Raises:
        NotTriableError: it holds something that cannot be copied.
    """
    memo: dict[int, Any] = {}
    for key, param in taken.items():
        made = torch.nn.Parameter(value_of(param).detach().clone(), requires_grad=param.requires_grad)
        memo[key] = made
        state = optimizer.state.get(param)
        for value in state.values() if isinstance(state, dict) else ():
            if own_class(value) is torch.Tensor:
                memo[id(value)] = value_of(value).detach().clone()
    for key, param in taken.items():
        _hang_on(memo[key], param, set(taken), memo, value_of)
    grads = {key: value_of(param.grad).detach().clone() for key, param in taken.items() if param.grad is not None}
    clone = object.__new__(type(optimizer))
    own = {key: value for key, value in optimizer.__dict__.items() if key not in _OWN and not key.startswith("_optimizer_")}
    state_of: dict[Any, Any] = optimizer.state
    shared = {key: value for key, value in state_of.items() if not isinstance(key, torch.Tensor)}
    known = set(taken)
    for name, value in (*own.items(), *shared.items()):
        _check_attribute(str(name), value, known, set())
    clone.__dict__.update(copy.deepcopy(own, memo))
    clone.defaults = copy.deepcopy(optimizer.defaults, memo)
    for hooks in ("pre", "post"):
        clone.__dict__[f"_optimizer_step_{hooks}_hooks"] = {}
    clone.param_groups = [
        {**copy.deepcopy({k: v for k, v in group.items() if k not in ("params", "param_names")}, memo)}
        | {"params": [memo[id(p)] for p in group["params"] if id(p) in taken]}
        for group in optimizer.param_groups
    ]
    clone.state = defaultdict(dict, copy.deepcopy(shared, memo))
    for key, param in taken.items():
        if param in optimizer.state:
            clone.state[memo[key]] = copy.deepcopy(optimizer.state[param], memo)
    return Copied(clone, [memo[key] for key in taken], [grads[key] for key in taken])


def _hang_on(made: torch.nn.Parameter, param: torch.Tensor, known: set[int], memo: dict[int, Any], value_of: Values) -> None:
    """Gives a copy what the program hung on its parameter; one that reads what is left out fails, and steps whole."""
    for name, value in vars(param).items():
        if isinstance(value, torch.Tensor) and id(value) not in memo:
            if own_class(value) is torch.Tensor and value.numel() <= param.numel():
                setattr(made, name, value_of(value).detach().clone())
        elif _is_copied(name, value, known):
            setattr(made, name, copy.deepcopy(value, memo))


def _check_attribute(name: str, value: Any, known: set[int], seen: set[int]) -> None:
    """Returns if a value can be copied and compared.

    Raises:
        NotTriableError: it is, or holds, something else than plain values, tensors and functions.
    """
    if is_plain(value) or isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.nn.Parameter) and id(value) not in known:
        raise NotTriableError(f"its attribute {name} holds parameters")
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, dict):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    else:
        raise NotTriableError(f"its attribute {name} holds a {type(value).__name__}, which may know other parameters")
    for part in inside:
        _check_attribute(name, part, known, seen)


def _is_copied(name: str, value: Any, known: set[int]) -> bool:
    try:
        _check_attribute(name, value, known, set())
    except NotTriableError:
        return False
    return True


class _Outside:
    """Plain values that the code of an optimizer may change outside of it: in modules, classes and closures."""

    def __init__(self, kind: type) -> None:
        self._kept: list[tuple[Any, Any, Any, Any]] = []  # (place, key, its value, a copy of it)
        spaces: dict[int, Any] = {}
        for owner in kind.__mro__[: kind.__mro__.index(torch.optim.Optimizer)]:
            self._keep(owner, {k: v for k, v in vars(owner).items() if not k.startswith("__")})
            for function in vars(owner).values():
                self._look_at(function, spaces)
        for space in spaces.values():
            self._keep(space, space)

    def _look_at(self, function: Any, spaces: dict[int, Any]) -> None:
        while function is not None:
            inner = getattr(function, "__wrapped__", None)
            if isinstance(function, types.FunctionType):
                spaces[id(function.__globals__)] = function.__globals__
                for cell in function.__closure__ or ():
                    with contextlib.suppress(ValueError):  # an empty cell
                        self._keep(cell, {"cell_contents": cell.cell_contents})
            function = inner

    def _keep(self, place: Any, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if is_plain(value) or (isinstance(value, (list, dict, set)) and _holds_plain(value)):
                self._kept.append((place, key, value, copy.copy(value)))

    def _now(self, place: Any, key: str) -> Any:
        return place.get(key) if isinstance(place, dict) else getattr(place, key, None)

    def has_changed(self) -> bool:
        """True when one of them is another one now."""
        return any(not is_same(self._now(place, key), old) for place, key, _, old in self._kept)

    def put_back(self) -> None:
        """Makes them what they were."""
        for place, key, value, old in self._kept:
            if is_same(self._now(place, key), old):
                continue
            if isinstance(value, list):
                value[:] = old
            elif isinstance(value, (dict, set)):
                value.clear()
                value.update(old)
            if isinstance(place, dict):
                place[key] = value
            else:
                setattr(place, key, value)


def _holds_plain(value: Any) -> bool:
    return len(value) <= 64 and all(map(is_plain, value.values() if isinstance(value, dict) else value))


def _generators() -> list[Any]:
    states: list[Any] = [torch.get_rng_state(), random.getstate(), numpy.random.get_state()]
    if torch.accelerator.is_available():
        states.append(torch.get_device_module().get_rng_state())
    return states


def _put_generators(states: list[Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy.random.set_state(states[2])
    if len(states) > 3:
        torch.get_device_module().set_rng_state(states[3])


@contextlib.contextmanager
def random_numbers_put_back() -> Iterator[None]:
    """Whatever is drawn inside was never drawn: of torch on the host and the device, of Python and of NumPy."""
    states = _generators()
    try:
        yield
    finally:
        _put_generators(states)


def is_same(a: Any, b: Any) -> bool:
    """Returns whether two values are equal, tensors in them bit for bit."""
    if is_wrapper(a) and type(a) is type(b):
        return a.shape == b.shape and is_same(plain_parts(a), plain_parts(b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _has_same_bits(a, b)
    if isinstance(a, numpy.ndarray) and isinstance(b, numpy.ndarray):
        return a.dtype == b.dtype and bool(numpy.array_equal(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(is_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    if type(a) is type(b) and hasattr(a, "__dict__") and not any("__eq__" in vars(kind) for kind in type(a).__mro__[:-1]):
        return a is b or is_same(vars(a), vars(b))  # an object that only knows itself, as a projector: by what it holds
    return a is b or bool(a == b)


def _has_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.equal(a, b):
        return True
    if a.layout is not torch.strided or not a.numel():
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
