"""The ways in which DTensor can split an operator over one mesh dimension.

DTensor's registries of strategies are private to torch and move between its versions: this file is the only one that reads
them. Written for torch 2.10 to 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.utils._pytree import tree_iter, tree_map_only

from tieroff.core.sharding.graph import PARTIAL, REPLICATED, OpSplit

GROUPS = 2
REFUSALS = (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
_aten = torch.ops.aten
_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: (3, 2),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (6, 3),
}
"""Operands and results of attention on the CPU, all of which begin with the dimensions of batch and heads."""


_WHOLE, _PART = REPLICATED, PARTIAL
_CONVOLUTION = (((0, _WHOLE, _WHOLE), (0,)), ((_WHOLE, 0, 0), (1,)), ((1, 1, _PART), (_PART,)))
"""By batch, by the channels that it makes, by those that it reads: input, weight and bias; and its result."""
_CONVOLUTION_BACKWARD = (((0, 0, _WHOLE), (0, _PART, _PART)), ((1, _WHOLE, 0), (_PART, 0, 0)), ((_WHOLE, 1, 1), (1, 1, _WHOLE)))
"""The same, of the gradient, input and weight, and the gradients of input, weight and bias."""
_WRITES = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
"""Arguments that an operator writes although its schema does not say so: the running mean and variance."""


def runs_on_parts(func: Any) -> bool:
    """True for an operator that does on parts what it does on the whole, so that DTensor's rules are not needed to run it."""
    return func in _CPU_ATTENTION or func in (_aten.convolution.default, _aten.convolution_backward.default)


