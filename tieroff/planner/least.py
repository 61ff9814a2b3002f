"""The least device memory that a step runs in: how much, which op needs it, and what would lower it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tieroff.core.explain.words import named, op_words
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Op
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.auto.floor import floor_selection
from tieroff.planner.layers import layer_runs, run_again
from tieroff.planner.problem.problem import Bytes, Problem, held_bytes, make_problem
from tieroff.planner.user_code import with_room
from tieroff.units import format_bytes, pasteable

_NAMED_TENSORS = 3
# What lowers the need by less than this is not worth a word.
_WORTHWHILE = 0.05
_PASSES = ("forward", "backward", "recompute")
_LOSSES = ("log_softmax", "nll_loss", "cross_entropy")
_CONVOLUTIONS = ("conv", "im2col", "unfold")


@dataclass(frozen=True, slots=True)
class Least:
    """The least of the device that a step runs in.

    Attributes:
        floor_bytes: no plan needs less: everything is away that can be.
        enough_bytes: a plan with these exists; more than the floor only where lower tiers have no room for everything.
    """

    floor_bytes: int
    enough_bytes: int


def least(problem: Problem) -> Least:
    """Returns the least device bytes of a problem, whatever its device budget.

    Of a step in which a call of user code needs more than any op, it is that of the step with room for the call.
    """
    problem = _with_room(problem)
    floor_bytes = int(problem.base.max(initial=0))
    found = floor_selection(replace(problem, budget={**problem.budget, Tier.DEVICE: floor_bytes}))
    return Least(floor_bytes, int(found.usage.max(initial=0)))


def _with_room(problem: Problem) -> Problem:
    """Returns the problem with room for the largest call of user code; see [Note: the largest call] in user_code.py."""
    roomy = with_room(problem.trace, int(problem.base.max(initial=0)), problem.capabilities.min_bytes)
    if roomy is problem.trace:
        return problem
    return make_problem(roomy, problem.machine, problem.budget, problem.capabilities)


def infeasible(problem: Problem, policy: str, peak_bytes: int) -> InfeasiblePlanError:
    """Returns the error that says which op binds, what is on the device there, which budget would do, and what would help.

    `peak_bytes` is what the policy's plan has on the device at once: another policy may need less.
    """
    problem = _with_room(problem)
    selection = floor_selection(problem)
    index = int(np.argmax(selection.usage))
    within = format_bytes(problem.device_bytes)
    if int(selection.usage[index]) <= problem.device_bytes:
        why = (
            f"what the rule of policy {policy!r} moves leaves {format_bytes(peak_bytes)} there at once; policies that may move "
            "more can meet the budget ('auto' does)"
        )
        return InfeasiblePlanError(
            f"expected a plan within {within} of device memory, but {why}. {_would_do(problem, peak_bytes)} for this one",
            needed_bytes=peak_bytes,
            available_bytes=problem.device_bytes,
            why=why,
        )
    needed, op = int(selection.usage[index]), problem.trace.ops[index]
    slots = [slot for slot in selection.slots if any(a <= index < b for a, b in slot.pieces(problem.op_count))]
    there = _held_at(problem, index, {slot.tensor for slot in slots})
    phase = f" in {op.phase}" if op.phase and op.phase not in op.name else ""
    where = f"op {index} ({named(op.name, op_words(problem.trace)[index])}{phase})"
    why = f"{where} needs {format_bytes(needed)} {_below(problem)}"
    why = f"{why}; {_makeup(problem, op, there)}"
    helps = "; ".join(_helps(problem, selection.usage, index, there))
    advice = f". What would help: {helps}" if helps else ""
    return InfeasiblePlanError(
        f"expected every op to fit in {within} of device memory, but {why}. {_would_do(problem, needed)}{advice}",
        op=where,
        needed_bytes=needed,
        available_bytes=problem.device_bytes,
        why=why,
        helps=helps,
    )


def _would_do(problem: Problem, needed_bytes: int) -> str:
    text = pasteable(needed_bytes)
    percent = -(-100 * needed_bytes // max(int(problem.live.max(initial=0)), 1))
    share = f" ({percent}% of the peak)" if percent <= 100 else ""
    return f"A device budget of {text}{' bytes' if text.isdigit() else ''} would do{share}"


def _held_at(problem: Problem, index: int, away: set[int]) -> list[int]:
    """Returns the tensors that are on the device at an op, the largest first."""
    there = [life.tensor for life in problem.trace.lifetimes if life.birth <= index < life.death and life.tensor not in away]
    return sorted(there, key=lambda tensor: -problem.size_bytes(tensor))


def _below(problem: Problem) -> str:
    if problem.tiers:
        below = ", ".join(f"{tier.value} {format_bytes(problem.budget[tier])}" for tier in problem.tiers)
        return f"with everything away that can be (tiers below: {below})"
    remedy = "Name a folder on a drive under [nvme] dirs, or bytes under [budget] host"
    return f"and nothing can move: there is no tier below. {remedy}"


def _makeup(problem: Problem, op: Op, there: list[int]) -> str:
    """Returns what the bytes of an op are: its largest tensors, and the memory of the op itself."""
    tensors = problem.trace.tensors
    named = ", ".join(f"{tensors[t].shown} ({format_bytes(tensors[t].size_bytes)})" for t in there[:_NAMED_TENSORS])
    largest = f"the largest there: {named}" if named else "no tensor that could move is there"
    by = f", most of it in {op.made_by}" if op.made_by else ""
    return f"{largest}; transient: {format_bytes(op.transient_bytes)}{by}"


def _helps(problem: Problem, usage: Bytes, index: int, there: list[int]) -> Iterator[str]:
    """Yields what would lower the need of the op that binds, with the least that it would reach where that is known."""
    op, needed = problem.trace.ops[index], int(usage[index])
    enough = needed * (1 - _WORTHWHILE)
    own = op.transient_bytes >= sum(problem.size_bytes(tensor) for tensor in there)
    name = op.made_by.lower()
    if "advice" in problem.trace.meta:  # of who recorded the step
        yield problem.trace.meta["advice"]
    if own and any(word in name for word in _LOSSES):
        yield "the loss in chunks (of the batch or the sequence), so that not all logits have a gradient at once"
    if own and any(word in name for word in _CONVOLUTIONS):
        yield "the model and its input in torch.channels_last, for which convolutions unfold no copy of their input"
    if not problem.tiers and (below := _least_with_room(problem)) < enough:
        yield f"a tier below: {_reaches(below)}"
    if (again := _least_with_layers_again(problem)) < enough:
        yield f"the layers of [plan] recompute_layers, run again in backward: {_reaches(again)}"
    else:
        kept = _of_kinds(problem, usage, there, (TensorClass.ACTIVATION,))
        if kept < enough:
            yield f"torch.utils.checkpoint, or [plan] recompute_layers with a tier below: at best {pasteable(kept)}"
    half = _with_half_the_batch(problem, usage)
    if op.phase in _PASSES and half < enough:
        yield f"half the batch: at best {pasteable(half)}"


def _reaches(size_bytes: int) -> str:
    return f"a device budget of {pasteable(size_bytes)} would do"


def _least_with_room(problem: Problem) -> int:
    """Returns the least with a host tier that takes everything."""
    machine = problem.machine
    linked = replace(machine, d2h_bytes_per_s=machine.d2h_bytes_per_s or 1, h2d_bytes_per_s=machine.h2d_bytes_per_s or 1)
    total = sum(tensor.size_bytes for tensor in problem.trace.tensors)
    able = replace(problem.capabilities, tiers=(Tier.HOST,))
    return int(make_problem(problem.trace, linked, {**problem.budget, Tier.HOST: 2 * total}, able).base.max(initial=0))


def _least_with_layers_again(problem: Problem) -> int:
    """Returns the least if all layers that the trace names ran again."""
    runs = layer_runs(problem.trace)
    if not runs:
        return int(problem.live.max(initial=0))
    other = make_problem(run_again(problem.trace, runs), problem.machine, problem.budget, problem.capabilities)
    return least(other).enough_bytes


def _of_kinds(problem: Problem, usage: Bytes, there: list[int], kinds: tuple[TensorClass, ...]) -> int:
    """Returns the need without the tensors of these classes that are on the device at the op that binds."""
    tensors = problem.trace.tensors
    spans = [
        (life.birth, life.death, tensors[tensor].size_bytes)
        for tensor in there
        if tensors[tensor].kind in kinds
        for life in (problem.trace.lifetimes[tensor],)
    ]
    return int((usage - held_bytes(spans, problem.op_count)).max(initial=0)) if spans else int(usage.max(initial=0))


def _with_half_the_batch(problem: Problem, usage: Bytes) -> int:
    """Returns the need if all that an op makes for itself in forward and backward, and all activations, were half as large."""
    trace = problem.trace
    own = np.array([op.transient_bytes if op.phase in _PASSES else 0 for op in trace.ops], np.int64)
    kinds = (TensorClass.ACTIVATION, TensorClass.INPUT)
    spans = [
        (life.birth, life.death, tensor.size_bytes)
        for tensor, life in zip(trace.tensors, trace.lifetimes, strict=True)
        if tensor.kind in kinds
    ]
    scaled = np.minimum(held_bytes(spans, problem.op_count) + own, usage)
    return int((usage - scaled // 2).max(initial=0))
