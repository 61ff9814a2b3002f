"""An execution trace alone as the trace of one step: it says what ran on which memory, and the clock how long that takes.

[Note: which calls are kernels]
An execution trace has every call of an operator and not what of it reached the GPU. An op of the trace is a call that has a
kernel of its own, or one of a composite operator in which no such call is seen. Attention and convolutions are taken whole,
since what a library does inside them has no formula. What makes an optimizer's state, in its first step, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tieroff.core.machine import Machine
from tieroff.core.trace import Trace, validate
from tieroff.errors import CaptureError
from tieroff.study.profiles.execution_trace import Described, Node, is_tensor, read_execution_trace
from tieroff.study.profiles.join import Join, Row, makes_state
from tieroff.tracing.clock.interval import interval
from tieroff.tracing.clock.model import Clock, Constants
from tieroff.tracing.clock.work import Work, work_of
from tieroff.units import NS_PER_S

_STEP = "ProfilerStep#"
_COLLECTIVES = ("nccl:", "record_param_comms", "c10d::")
_WHOLE = ("aten::_scaled_dot_product_", "aten::convolution")
_WITHIN = frozenset({"aten::zero_", "aten::relu_", "aten::relu"})
"""Operators with a kernel by their registration that call another one instead."""
_IDLE = frozenset({"aten::resize_", "aten::detach_", "aten::set_", "aten::lift_fresh"})
"""Operators that change what a tensor is and touch no memory."""
_NOTHING = "<None>"
_COMPOSITE = "CompositeImplicitAutograd"  # of an operator that is made of others, and computes nothing itself
_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "long": torch.int64,
    "long int": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
}
_BY_BYTES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64, 16: torch.complex128}


def load_execution_trace(path: str | Path, machine: Machine, step: int | None = None) -> Trace:
    """Returns the trace of one step from an execution trace alone, its op times estimated for a machine.

    Args:
        path: what an `ExecutionTraceObserver` wrote of a program on a GPU.
        machine: whose op times are meant; the trace may be of another one.
        step: which of the steps that `profiler.step()` marked, from 0, of those in which the GPU worked; None: the one in the
            middle.

    Raises:
        CaptureError: the file is broken or has no shapes, no work of a GPU, no such step, or collectives.
        ConfigError: the machine says nothing of its arithmetic or its memory.
    """
    nodes, where = read_execution_trace(path), str(path)
    _check_shapes(nodes, where)
    clock = Clock.of(machine)
    steps = [kernels for nodes_of_step in _steps(nodes) if (kernels := _kernels(nodes_of_step, where))]
    number = len(steps) // 2 if step is None else step
    if not steps:
        raise CaptureError(f"{where}: expected calls with tensors on a GPU, got none: record a step that runs on one")
    if not 0 <= number < len(steps):
        raise CaptureError(f"{where}: expected a step from 0 to {len(steps) - 1}, got {step}")
    rows = [
        Row(node, order, order, round(clock.work_s(work) * NS_PER_S), is_beside=False)
        for order, (node, work) in enumerate(steps[number])
    ]
    name = machine.name or "without a name"
    trace = Join(nodes, rows, where).trace(Path(path).name.split(".")[0], f"estimated: roofline of machine {name}")
    validate(trace, where)
    between = "{:.3f} {:.3f}".format(*interval(machine, Constants.shipped()))
    return replace(trace, meta={**trace.meta, "interval": between})


def _check_shapes(nodes: Sequence[Node], where: str) -> None:
    for node in nodes:
        for described in (node.taken, node.given):
            has_elements = any(is_tensor(value) and value[3] > 1 for value in described.values)
            if has_elements and not any(described.shapes):
                raise CaptureError(
                    f"{where}: expected the shapes of what each call takes, from which its time is estimated, but "
                    f"{node.name} (node {node.id}) has none: record it with tieroff.tracing.profile, or give the profiler's "
                    "output as --trace and this file as --execution-trace"
                )


def _steps(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Yields the nodes of each marked step, of all threads; all nodes where none is marked."""
    begins = [position for position, node in enumerate(nodes) if node.name.startswith(_STEP)] or [0]
    for begin, end in zip(begins, [*begins[1:], len(nodes)], strict=True):
        yield list(nodes[begin:end])


