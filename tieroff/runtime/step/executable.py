"""An executable: a plan as the runtime walks it, tick by tick.

`core.schedule` alone says what happens at which tick. The passes before it say what this runtime does otherwise than the
plan, and why: user code runs at moments that no op of a trace stands for.

[Note: updated below]
What the CPU updates has to lie below while user code runs before the update, and is submitted there as it lies. Its loads that
cross the step's end begin with the next step: user code between two steps finds such parameters below, whatever was loaded.

[Note: resident tensors]
An activation or gradient that comes new in each step, and that the plan never moves, is resident. It needs no item: the
program's own tensor is all there is of it, and its bytes count as those of the trace. Should a step leave its plan, or a
gradient outlive it, the engine takes it over then.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.schedule import make_schedule
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.runtime.step.program import Program, make_program
from tieroff.runtime.step.quiet import Quiet, Residents, make_quiet
from tieroff.runtime.step.recorded import Recorded

# Before every transfer of the plan that is issued at the same tick.
_FIRST_RANK = -1


@dataclass(frozen=True, slots=True)
class Executable:
    """What the runtime needs of a plan while a step runs.

    Attributes:
        program: what the runtime does at each tick of the plan's schedule, after all passes of this module.
        tiers: tensors that move -> their lower tier.
        copied: tensors that are copied out -> per copy, its tick and the next op that writes the tensor. A gradient that was
            cleared since the last backward is another tensor to the runtime, and to the trace the same one written again.
        births: per op, bytes of activations and gradients that come to life in it and are not resident.
        transients: per op, bytes that it takes for itself, and those of resident tensors.
        beside: per op, bytes of both kinds while user code has what came up for it alone, as far as the recorded step showed.
        resident_activations: see [Note: resident tensors]; by ordinal.
        resident_gradients: the same, by position of their parameter.
        quiet: see [Note: quiet events] in step/quiet.py.
        update_at: the tick at which the update begins.
        stays_after_backward: see `stays_for_update`.
        late: tensors that leave in the step after the one that used them -> the tick from which they are idle in theirs.
        host_buckets: numbers of the buckets that the CPU updates; see [Note: updated below].
    """

    program: Program
    tiers: Mapping[int, Tier]
    copied: Mapping[int, Sequence[tuple[int, int]]]
    births: tuple[int, ...]
    transients: tuple[int, ...]
    beside: tuple[int, ...]
    resident_activations: frozenset[int]
    resident_gradients: frozenset[int]
    quiet: Quiet
    update_at: int
    stays_after_backward: frozenset[int]
    late: Mapping[int, int]
    host_buckets: frozenset[int]


def make_executable(plan: Plan, trace: Trace, recorded: Recorded) -> Executable:
    """Returns what the runtime needs to run this plan of this trace."""
    tiers = {r.tensor: r.tier for r in plan.residencies if r.tier is not Tier.DEVICE}
    update_at = recorded.update_at
    below = {tensor for u in plan.host_updates for tensor in (*trace.ops[u.op].reads, *trace.ops[u.op].writes)}
    plan = loaded_after_user_code(loaded_in_next_step(plan, below), trace, recorded)
    stays = tuple(stay for stay in stays_for_update(plan, trace, tiers, update_at) if stay.tensor not in below)
    adapted = copied_after_user_code(without_early_copies(plan, recorded), stays, recorded)
    adapted = brought_back_for_update(adapted, stays, tiers, update_at)
    ticks = make_schedule(adapted).ticks
    copied: dict[int, list[tuple[int, int]]] = {}
    for at, tick in enumerate(ticks):
        for transfer in (*tick.issue_first, *tick.issues):
            if transfer.source is Tier.DEVICE:
                later = (op for op in trace.lifetimes[transfer.tensor].writes if op >= at)
                copied.setdefault(transfer.tensor, []).append((at, next(later, plan.op_count)))
    residents, program = _residents(trace, recorded, tiers), make_program(ticks, tiers)
    births, transients = tuple(_births(trace, residents.values())), tuple(_transients(trace, residents.values()))
    beside = list(map(add, births, transients))
    for op, size_bytes in recorded.beside.items():
        made_bytes = sum(trace.tensors[index].size_bytes for index in residents.values() if trace.lifetimes[index].birth == op)
        beside[op] = transients[op] - trace.ops[op].transient_bytes - made_bytes + size_bytes
    there = Residents(
        parameters=frozenset(_parameters_that_stay(trace, recorded, tiers)),
        activations=frozenset(key for kind, key in residents if kind == "activation"),
        gradients=frozenset(key for kind, key in residents if kind == "gradient"),
        buckets=frozenset(_buckets_that_stay(trace, recorded.keys, tiers)),
    )
    return Executable(
        program=program,
        tiers=tiers,
        copied=copied,
        births=births,
        transients=transients,
        beside=tuple(beside),
        resident_activations=there.activations,
        resident_gradients=there.gradients,
        quiet=make_quiet(recorded.keys, program, there, births, transients, _free_bytes(plan, trace)),
        update_at=update_at,
        stays_after_backward=frozenset(r.tensor for r in stays),
        late={
            r.tensor: max((gap.start for gap in trace.lifetimes[r.tensor].gaps), default=0)
            for r in plan.residencies
            if r.tier is Tier.DEVICE and r.tensor in tiers and r.stop > plan.op_count and r.tensor not in below
        },
        host_buckets=frozenset(key[1] for u in plan.host_updates if isinstance(key := recorded.keys[u.op], tuple)),
    )


def loaded_in_next_step(plan: Plan, updated: Collection[int]) -> Plan:
    """Returns the plan with loads that cross the step's end, of what the CPU updates, begun with the next step.

    See [Note: updated below].
    """
    count = plan.op_count

    def begun_later(transfer: Transfer) -> Transfer:
        crosses = transfer.tensor in updated and transfer.target is Tier.DEVICE and transfer.ready_by > count
        return replace(transfer, issue_at=0, ready_by=transfer.ready_by - count, rank=_FIRST_RANK) if crosses else transfer

    return replace(plan, transfers=tuple(map(begun_later, plan.transfers))) if plan.host_updates else plan


def loaded_after_user_code(plan: Plan, trace: Trace, recorded: Recorded) -> Plan:
    """Returns the plan with gradients that come back for the update alone loaded as that begins, not before.

    One that is there while user code runs counts as written, and is copied out again after it was used; what lies below
    meanwhile is as it was. One that user code of the recorded step used there comes as planned.
    """
    update_at = recorded.update_at

    def is_early(load: Transfer) -> bool:
        is_gradient = trace.tensors[load.tensor].kind is TensorClass.GRADIENT and load.tensor not in recorded.used_below
        if load.target is not Tier.DEVICE or not is_gradient or not load.issue_at < update_at <= load.ready_by:
            return False
        required = trace.lifetimes[load.tensor].required
        return all(stop <= load.issue_at or start >= update_at for start, stop in required)

    early = {(load.tensor, load.issue_at) for load in plan.transfers if is_early(load)}
    if not early:
        return plan
    residencies = (
        replace(r, start=update_at) if r.tier is Tier.DEVICE and (r.tensor, r.start) in early else r for r in plan.residencies
    )
    transfers = (
        replace(t, issue_at=update_at) if t.target is Tier.DEVICE and (t.tensor, t.issue_at) in early else t
        for t in plan.transfers
    )
    return replace(plan, residencies=tuple(residencies), transfers=tuple(transfers))


def without_early_copies(plan: Plan, recorded: Recorded) -> Plan:
    """Returns the plan without the transfers in backward of gradients that hooks of users write there.

    Any parameter's hook may write such a gradient, and through `.data`, which no version shows. So it is copied when it has to
    leave and not before, and comes back for the update and not before.
    """
    written, update_at = recorded.written_by_hooks, recorded.update_at
    if not written:
        return plan
    kept = (
        t
        for t in plan.transfers
        if t.tensor not in written or (t.target is Tier.DEVICE and update_at <= t.issue_at < plan.op_count)
    )
    return replace(plan, transfers=tuple(kept))


def stays_for_update(plan: Plan, trace: Trace, tiers: Mapping[int, Tier], update_at: int) -> Iterator[Residency]:
    """Yields the residencies of moved tensors across the end of backward, where user code runs before the update.

    A parameter or gradient that the plan has on the device when the update begins may stay there, lifted, and then counts as
    written from the end of backward; so may a gradient that the plan has there until then. Everything else has to lie below,
    where a write by user code counts.
    """
    if update_at == plan.op_count:
        return
    for residency in plan.residencies:
        if residency.tier is not Tier.DEVICE or residency.tensor not in tiers:
            continue
        kind, starts_before = trace.tensors[residency.tensor].kind, residency.start < update_at
        if kind is TensorClass.GRADIENT:
            is_there = starts_before and update_at <= residency.stop
        else:
            is_there = kind is TensorClass.PARAMETER and starts_before and update_at < residency.stop
        if is_there:
            yield residency


def copied_after_user_code(plan: Plan, stays: tuple[Residency, ...], recorded: Recorded) -> Plan:
    """Returns the plan with the copies out that begin before user code runs, of what stays through it, as the update begins.

    User code may write a tensor that stays, so a copy from before is void. One under way would have the tensor leave, and the
    update wait for it to come back. What leaves as the update begins is copied before, unless user code of the recorded step
    measured or wrote it there: on an accelerator the void copy would read while that writes.
    """
    update_at = recorded.update_at
    written = {tensor for tensor, is_written in recorded.used_below.items() if is_written}
    written.update(recorded.index[key] for key in recorded.norms if key in recorded.index)
    lasting = {r.tensor: r for r in stays if r.stop > update_at or r.tensor in written}

    def late(transfer: Transfer) -> Transfer:
        stay = lasting.get(transfer.tensor)
        is_early = stay is not None and transfer.source is Tier.DEVICE and stay.start <= transfer.issue_at < update_at
        return replace(transfer, issue_at=update_at, ready_by=stay.stop) if stay is not None and is_early else transfer

    return replace(plan, transfers=tuple(late(t) for t in plan.transfers)) if lasting else plan


def brought_back_for_update(plan: Plan, stays: tuple[Residency, ...], tiers: Mapping[int, Tier], update_at: int) -> Plan:
    """Returns the plan with a fetch, as the update begins, of what user code may have sent below before it.

    Such a tensor had to leave at the end of backward if nothing had lifted it by then. The runtime skips the fetch of one
    that is still there. It is needed by no op in particular, so nothing waits for it before it is used.
    """
    back = (
        Transfer(r.tensor, tiers[r.tensor], Tier.DEVICE, update_at, plan.op_count, _FIRST_RANK)
        for r in stays
        if r.stop > update_at
    )
    return replace(plan, transfers=(*back, *plan.transfers))


def _residents(trace: Trace, recorded: Recorded, tiers: Mapping[int, Tier]) -> dict[tuple[str, int], int]:
    """Returns the key and the number of each resident tensor: see [Note: resident tensors]."""
    sums = not sums_no_gradients(trace, recorded.keys)
    residents = dict[tuple[str, int], int]()
    for key, index in recorded.index.items():
        tensor = trace.tensors[index]
        is_summed = tensor.kind is TensorClass.GRADIENT and sums
        if index in tiers or tensor.is_persistent or is_summed or not isinstance(key, tuple):
            continue
        if tensor.kind in (TensorClass.ACTIVATION, TensorClass.GRADIENT):
            residents[key] = index
    return residents


def _parameters_that_stay(trace: Trace, recorded: Recorded, tiers: Mapping[int, Tier]) -> Iterator[int]:
    """Yields the positions of parameters that the plan never moves."""
    for key, index in recorded.index.items():
        if index not in tiers and trace.tensors[index].kind is TensorClass.PARAMETER and isinstance(key, tuple):
            yield key[1]


def _buckets_that_stay(trace: Trace, keys: Sequence[Hashable], tiers: Mapping[int, Tier]) -> Iterator[int]:
    """Yields the numbers of buckets whose update uses nothing that the plan ever moves."""
    for key, op in zip(keys, trace.ops, strict=False):
        if isinstance(key, tuple) and key[0] == "bucket" and tiers.keys().isdisjoint((*op.reads, *op.writes)):
            yield key[1]


def _free_bytes(plan: Plan, trace: Trace) -> list[int]:
    """Returns per op what is left of the plan's own peak on the device."""
    count = len(trace.ops)
    change = [0] * (count + 1)
    for residency in plan.residencies:
        if residency.tier is Tier.DEVICE:
            size_bytes, stop = trace.tensors[residency.tensor].size_bytes, residency.stop
            change[residency.start] += size_bytes
            change[min(stop, count)] -= size_bytes
            if stop > count:  # it goes on in the next step
                change[0] += size_bytes
                change[min(stop - count, residency.start)] -= size_bytes
    held, peak_bytes = itertools.accumulate(change), plan.peak_bytes.get(Tier.DEVICE, 0)
    return [peak_bytes - held_bytes - op.transient_bytes for op, held_bytes in zip(trace.ops, held, strict=False)]


