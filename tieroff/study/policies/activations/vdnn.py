"""`vdnn-all`, `vdnn-conv`, `vdnn-dyn`: inputs of layers wait for backward in host memory.

Rhu et al., "vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design", MICRO 2016.

The rule. An input X of a layer that backward reads again leaves the device while its last reader in forward runs, and
that layer does not end before the copy. When backward enters layer i, the inputs of the nearest layer below i whose
inputs left and are not back are fetched beside it, and the layer does not end before they are there; the search stops
at the first convolution below i whose inputs are not to be fetched. What no search found is fetched when it is wanted.
ALL moves the inputs of every layer, CONV those of convolutions. DYN takes the first of {nothing, CONV, ALL} that fits.
Neither sizes nor times enter, and what is not an activation never moves.

Certain: the sets, the waiting at a layer's end and the search, from a public re-implementation; that the search is the
paper's is from memory (default, not verified).

Where the port differs. A layer is a module of the trace, or a single op where no module is told; "convolution" means
convolutions, linear layers and products of matrices, so that transformers have some. What a layer keeps for its own
backward in place of its input (a normalised copy) counts as an input of it. DYN has no choice of algorithms for
convolutions: traces hold one duration per op. When host memory is full, inputs go to the NVMe, or stay.

On the ten ops of tests/golden/ten_ops.py. a, b and c are inputs of layers and leave beside their last readers in
forward. The loss is of the layer that made d: entering it fetches b, the next below; c, which no search found, is
fetched at its use, and a beside op 6. b alone is a convolution's input. It is back at op 4, which then has all its 33
MiB: few enough for A, where DYN takes CONV, too many for B, where DYN takes ALL.
* vdnn-all: A `a>h 1-2, a<h 6-7, b>h 2-3, b<h 4-6, c>h 3-4, c<h 5-5`; B `a>h 1-2, a<h 6-7, b>h 2-3, b<h 4-6, c>h 3-4,
  c<h 5-5`
* vdnn-conv: A `b>h 2-3, b<h 4-6`; B `b>h 2-3, b<h 4-6`
* vdnn-dyn: A `b>h 2-3, b<h 4-6`; B `a>h 1-2, a<h 6-7, b>h 2-3, b<h 4-6, c>h 3-4, c<h 5-5`
"""

from __future__ import annotations

from dataclasses import dataclass

from tieroff.core.plan import Plan
from tieroff.core.tensor import Tier
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem, Slot
from tieroff.study.policies.shared.copies import retimed
from tieroff.study.policies.shared.reading import is_weighted, layers, saved_slots, turn_of


@dataclass(frozen=True, slots=True)
class _Layers:
    """Layers of a trace: of each op, first and one past the last op of each in forward, which are weighted, and the
    runs of backward as (layer, first op, one past the last)."""

    of_op: tuple[int, ...]
    forward: list[tuple[int, int]]
    has_weights: list[bool]
    backward: list[tuple[int, int, int]]


@policy("vdnn-all", paper="Rhu et al., MICRO 2016", published=True)
def plan_vdnn_all(problem: Problem) -> Plan:
    """Returns the plan that moves the inputs of every layer; it may be over the device's budget."""
    return _plan(problem, "vdnn-all", only_weighted=False)


@policy("vdnn-conv", paper="Rhu et al., MICRO 2016", published=True)
def plan_vdnn_conv(problem: Problem) -> Plan:
    """Returns the plan that moves the inputs of convolutions; it may be over the device's budget."""
    return _plan(problem, "vdnn-conv", only_weighted=True)


@policy("vdnn-dyn", paper="Rhu et al., MICRO 2016", published=True)
def plan_vdnn_dyn(problem: Problem) -> Plan:
    """Returns CONV's plan if it fits, else ALL's; it may be over the device's budget."""
    plan = _plan(problem, "vdnn-dyn", only_weighted=True)
    if plan.peak_bytes[Tier.DEVICE] > problem.device_bytes:
        plan = _plan(problem, "vdnn-dyn", only_weighted=False)
    return plan


def _plan(problem: Problem, policy: str, *, only_weighted: bool) -> Plan:
    if problem.fits:
        return build_plan(problem, policy, [], {})
    read = _read_layers(problem)
    room = LowerRoom(problem)
    inputs: dict[int, list[Slot]] = {}
    for slot in saved_slots(problem):
        reader = _last_user(problem, slot)
        layer = read.of_op[reader]
        if only_weighted and not (read.has_weights[layer] and slot.tensor in problem.trace.ops[reader].reads):
            continue
        if max(read.forward[layer][1], slot.start) + 1 <= slot.stop and room.place((slot.tensor,), problem.tiers):
            inputs.setdefault(layer, []).append(slot)
    fetches = _fetches(read, inputs)
    moves: list[Move] = []
    issue_at: dict[tuple[int, int], int] = {}
    ready_by: dict[int, int] = {}
    for layer, slots in inputs.items():
        first, end = read.forward[layer]
        start, stop = fetches.get(layer, (problem.op_count, problem.op_count))
        for slot in slots:
            release = max(end, slot.start)  # later than the layer's end where the program itself holds the tensor
            moves.append(Move(slot, release, max(min(start, slot.stop), release + 1)))
            issue_at[slot.tensor, release] = first
            ready_by[slot.tensor] = stop
    return retimed(problem, build_plan(problem, policy, moves, room.tier_of), issue_at, ready_by)


def _last_user(problem: Problem, slot: Slot) -> int:
    """Returns the last op before a slot that uses its tensor, its last reader in forward as a rule; else the one before it."""
    ops, last = problem.trace.ops, max(slot.start - 1, 0)  # where none uses it, the program itself holds it until there
    return next((i for i in range(last, -1, -1) if slot.tensor in ops[i].reads or slot.tensor in ops[i].writes), last)


def _read_layers(problem: Problem) -> _Layers:
    trace = problem.trace
    turn, of_op, weighted = turn_of(trace), layers(trace), is_weighted(trace)
    forward: list[tuple[int, int]] = []
    has_weights: list[bool] = []
    for index in range(turn):
        if of_op[index] == len(forward):
            forward.append((index, index + 1))
            has_weights.append(weighted[index])
        else:
            forward[-1] = (forward[-1][0], index + 1)
            has_weights[-1] |= weighted[index]
    backward: list[tuple[int, int, int]] = []
    for index in range(turn, len(trace.ops)):
        if backward and backward[-1][0] == of_op[index]:
            backward[-1] = (of_op[index], backward[-1][1], index + 1)
        else:
            backward.append((of_op[index], index, index + 1))
    return _Layers(of_op, forward, has_weights, backward)


def _fetches(read: _Layers, inputs: dict[int, list[Slot]]) -> dict[int, tuple[int, int]]:
    """Returns, for each layer whose inputs a search found, the ticks at which they are fetched and awaited."""
    fetched: dict[int, tuple[int, int]] = {}
    for layer, first, end in read.backward:
        for below in range(layer - 1, -1, -1):
            if below in inputs and below not in fetched:
                fetched[below] = (first, end)
                break
            if read.has_weights[below]:
                break
    return fetched
