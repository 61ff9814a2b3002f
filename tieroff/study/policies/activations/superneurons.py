"""`superneurons`: a cache of activations with recompute by layer type and cost (SuperNeurons, Wang et al., PPoPP 2018).

The rule [V: its source]. Outputs of checkpoint layers (convolution, fully connected, join, fork, concatenation, data and
softmax) are cached on the device: when an allocation fails, the least recently used that the running layer does not lock
are copied to the host and freed while it waits; a miss is loaded while its layer waits, and in backward one tensor is
fetched ahead. Outputs of all other layers are dropped in forward and recomputed in backward. A run of such layers behind
a checkpoint is a segment: if its outputs together are no more than l_peak, the largest set of bytes that one op of
backward works on, the segment is recomputed once and kept (speed-centric); else it is recomputed from its checkpoint for
each layer anew, and freed at once (memory-centric).

Constants: `RECOMPUTED`, the layers that are not checkpoints by words of their names: pooling, activations, normalisation
and dropout are the paper's [V], the elementwise ops that those are made of in transformers are a default, not verified.
An op whose name tells nothing is a checkpoint.

Where the port differs. An op is told by its name. It is recomputed only where the executor repeats single ops, and only
if it writes nothing that persists or that it also reads (batch normalisation with running statistics and ReLU in place
do not), if what it reads still exists unchanged, and if all that it writes is used again in backward; other outputs are
cached like those of checkpoints. Fetching ahead takes free room only. The choice of convolution algorithms is not ported.

Worked example, budget 7: op 0 (convolution) writes a (4 bytes), op 1 (pool) reads a and writes b (1), op 2 (convolution)
reads b and writes c (2), op 3 (loss) reads c and writes g (1), op 4 (convolution backward) reads g and b, op 5 (pool
backward) reads a and b. Without recompute op 3 finds 7 bytes and moves a, the least recently used. But b is no
checkpoint's: it is dropped after op 2, op 1 runs again from a before op 4, and nothing moves.

On the ten ops of tests/golden/ten_ops.py. b is no checkpoint's: it is dropped, and op 1 runs again before op 6. That is
all that is missing, so nothing moves.
* superneurons: A `repeat 1@6`; B `repeat 1@6`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tieroff.core.plan import Plan, Repeat, Residency
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Op
from tieroff.planner.policy import Decides, policy
from tieroff.planner.problem.assemble import build_plan
from tieroff.planner.problem.problem import Bytes, Problem, Slot
from tieroff.planner.simulate.simulator import memory_per_op
from tieroff.study.policies.shared.paging import Paging, Span, build_paged
from tieroff.study.policies.shared.reading import turn_of

RECOMPUTED = (
    *("pool", "norm", "lrn", "dropout", "relu", "gelu", "erf", "silu", "tanh", "sigmoid"),
    *("sum", "divide", "multiply", "power", "sqrt", "subtract"),  # what normalisation and activations are made of
)


@dataclass(slots=True)
class _Segment:
    """A run of ops behind a checkpoint that are recomputed together: op -> the ticks from which its outputs are back."""

    back_at: dict[int, int] = field(default_factory=dict)
    size_bytes: int = 0


class _Cache(Paging):
    """Paging of activations that fetches the next one ahead in backward."""

    def __init__(self, problem: Problem, dropped: _Dropped) -> None:
        super().__init__(problem, dropped.slots(), dropped.spans(), dropped.transient())
        self._turn = turn_of(problem.trace)

    def fetch_ahead(self, tick: int) -> None:
        """Fetches the tensor that is away and needed next, if there is room."""
        if tick < self._turn or not self.away:
            return
        for later in range(tick + 1, self.problem.op_count):
            needed = self.needed_at(later)
            if needed:
                self.prefetch(needed[0])
                return


class _Dropped:
    """Which ops are recomputed, when, and what that asks of other tensors."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        turn = self._turn = turn_of(problem.trace)
        crossing = (slot for slot in _cached_slots(problem) if slot.start < turn <= slot.stop and not slot.is_last)
        self._own = {slot.tensor: slot for slot in crossing}
        self._producer: dict[int, int] = {}
        self._segment_of: dict[int, _Segment] = {}
        self.repeats: set[Repeat] = set()
        if problem.capabilities.repeats_ops:
            self._find()

    def _find(self) -> None:
        trace = self._problem.trace
        peak = max((self._bytes({*op.reads, *op.writes}) for op in trace.ops[self._turn :]), default=0)
        segments: list[_Segment] = []
        for index, op in enumerate(trace.ops[: self._turn]):
            behind = {id(s): s for t in op.reads if t in self._producer for s in [self._segment_of[self._producer[t]]]}
            if len(behind) > 1 or not self._is_dropped(index, op):
                continue
            if behind:
                segment = next(iter(behind.values()))
            else:
                segments.append(segment := _Segment())
            segment.back_at[index] = min(self._own[t].stop for t in op.writes)
            segment.size_bytes += self._bytes(set(op.writes))
            self._segment_of[index] = segment
            self._producer.update(dict.fromkeys(op.writes, index))
        for segment in segments:
            if segment.size_bytes <= peak:
                segment.back_at = dict.fromkeys(segment.back_at, min(segment.back_at.values()))
            repeats = {repeat for index, at in segment.back_at.items() for repeat in self._runs(index, at)}
            if all(self._can_run(repeat) for repeat in repeats):
                self.repeats |= repeats
            else:
                for index in segment.back_at:
                    for tensor in trace.ops[index].writes:
                        del self._producer[tensor]

    def _bytes(self, tensors: set[int]) -> int:
        return sum(self._problem.size_bytes(tensor) for tensor in tensors)

    def _is_dropped(self, index: int, op: Op) -> bool:
        if not op.writes or not any(word in op.name.lower() for word in RECOMPUTED):
            return False
        lives = self._problem.trace.lifetimes
        return all(t in self._own and t not in op.reads and lives[t].writes == (index,) for t in op.writes)

    def _runs(self, index: int, at: int) -> Iterator[Repeat]:
        """Yields what runs at a tick so that an op's outputs are back: the op, and those before it whose are not."""
        yield Repeat(index, at)
        for tensor in self._problem.trace.ops[index].reads:
            producer = self._producer.get(tensor)
            if producer is not None and at < self._segment_of[producer].back_at[producer]:
                yield from self._runs(producer, at)

    def _can_run(self, repeat: Repeat) -> bool:
        """Returns whether what an op reads exists, unchanged, when it runs again."""
        for tensor in self._problem.trace.ops[repeat.op].reads:
            life = self._problem.trace.lifetimes[tensor]
            if not life.birth <= repeat.at < life.death or any(repeat.op < write < repeat.at for write in life.writes):
                return False
        return True

    def spans(self) -> dict[int, tuple[Span, ...]]:
        """Returns the ticks in which each tensor that is dropped is on the device."""
        result: dict[int, tuple[Span, ...]] = {}
        for tensor, index in self._producer.items():
            life = self._problem.trace.lifetimes[tensor]
            back_at = self._segment_of[index].back_at[index]
            before = sorted({r.at for r in self.repeats if r.op == index and r.at < back_at})
            result[tensor] = ((life.birth, self._own[tensor].start), *((at, at + 1) for at in before), (back_at, life.death))
        return result

    def slots(self) -> list[Slot]:
        """Returns where other activations may be away: not where something runs again that reads them."""
        read_at: dict[int, set[int]] = {}
        for repeat in self.repeats:
            for tensor in self._problem.trace.ops[repeat.op].reads:
                read_at.setdefault(tensor, set()).add(repeat.at)
        result: list[Slot] = []
        for slot in _cached_slots(self._problem):
            if slot.tensor in self._producer:
                continue
            start = slot.start
            for at in sorted(read_at.get(slot.tensor, ())):
                if start < at < slot.stop:
                    result.append(replace(slot, start=start, stop=at, is_last=False))
                if start <= at < slot.stop:
                    start = at + 1
            if start < slot.stop:
                result.append(replace(slot, start=start))
        return result

    def transient(self) -> Bytes:
        """Returns the transient bytes of each op with those of what runs again before it."""
        ops = self._problem.trace.ops
        result = np.array([op.transient_bytes for op in ops], np.int64)
        for repeat in self.repeats:
            result[repeat.at] = max(int(result[repeat.at]), ops[repeat.op].transient_bytes)
        return result


