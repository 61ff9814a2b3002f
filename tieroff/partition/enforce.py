"""Every op of a placed module runs as its partition says, whatever DTensor would choose for it.

DTensor picks an operator's split by how its operands lie, the cheapest for this operator alone, and so a step would exchange
more than was planned. A handler stands in front of the operators that the partition names: it finds the op in the plan, brings
its operands where the plan reads them, lets DTensor run it (or runs it on the parts), and brings its results where they are
kept. Ops are found by name and shapes, in order; one that is not found runs as DTensor has it. Values never depend on it.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from tieroff.core.sharding.graph import REPLICATED
from tieroff.core.sharding.placements import OpPlacement, PlacementPlan, Placements
from tieroff.partition.dtensor_strategies import custom_handlers
from tieroff.partition.exchange import bring, whole_of

log = logging.getLogger("tieroff")

_AHEAD = 24
"""How many ops of the plan a run may leave out before it is lost."""

FOLLOWED_SHARE = 0.5
"""Of the plan's ops: a forward that runs fewer is of something else."""

_current: weakref.WeakValueDictionary[DeviceMesh, Follower] = weakref.WeakValueDictionary()
"""By mesh, the module whose forward ran last."""


class Follower:
    """Follows one module's steps through the ops of its plan."""

    def __init__(self, mesh: DeviceMesh, plan: PlacementPlan) -> None:
        self._mesh, self._ops, self._first_backward = mesh, plan.ops, plan.first_backward
        self._next = len(plan.ops)
        self._direct = frozenset(op.name for op in plan.ops if op.is_direct)
        self._found = 0
        self._is_told = False
        _install({op.name for op in plan.ops})

    def begin_forward(self) -> None:
        """The module's forward begins."""
        self._next = self._found = 0
        _current[self._mesh] = self

    def end_forward(self) -> None:
        """The module's forward has ended; its backward may follow."""
        if self._found < FOLLOWED_SHARE * self._first_backward and not self._is_told:
            self._is_told = True  # once: steps are alike
            log.warning(
                "of %d ops of forward in the partition %d were run: it is of another model, batch or device, and more is "
                "exchanged than was planned; partition the model as it runs",
                self._first_backward,
                self._found,
            )
        self._next = self._first_backward

    def run(self, func: Any, default: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs an op as the plan has it."""
        flat, layout = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, DTensor)]
        op = self._find(str(func), tuple(tuple(tensor.shape) for tensor in tensors))
        if op is None and str(func) in self._direct:  # DTensor may have no rule for it, or one that fails
            whole = (REPLICATED,) * self._mesh.ndim
            args, kwargs = tree_map_only(DTensor, lambda tensor: bring(tensor, whole), (args, kwargs))
            return self._run_on_parts(func, itertools.repeat(whole), args, kwargs)
        if op is None:
            return default(func, args, kwargs)
        reads = iter(op.reads)
        flat = [bring(value, next(reads)) if isinstance(value, DTensor) else value for value in flat]
        args, kwargs = tree_unflatten(flat, layout)
        out = self._run_on_parts(func, iter(op.makes), args, kwargs) if op.is_direct else default(func, args, kwargs)
        if func._schema.is_mutable:  # the result is an operand, which stays where it is
            return out
        places = iter(op.places)
        return tree_map_only(DTensor, lambda tensor: bring(tensor, next(places)), out)

    def _find(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> OpPlacement | None:
        for position in range(self._next, min(self._next + _AHEAD, len(self._ops))):
            op = self._ops[position]
            if op.name == name and op.shapes == shapes:
                self._next = position + 1
                self._found += 1
                return op
        return None

    def _run_on_parts(self, func: Any, makes: Iterator[Placements], args: Any, kwargs: Any) -> Any:
        parts = list(tree_map_only(DTensor, DTensor.to_local, args))
        if func is torch.ops.aten.convolution_backward.default and parts[3] is not None:
            parts[3] = [parts[0].shape[1]]  # the bias has an element per channel of the gradient's part
        out = func(*parts, **tree_map_only(DTensor, DTensor.to_local, kwargs))
        return tree_map_only(torch.Tensor, lambda part: whole_of(part, self._mesh, next(makes)), out)


_installed: set[str] = set()


def _install(names: set[str]) -> None:
    """Puts the handler in front of operators; it stays there, and lets tensors of other meshes pass."""
    handlers = custom_handlers()
    if handlers is None:
        log.warning("this torch lets nobody stand in front of DTensor's operators: more is exchanged than was planned")
        return
    for name in names - _installed:
        library, packet, overload = name.split(".")
        func = getattr(getattr(getattr(torch.ops, library), packet, None), overload, None)
        if func is not None:  # an operator of another torch is not in this one, and so not run either
            handlers[func] = _OpGate(func, handlers)
            _installed.add(name)


class _OpGate:
    """Stands in front of one operator."""

    def __init__(self, func: Any, handlers: dict[Any, Any]) -> None:
        self._func, self._handlers, self._before = func, handlers, handlers.get(func)

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        mesh = next(value.device_mesh for value in tree_flatten((args, kwargs))[0] if isinstance(value, DTensor))
        follower = _current.get(mesh)
        if follower is None:
            return self._default(func, args, kwargs)
        with torch.no_grad():  # autograd has seen the op already
            return follower.run(func, self._default, args, kwargs)

    def _default(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(func, args, kwargs)
        del self._handlers[func]  # DTensor asks for a handler at every call
        try:
            return func(*args, **kwargs)
        finally:
            self._handlers[func] = self