def written_arguments(func: Any) -> frozenset[int]:
    """Returns the positions of the arguments that an operator writes."""
    name = func.__name__.split(".")[0] if hasattr(func, "_schema") else ""
    if name in _WRITES:
        return frozenset(_WRITES[name])
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return frozenset(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def custom_handlers() -> dict[Any, Any] | None:
    """Returns DTensor's functions that stand in front of operators, by operator; None where there are none."""
    found = getattr(DTensor._op_dispatcher, "_custom_op_handlers", None)
    return found if isinstance(found, dict) else None


class DTensorSplits:
    """Asks DTensor for the splits of operators on two groups; answers are kept."""

    def __init__(self) -> None:
        # Without process groups: strategies are computed, nothing is sent.
        self._mesh = DeviceMesh("cpu", torch.arange(GROUPS), _init_backend=False, _rank=0)
        self._propagator: Any = DTensor._op_dispatcher.sharding_propagator
        self._known: dict[Any, tuple[OpSplit, ...] | None] = {}

    def of(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[OpSplit, ...] | None:
        """Returns an operator's splits: placements of its tensor arguments in order and of its results; None if unknown."""
        key = str((func, tree_map_only(torch.Tensor, _geometry, (args, kwargs))))
        if key not in self._known:
            self._known[key] = self._ask(func, args, kwargs, out)
        return self._known[key]

    def _ask(self, func: Any, args: Any, kwargs: Any, out: Any) -> tuple[OpSplit, ...] | None:
        if func is torch.ops.aten.t.default:  # before 2.11 its rule follows one placement only
            rank = args[0].dim()
            swapped = [OpSplit((d,), (rank - 1 - d,)) for d in range(rank)]
            return (OpSplit((REPLICATED,), (REPLICATED,)), OpSplit((PARTIAL,), (PARTIAL,)), *swapped)
        if func is _aten.convolution.default and not args[6] and args[8] == 1:  # not transposed, one group
            operands = 2 if args[2] is None else 3
            return tuple(OpSplit(read[:operands], made) for read, made in _CONVOLUTION)
        if func is _aten.convolution_backward.default and not args[7] and args[9] == 1:
            return tuple(OpSplit(read, made) for read, made in _CONVOLUTION_BACKWARD)
        if func in _CPU_ATTENTION:  # DTensor has rules for the attention of GPUs only; batch and heads are independent
            operands, results = _CPU_ATTENTION[func]
            return tuple(OpSplit((p,) * operands, (p,) * results) for p in (0, 1))
        rule = self._propagator.op_strategy_funcs.get(func)
        single = getattr(self._propagator, "op_single_dim_strategy_funcs", {}).get(func)
        try:
            if rule is not None:
                found = [rule(self._schema(func, args, kwargs, _candidates))]
            elif single is not None:
                found = self._expanded(single, func, args, kwargs, out)
            else:
                return None
        # A rule refuses shapes in many ways: then nothing is known of the op, and `StepGraph.unknown_ops` says so.
        except REFUSALS:
            return None
        specs = [spec for one in found if isinstance(one, OpStrategy) for spec in one.strategies]
        return tuple(dict.fromkeys(filter(None, map(_split, specs)))) or None

    def _expanded(self, single: Any, func: Any, args: Any, kwargs: Any, out: Any) -> list[Any]:
        """Returns what a rule says for one mesh dimension: it takes one placement per tensor, and shards as those do."""
        from torch.distributed.tensor import _sharding_prop

        expand: Any = vars(_sharding_prop)["_expand_single_dim_strategy_to_mesh"]
        metas = tree_map_only(torch.Tensor, _meta, out)
        metas = tuple(metas) if isinstance(metas, list) else metas
        rank = max((t.dim() for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)), default=0)
        found = []
        for dim in range(max(rank, 1)):
            schema = self._schema(func, args, kwargs, functools.partial(_last_candidate, dim=dim))
            found.append(expand(self._mesh, schema, single, metas)(func, schema.args_meta, schema.kwargs_meta))
        return found

    def _schema(self, func: Any, args: Any, kwargs: Any, candidates: Callable[[torch.Tensor], list[Any]]) -> OpSchema:
        return OpSchema(
            func,
            tuple(self._wrapped(arg, candidates) for arg in args),
            {name: self._wrapped(arg, candidates) for name, arg in kwargs.items()},
            schema_info=self._propagator.op_to_schema_info.get(func),
        )

    def _wrapped(self, arg: Any, candidates: Callable[[torch.Tensor], list[Any]]) -> Any:
        if isinstance(arg, torch.Tensor):
            return OpStrategy([self._spec(arg, placement) for placement in candidates(arg)])
        if isinstance(arg, (list, tuple)) and any(isinstance(item, torch.Tensor) for item in arg):
            items = [self._wrapped(item, candidates) for item in arg]
            return TupleStrategy(items) if all(isinstance(item, torch.Tensor) for item in arg) else items
        return arg

    def _spec(self, tensor: torch.Tensor, placement: Any) -> OpSpec:
        spec = DTensorSpec(self._mesh, (placement,), tensor_meta=_meta(tensor))
        return OpSpec(spec, input_specs=[spec], redistribute_cost=[[0.0]])


def _candidates(tensor: torch.Tensor, dim: int | None = None) -> list[Any]:
    dims = range(tensor.dim()) if dim is None else range(dim, min(dim + 1, tensor.dim()))
    return [Replicate(), *(Shard(d) for d in dims if tensor.shape[d] >= GROUPS)]


def _last_candidate(tensor: torch.Tensor, dim: int) -> list[Any]:
    return _candidates(tensor, dim)[-1:]


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def _geometry(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}"


def _split(spec: OpSpec) -> OpSplit | None:
    """Returns a strategy as placements; None where it holds one that has no name here (a strided shard, a norm)."""
    outputs = spec.output_specs
    made = (outputs,) if isinstance(outputs, DTensorSpec) else tuple(outputs or ())
    read = spec.input_specs if spec.input_specs is not None else made
    try:
        return OpSplit(tuple(_placement(s) for s in read), tuple(_placement(s) for s in made))
    except ValueError:
        return None


def _placement(spec: DTensorSpec | None) -> int:
    if spec is None:  # an output that nobody wants
        return REPLICATED
    (placement,) = spec.placements
    if type(placement) is Shard:
        return int(placement.dim)
    if placement == Replicate():
        return REPLICATED
    if type(placement) is Partial and placement.reduce_op == "sum":
        return PARTIAL
    raise ValueError(f"no name for {placement}")