def _kernels(nodes: Sequence[Node], where: str) -> list[tuple[Node, Work]]:
    """Returns the calls that give the GPU work, in order; see [Note: which calls are kernels]."""
    by_id = {node.id: node for node in nodes}
    whole: set[int] = set()  # calls that are taken whole, and all that was called inside
    works: dict[int, Work] = {}
    for node in nodes:
        if node.parent in whole:
            whole.add(node.id)
            continue
        if node.name.startswith(_COLLECTIVES):
            raise CaptureError(
                f"{where}: expected a step of one GPU, since nobody can tell how long {node.name} (node {node.id}) waits for "
                "others: give the profiler's output, which has its time, as --trace and this file as --execution-trace"
            )
        work = _work(node, where)
        if work is not None:
            works[node.id] = work
            if node.name.startswith(_WHOLE):
                whole.add(node.id)
    found = []
    last = {node.id: node.id for node in nodes}  # the last call inside each
    busy: set[int] = set()  # calls in which something works
    for node in reversed(nodes):
        is_kernel = node.id in works and (node.id not in busy or _has_kernel(node))
        if is_kernel and not makes_state(node, by_id):
            found.append((last[node.id], -node.id, node))
        if node.parent in by_id:
            last[node.parent] = max(last[node.parent], last[node.id])
            if is_kernel or node.id in busy:
                busy.add(node.parent)
    # What a call does itself comes after what it called: it clears memory, say, and then adds to it.
    return [(node, works[node.id]) for *_, node in sorted(found, key=lambda entry: entry[:2])]


def _has_kernel(node: Node) -> bool:
    """Returns whether an operator computes by itself, not only by what it calls.

    This build of PyTorch may know no GPU: what has a kernel on the CPU has one there.
    """
    return node.name not in _WITHIN and _is_registered(node.schema, "CPU") is not False


_parsed = cache(torch._C.parse_schema)


@cache
def _is_registered(schema: str, key: str) -> bool | None:
    """Returns whether PyTorch has an operator under a dispatch key; None where it has no such operator."""
    try:
        parsed = _parsed(schema)
        name = f"{parsed.name}.{parsed.overload_name}" if parsed.overload_name else parsed.name
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))
    except RuntimeError:
        return None


def _work(node: Node, where: str) -> Work | None:
    """Returns what a call does on a GPU, None where it does nothing or is no operator's."""
    if not node.schema or node.name in _IDLE or not _is_on_gpu(node) or _is_registered(node.schema, _COMPOSITE):
        return None
    try:
        schema = _parsed(node.schema)
        args, kwargs = _as_called(schema, node.taken)
        results = [_value(*one) for one in _each(node.given)]
        func = _operator(schema)
        if func is None:
            return _traffic(args, kwargs, results)
        return work_of(func, args, kwargs, results[0] if len(results) == 1 else tuple(results))
    except Exception as error:
        raise CaptureError(
            f"{where}: expected a call as torch makes it, but {node.name} (node {node.id}) cannot be read: {error!r}"
        ) from error


def _is_on_gpu(node: Node) -> bool:
    views = (view for views in (*node.arguments, node.outputs) for view in views)
    return any(view.device not in ("", "cpu", _NOTHING) for view in views)


def _operator(schema: Any) -> Any:
    """Returns torch's operator of a schema, None where this PyTorch has none."""
    namespace, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return getattr(packet, schema.overload_name or "default", None)


def _traffic(args: list[Any], kwargs: dict[str, Any], results: list[Any]) -> Work:
    """Returns the work of an operator that nobody knows: at least its tensors are read and written once."""
    touched = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs, results)) if isinstance(leaf, torch.Tensor)]
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in touched)
    return Work("memory", touched[0].element_size(), 0, size_bytes)


def _as_called(schema: Any, taken: Described) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments as Python gives them, tensors without memory."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for declared, one in zip(schema.arguments, _each(taken), strict=False):
        if declared.kwarg_only:
            kwargs[declared.name] = _value(*one)
        else:
            args.append(_value(*one))
    return args, kwargs


def _each(described: Described) -> Iterator[tuple[Any, Any, str]]:
    yield from zip(described.values, described.shapes, described.types, strict=True)


def _value(value: Any, shape: Any, kind: str) -> Any:
    if is_tensor(value):
        return _tensor(value, shape, kind)
    if isinstance(value, list):
        kinds = kind.partition("[")[2].removesuffix("]").split(",")
        if len(kinds) == len(value) == len(shape):
            return [_value(*one) for one in zip(value, shape, kinds, strict=True)]
        return value
    return None if value == _NOTHING else value


def _tensor(value: list[Any], shape: list[int], kind: str) -> torch.Tensor | None:
    if "nullptr" in kind:
        return None
    known = _TYPES.get(kind.partition("(")[2].removesuffix(")"))
    dtype = known if known is not None and known.itemsize == value[4] else _BY_BYTES.get(value[4], torch.float32)
    return torch.empty(shape, dtype=dtype, device="meta")
