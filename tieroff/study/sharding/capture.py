"""The graph of one training step, from a model that is never materialised.

Forward and backward are traced on fake tensors to one graph of aten operators (`make_fx`); the update of AdamW keeps each
parameter where its gradient is brought, and adds its state's bytes.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten

from tieroff.core.machine import Machine
from tieroff.core.sharding.graph import REPLICATED, OpSplit, ShardedOp, ShardedTensor, StepGraph
from tieroff.errors import CaptureError, TieroffError
from tieroff.partition.dtensor_strategies import DTensorSplits, runs_on_parts, written_arguments
from tieroff.tracing.dry import DryModel, checked
from tieroff.tracing.roofline import Roofline


def capture_step(factory: Callable[[], Any], machine: Machine, name: str = "") -> StepGraph:
    """Returns the graph of a step's forward and backward.

    Args:
        factory: makes a `DryModel`, or a tuple (model, inputs); called with the meta device as torch's default.
        machine: whose roofline gives op times.
        name: what the graph is called; the model's class when empty.

    Raises:
        ConfigError: the machine has no figures for a roofline.
        CaptureError: the factory returns something else, or the step cannot run on tensors without values.
    """
    roofline = Roofline.of(machine)
    try:
        with torch.device("meta"):
            made = checked(factory())
        graph, names, outputs, steps = _traced(made)
    except TieroffError:
        raise
    except Exception as error:
        raise CaptureError(
            f"expected a training step that runs on tensors without values, but {type(error).__name__}: {error}. A step "
            "that depends on values (a branch, a shape, a print) cannot be partitioned"
        ) from error
    return _Reader(graph, names, outputs, steps, roofline).read(name or type(made.model).__name__)


Geometry = tuple[int, tuple[int, ...]]
"""What a tensor is told by in a trace: its storage and its shape."""


@dataclass
class _Loss:
    """What of the graph is the loss and its backward: it runs on whole tensors, for the model returns those.

    Attributes:
        nodes: names of its nodes.
        results: what the model returned.
    """

    nodes: frozenset[str] = frozenset()
    results: tuple[Geometry, ...] = ()


def _traced(made: DryModel) -> tuple[torch.fx.Graph, list[tuple[str, str]], dict[str, Geometry], _Loss]:
    """Returns the aten graph, kind and name of each of its placeholders, what each module returned, and the loss.

    The graph returns the loss, then the gradients.
    """
    outputs: dict[str, Geometry] = {}
    part = _Loss()
    params = dict(made.model.named_parameters())
    buffers = dict(made.model.named_buffers())
    wanted = [key for key, value in params.items() if value.requires_grad]
    flat, layout = tree_flatten(made.inputs)
    places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]

    def step(values: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        held = dict(zip([*params, *buffers], values, strict=True))
        for key in wanted:
            held[key].requires_grad_()
        leaves = list(flat)
        for place, value in zip(places, inputs, strict=True):
            leaves[place] = value
        given = tree_unflatten(leaves, layout)
        args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
        with _watched(made.model, outputs):
            out = functional_call(made.model, held, args, dict(kwargs))
        before = _node_names()
        returned: list[torch.Tensor] = [*filter(_is_tensor, tree_iter(out))]
        loss = made.loss(out) if made.loss is not None else _sum(out)
        ends = [t for t in returned if t.requires_grad]
        gradients = torch.autograd.grad(loss, ends, retain_graph=True, allow_unused=True)
        part.nodes, part.results = _node_names() - before, tuple(map(_geometry, returned))
        used = [place for place, gradient in enumerate(gradients) if _is_tensor(gradient)]
        ends, gradients = [ends[place] for place in used], tuple(gradients[place] for place in used)
        found = torch.autograd.grad(ends, [held[key] for key in wanted], gradients, allow_unused=True)
        return [loss, *filter(_is_tensor, found)]

    with FakeTensorMode(allow_non_fake_inputs=True):
        values = [_fake(t) for t in (*params.values(), *buffers.values())]
        inputs = [_fake(flat[place]) for place in places]
        module = make_fx(step, tracing_mode="real")(values, inputs)
    names = [("parameter" if key in wanted else "input", key) for key in (*params, *buffers)]
    return module.graph, [*names, *(("input", f"input.{i}") for i in range(len(places)))], outputs, part


def _node_names() -> frozenset[str]:
    """Returns the names of all nodes that the trace at work has so far."""
    mode = get_proxy_mode()
    assert mode is not None  # only called under make_fx
    return frozenset(node.name for node in mode.tracer.graph.nodes)


@contextlib.contextmanager
def _watched(model: torch.nn.Module, outputs: dict[str, Geometry]) -> Iterator[None]:
    """Notes what each module returns, while it lasts."""

    def note(name: str, module: torch.nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            outputs[name] = _geometry(out)

    hooks = [module.register_forward_hook(functools.partial(note, name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _geometry(tensor: torch.Tensor) -> Geometry:
    return tensor.untyped_storage()._cdata, tuple(tensor.shape)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor of the same geometry; under a fake mode it has no memory."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _sum(out: Any) -> torch.Tensor:
    found = [t.float().sum() for t in tree_iter(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
    return torch.stack(found).sum() if len(found) > 1 else found[0]


class _Reader:
    """Reads ops and tensors out of an aten graph."""

    def __init__(
        self, graph: torch.fx.Graph, names: list[tuple[str, str]], outputs: dict[str, Geometry], loss: _Loss, roofline: Roofline
    ) -> None:
        self._graph, self._roofline, self._outputs, self._loss = graph, roofline, outputs, loss
        self._whole: dict[int, int] = {}
        self._first_backward = 0
        self._roots: dict[int, int] = {}
        self._by_geometry: dict[Geometry, int] = {}
        self._names = iter(names)
        self._splits = DTensorSplits()
        self._tensors: list[ShardedTensor] = []
        self._ops: list[ShardedOp] = []
        self._of: dict[torch.fx.Node, int] = {}
        self._made: dict[tuple[torch.fx.Node, int], int] = {}

    def read(self, name: str) -> StepGraph:
        """Returns the graph."""
        for node in self._graph.nodes:
            if node.op == "placeholder":
                kind, key = next(self._names)
                self._of[node] = self._tensor(key, node.meta["val"], kind)
            elif node.op == "call_function" and node.target is operator.getitem:
                made = self._made.get((node.args[0], node.args[1]))
                if made is not None:
                    self._of[node] = made
            elif node.op == "call_function":
                if node.name in self._loss.nodes:
                    self._make_results_whole()
                self._op(node)
                if node.name in self._loss.nodes:
                    self._first_backward = len(self._ops)
            elif node.op == "output":
                self._mark_gradients(node)
        # A module's result is the first of its geometry: later ones are views that backward makes.
        outputs = tuple((key, self._by_geometry[g]) for key, g in self._outputs.items() if g in self._by_geometry)
        backward = self._first_backward
        return StepGraph(name, tuple(self._ops), tuple(self._with_lives()), outputs_of=outputs, first_backward=backward)

    def _make_results_whole(self) -> None:
        """Adds an op per tensor that the model returned, before the loss: every device gets it whole, once."""
        if self._whole:
            return
        for geometry in dict.fromkeys(self._loss.results):
            index = self._by_geometry.get(geometry)
            if index is None:
                continue
            tensor = self._tensors[index]
            self._whole[index] = len(self._tensors)
            whole = replace(tensor, name=f"{tensor.name} whole", kind="activation", owner=-1, birth=len(self._ops))
            self._tensors.append(whole)
            split = OpSplit((REPLICATED,), (REPLICATED,))
            self._ops.append(ShardedOp("whole", (index,), (self._whole[index],), (split,), is_run=False))

    def _tensor(self, name: str, value: torch.Tensor, kind: str) -> int:
        size = value.numel() * value.element_size()
        index = len(self._tensors)
        storage, shape = _geometry(value)
        root = self._roots.setdefault(storage, index)
        self._by_geometry.setdefault((storage, shape), index)
        self._tensors.append(ShardedTensor(name, shape, size, kind, birth=len(self._ops), root=root))
        return index

    def _op(self, node: torch.fx.Node) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        value = node.meta["val"]
        inputs, written = self._operands(node)
        results = [value] if isinstance(value, torch.Tensor) else list(value)
        made = [place for place, tensor in enumerate(results) if isinstance(tensor, torch.Tensor)]
        for place in made:
            name = f"{node.name}.{place}" if place else node.name
            self._made[node, place] = self._tensor(name, results[place], "activation")
        outputs = tuple(self._made[node, place] for place in made)
        if isinstance(value, torch.Tensor):
            self._of[node] = outputs[0]
        is_loss = node.name in self._loss.nodes
        splits = () if is_loss else self._splits.of(node.target, args, kwargs, value) or ()
        known = [
            OpSplit(split.inputs, tuple(split.outputs[place] for place in made))
            for split in splits
            if len(split.inputs) == len(inputs) and len(split.outputs) > max(made, default=-1)
        ]
        fitting = [split for split in known if self._fits(inputs, split.inputs) and self._fits(outputs, split.outputs)]
        whole = OpSplit((REPLICATED,) * len(inputs), (REPLICATED,) * len(outputs))
        kept = tuple(dict.fromkeys([*fitting, whole]))
        duration = self._roofline.duration_ns(node.target, args, kwargs, value)
        is_known = bool(fitting) or is_loss or not inputs  # what reads nothing is made alike on every device
        is_direct = bool(inputs) and (not is_known or runs_on_parts(node.target))
        is_run = bool(inputs) and not is_loss
        name = str(node.target)
        self._ops.append(ShardedOp(name, inputs, outputs, kept, duration, is_known, written, is_direct, is_run))

    def _operands(self, node: torch.fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the tensors that a node reads, and the places among them of those that it writes."""
        writes = written_arguments(node.target)
        found: list[tuple[int, bool]] = []
        for position, argument in enumerate((*node.args, *node.kwargs.values())):
            nodes = [n for n in tree_iter(argument) if isinstance(n, torch.fx.Node) and n in self._of]
            found += [(self._of[n], position in writes) for n in nodes]
        inputs = tuple(index for index, _ in found)
        if node.name in self._loss.nodes:
            inputs = tuple(self._whole.get(index, index) for index in inputs)
        return inputs, tuple(place for place, (_, is_written) in enumerate(found) if is_written)

    def _fits(self, tensors: Sequence[int], placements: Sequence[int]) -> bool:
        """False where a split names a dimension that its operand does not have."""
        return all(p < len(self._tensors[t].shape) for t, p in zip(tensors, placements, strict=True))

    def _mark_gradients(self, node: torch.fx.Node) -> None:
        parameters = [i for i, tensor in enumerate(self._tensors) if tensor.kind == "parameter"]
        found = [n for n in tree_iter(node.args) if isinstance(n, torch.fx.Node)][1:]
        for parameter, gradient in zip(parameters, found, strict=False):
            index = self._of[gradient]
            if self._tensors[index].kind == "activation":
                self._tensors[index] = replace(self._tensors[index], kind="gradient", owner=parameter)

    def _with_lives(self) -> list[ShardedTensor]:
        last = [tensor.birth + 1 for tensor in self._tensors]
        for position, op in enumerate(self._ops):
            for used in op.inputs:
                last[used] = max(last[used], position + 1)
        end = len(self._ops)
        return [replace(t, death=end if t.kind != "activation" else last[i]) for i, t in enumerate(self._tensors)]