def _cached_slots(problem: Problem) -> list[Slot]:
    tensors = problem.trace.tensors
    slots = (slot for unit in problem.units for slot in unit.slots if len(unit.tensors) == 1)
    of_kind = (slot for slot in slots if tensors[slot.tensor].kind is TensorClass.ACTIVATION)
    return [slot for slot in of_kind if not tensors[slot.tensor].is_persistent]


@policy("superneurons", paper="Wang et al., PPoPP 2018", published=True, decides=Decides.ONLINE)
def plan_superneurons(problem: Problem) -> Plan:
    """Returns the plan; it may be over the device's budget, which the caller checks."""
    if problem.fits:
        return build_plan(problem, "superneurons", [], {})
    dropped = _Dropped(problem)
    plan = build_paged(problem, "superneurons", *_Cache(problem, dropped).run())
    spans = dropped.spans()
    residencies = [r for r in plan.residencies if r.tensor not in spans]
    residencies += [Residency(t, Tier.DEVICE, start, stop) for t, pieces in spans.items() for start, stop in pieces]
    repeats = tuple(sorted(dropped.repeats, key=lambda r: (r.at, r.op)))
    plan = replace(plan, residencies=tuple(residencies), repeats=repeats)
    return replace(plan, peak_bytes={tier: max(line) for tier, line in memory_per_op(plan, problem.trace).items()})