def sums_no_gradients(trace: Trace, keys: Sequence[Hashable]) -> bool:
    """Returns whether each gradient of a step comes new from one backward."""
    arrived = [key for key in keys if isinstance(key, tuple) and key[0] in ("grad", "accumulate")]
    is_new = all(tensor.kind is not TensorClass.GRADIENT or not tensor.is_persistent for tensor in trace.tensors)
    is_summed = len({position for _, position in arrived}) < len(arrived)
    return is_new and not is_summed


def _transients(trace: Trace, residents: Collection[int]) -> list[int]:
    change = [0] * (len(trace.ops) + 1)
    for index in residents:
        life, size_bytes = trace.lifetimes[index], trace.tensors[index].size_bytes
        change[life.birth] += size_bytes
        change[life.death] -= size_bytes
    held = itertools.accumulate(change)
    return [op.transient_bytes + held_bytes for op, held_bytes in zip(trace.ops, held, strict=False)]


def _births(trace: Trace, residents: Collection[int]) -> list[int]:
    """Returns per op the bytes of tensors that are neither persistent nor resident, and first exist in it."""
    births = [0] * len(trace.ops)
    first: dict[int, int] = {}
    for i, op in enumerate(trace.ops):
        for tensor in (*op.reads, *op.writes):
            first.setdefault(tensor, i)
    for tensor, value in enumerate(trace.tensors):
        if value.is_persistent or tensor in residents:
            continue
        starts = [first[tensor]] if tensor in first else []
        starts += [value.holds[0][0]] if value.holds else []
        if starts:
            births[min(starts)] += value.size_bytes
    return births
