"""The independent checker of plans: it shares no code with the planner and derives everything from the trace itself.

What it refuses is in [Note: rules] of `tieroff.core.check.rules`. Its parts: this file looks at the plan as a whole,
`check_tensor` at each part of each tensor, `check_data` at the versions of its data, `check_bytes` at the room it takes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from tieroff.core.check.memory import check_allocation, check_bytes
from tieroff.core.check.rules import Rule, refuse
from tieroff.core.check.tensor import TensorCheck, Uses, can_move, derive_uses
from tieroff.core.machine import LINK_NAMES
from tieroff.core.plan import Capabilities, HostUpdate, Plan, Residency, Transfer
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Queue, Trace


def check(plan: Plan, trace: Trace, capabilities: Capabilities | None = None) -> None:
    """Returns when a plan is right for a trace and an executor; see [Note: rules].

    Args:
        plan: the plan to check.
        trace: one step.
        capabilities: what the executor can do; all defaults if None.

    Raises:
        InvalidPlanError: the first rule found broken; `rule` names it.
    """
    if plan.trace_digest != trace.digest:
        refuse(Rule.DIGEST, f"expected a plan for trace {trace.digest}, got one for {plan.trace_digest}")
    if plan.op_count != len(trace.ops):
        refuse(Rule.DIGEST, f"expected {len(trace.ops)} ops, got {plan.op_count}")
    _Check(plan, trace, capabilities or Capabilities()).run()


class _Check:
    def __init__(self, plan: Plan, ring: Trace, capabilities: Capabilities) -> None:
        self._plan = plan
        self._ring = ring
        self._capabilities = capabilities
        self._n = len(ring.ops)
        self._residencies: dict[int, list[Residency]] = defaultdict(list)
        self._transfers: dict[int, list[Transfer]] = defaultdict(list)
        # Until when updates on the host use a tensor, on the line [0, 2 n]; what they write.
        self._updated_until: dict[int, int] = {}
        self._updated: set[int] = set()
        for update in plan.host_updates:
            if not 0 <= update.op < self._n:
                continue  # refused by its own rule
            op = ring.ops[update.op]
            self._updated.update(op.writes)
            for tensor in (*op.reads, *op.writes):
                self._updated_until[tensor] = max(update.ready_by, self._updated_until.get(tensor, 0))

    def run(self) -> None:
        """Applies all rules; those that later ones rely on come first."""
        plan = self._plan
        for residency in plan.residencies:
            self._check_residency(residency)
            self._residencies[residency.tensor].append(residency)
        for transfer in plan.transfers:
            self._check_transfer(transfer)
            self._transfers[transfer.tensor].append(transfer)
        check_allocation(plan)
        self._check_repeats()
        self._check_host_updates()
        uses = derive_uses(plan, self._ring, self._capabilities)
        self._check_capabilities(uses)
        self._check_ranks()
        for index, own in enumerate(uses):
            is_late = self._leaves_late(index) and self._is_idle_at_begin(index, own)
            can_wrap = self._capabilities.wraps or is_late or self._comes_back_updated(index)
            part = TensorCheck(self._n, own, can_wrap=can_wrap)
            part.run(self._residencies[index], self._transfers[index])
        check_bytes(plan, self._ring, self._capabilities.granule_bytes)

    def _check_range(self, item: Residency | Transfer) -> None:
        """Rule range on the tensor and the bytes of an item, and what the executor can do with parts."""
        if not 0 <= item.tensor < len(self._ring.tensors):
            refuse(Rule.RANGE, f"expected a tensor below {len(self._ring.tensors)}, got {item}")
        size = self._ring.tensors[item.tensor].size_bytes
        stop = item.stop_byte or size
        if not 0 <= item.first_byte < stop <= size:
            refuse(Rule.RANGE, f"expected 0 <= first_byte < stop_byte <= {size}, got {item}")
        if stop - item.first_byte == size:
            return
        if not self._capabilities.splits:
            refuse(Rule.CAPABILITY, f"the executor moves no parts of tensors: {item}")
        granule = self._capabilities.granule_bytes
        if item.first_byte % granule or (stop % granule and stop != size):
            refuse(Rule.CAPABILITY, f"the executor cuts tensors at multiples of {granule} bytes: {item}")

    def _check_residency(self, r: Residency) -> None:
        n = self._n
        self._check_range(r)
        if not (0 <= r.start < n and r.start < r.stop <= r.start + n):
            refuse(Rule.RANGE, f"expected 0 <= start < {n} and start < stop <= start + {n}, got {r}")
        if r.stop > n and not self._ring.tensors[r.tensor].is_persistent and not self._outlives_step(r):
            refuse(Rule.RANGE, f"expected a tensor that is not persistent to end with the step, got {r}")

    def _outlives_step(self, r: Residency) -> bool:
        """True for a stay in the host that lasts no longer than an update there that crosses the step's end."""
        is_read = r.stop <= self._updated_until.get(r.tensor, 0)
        return self._capabilities.updates_cross and r.tier is Tier.HOST and is_read

    def _check_transfer(self, t: Transfer) -> None:
        n = self._n
        self._check_range(t)
        is_end = t.issue_at == t.ready_by == n and t.target is not Tier.DEVICE
        if not (0 <= t.issue_at < n and t.issue_at <= t.ready_by <= t.issue_at + n) and not is_end:
            refuse(Rule.RANGE, f"expected 0 <= issue_at < {n} and issue_at <= ready_by <= issue_at + {n}, got {t}")
        if t.source == t.target:
            refuse(Rule.RANGE, f"expected two different tiers, got {t}")
        if t.ready_by > n and not self._ring.tensors[t.tensor].is_persistent:
            refuse(Rule.RANGE, f"expected a tensor that is not persistent to move within the step, got {t}")

    def _check_repeats(self) -> None:
        seen: set[tuple[int, int]] = set()
        on_host = {update.op for update in self._plan.host_updates}
        for repeat in self._plan.repeats:
            if not 0 <= repeat.op < repeat.at < self._n:
                refuse(Rule.REPEAT, f"expected 0 <= op < at < {self._n}, got {repeat}")
            if (repeat.op, repeat.at) in seen or repeat.op in on_host:
                refuse(Rule.REPEAT, f"expected an op that the device runs, once per tick, got {repeat}")
            seen.add((repeat.op, repeat.at))
            op = self._ring.ops[repeat.op]
            if op.queue is Queue.COMMUNICATION:
                refuse(Rule.REPEAT, f"expected an op of compute, since communication needs other ranks, got {repeat}")
            for index in op.writes:
                if index in op.reads or self._ring.tensors[index].is_persistent:
                    name = self._ring.tensors[index].name
                    refuse(Rule.REPEAT, f"{repeat} would write tensor {index} ({name}), which is persistent or read by it")

    def _check_host_updates(self) -> None:
        n = self._n
        seen: set[int] = set()
        for u in self._plan.host_updates:
            if not 0 <= u.op < n or self._ring.ops[u.op].phase != "optimizer" or u.op in seen:
                refuse(Rule.HOST_UPDATE, f"expected an op of the optimizer below {n}, each once, got {u}")
            seen.add(u.op)
            if self._ring.ops[u.op].queue is Queue.COMMUNICATION:
                refuse(Rule.HOST_UPDATE, f"expected an op of compute, got {u}")
            is_end = u.issue_at == u.ready_by == n
            is_sound = u.op <= u.issue_at <= u.ready_by <= u.issue_at + n and (u.issue_at < n or is_end)
            if not is_sound or u.ready_by > u.op + n:
                refuse(
                    Rule.HOST_UPDATE,
                    f"expected op <= issue_at <= ready_by, issue_at below {n} and ready_by at most {n} after op, got {u}",
                )
            if u.duration_ns < 0:
                refuse(Rule.HOST_UPDATE, f"expected duration_ns >= 0, got {u}")
        served = sorted(self._plan.host_updates, key=_service_order)
        for before, after in itertools.pairwise(served):
            if before.ready_by > after.ready_by:
                refuse(Rule.HOST_UPDATE, f"expected updates awaited in order of issue, got {before} before {after}")
        if served and served[-1].ready_by > served[0].ready_by + n:
            refuse(Rule.HOST_UPDATE, f"expected {served[-1]} to be ready before {served[0]} of the next round")

    def _check_capabilities(self, uses: list[Uses]) -> None:
        can, plan = self._capabilities, self._plan
        for r in plan.residencies:
            if r.tier is not Tier.DEVICE and r.tier not in can.tiers:
                refuse(Rule.CAPABILITY, f"the executor has no tier {r.tier.value}: {r}")
        for t in plan.transfers:
            if Tier.DEVICE not in (t.source, t.target) and not can.moves_host_nvme:
                refuse(Rule.CAPABILITY, f"the executor moves nothing between host and nvme: {t}")
        windows: list[Transfer | HostUpdate] = [*plan.transfers, *plan.host_updates]
        for item in windows:
            if item.ready_by > self._n and not can.wraps and not self._may_cross(item):
                refuse(Rule.CAPABILITY, f"the executor has nothing under way across the end of the step: {item}")
        for index in sorted(self._moved()):
            tensor = self._ring.tensors[index]
            if not can_move(tensor, 0):
                refuse(Rule.CAPABILITY, f"tensor {index} ({tensor.name}) cannot move")
            if not can_move(tensor, can.min_bytes):
                refuse(Rule.CAPABILITY, f"tensor {index} ({tensor.name}) is below min_bytes and must stay on the device")
        if plan.recompute and not can.recompute:
            refuse(Rule.CAPABILITY, "the executor recomputes nothing")
        if plan.repeats and not can.repeats_ops:
            refuse(Rule.CAPABILITY, f"the executor repeats no single op: {plan.repeats[0]}")
        if plan.host_updates and not can.updates_on_host:
            refuse(Rule.CAPABILITY, f"the executor updates nothing on the host: {plan.host_updates[0]}")
        if not can.updates_early:
            self._check_late_updates()
        if can.gradient_follows_parameter:
            self._check_gradients(uses)

    def _check_late_updates(self) -> None:
        """Updates on the host come when backward is over, and begin at their op."""
        backward_end = max((index + 1 for index, op in enumerate(self._ring.ops) if op.phase == "backward"), default=0)
        for u in self._plan.host_updates:
            if u.issue_at > u.op:
                refuse(Rule.CAPABILITY, f"the executor begins updates on the host at their op: {u}")
            if u.op < backward_end:
                refuse(Rule.CAPABILITY, f"the executor updates nothing on the host before backward ends: {u}")

    def _may_cross(self, item: Transfer | HostUpdate) -> bool:
        """True for what may be under way as the step ends where nothing else may."""
        if isinstance(item, HostUpdate):
            return self._capabilities.updates_cross
        if item.source is Tier.DEVICE:
            return self._leaves_late(item.tensor)
        return item.source is Tier.HOST and item.target is Tier.DEVICE and self._comes_back_updated(item.tensor)

    def _comes_back_updated(self, index: int) -> bool:
        """True for a tensor that an update on the host writes, and whose loads may cross the step's end."""
        return self._capabilities.updates_cross and index in self._updated

    def _leaves_late(self, index: int) -> bool:
        """True for a tensor that the executor lets go in the next step."""
        tensor = self._ring.tensors[index]
        return self._capabilities.late_evictions and tensor.kind is TensorClass.OPTIMIZER and tensor.is_persistent

    def _is_idle_at_begin(self, index: int, uses: Uses) -> bool:
        """True for a tensor that no op of a step requires before it is let go in it."""
        n = self._n
        stops = [r.stop - n for r in self._residencies[index] if r.tier is Tier.DEVICE and n < r.stop < r.start + n]
        return bool(stops) and (not uses.required or uses.required[0][0] >= max(stops))

    def _moved(self) -> set[int]:
        below = {r.tensor for r in self._plan.residencies if r.tier is not Tier.DEVICE}
        return below.union(t.tensor for t in self._plan.transfers)

    def _check_gradients(self, uses: list[Uses]) -> None:
        """A gradient that can move at all is moved exactly when its parameter is, and to the same tiers."""
        moved = self._moved()
        for index, tensor in enumerate(self._ring.tensors):
            if tensor.kind is not TensorClass.GRADIENT or tensor.owner < 0:
                continue
            leaves, follows = tensor.owner in moved, index in moved
            required = uses[index].required
            busy = sum(stop - start for start, stop in required)
            end = max(required[-1][1], tensor.lives_until) if required else 0
            is_idle = bool(required) and (tensor.is_persistent or busy < end - required[0][0])
            is_free = can_move(tensor, self._capabilities.min_bytes) and is_idle and busy < self._n
            if (follows and not leaves) or (leaves and not follows and is_free):
                refuse(Rule.CAPABILITY, f"gradient {index} and its parameter {tensor.owner} must move together")
            tiers = [{r.tier for r in self._residencies[i] if r.tier is not Tier.DEVICE} for i in (index, tensor.owner)]
            if follows and tiers[0] != tiers[1]:
                refuse(Rule.CAPABILITY, f"gradient {index} must move to the tier of its parameter {tensor.owner}")

    def _check_ranks(self) -> None:
        links: dict[str, list[Transfer]] = defaultdict(list)
        for transfer in self._plan.transfers:
            links[LINK_NAMES[transfer.source, transfer.target]].append(transfer)
        for name, transfers in links.items():
            transfers.sort(key=lambda t: t.rank)
            if [t.rank for t in transfers] != list(range(len(transfers))):
                refuse(Rule.RANK, f"expected the ranks of {name} to be 0 to {len(transfers) - 1}, each once")
            for a, b in itertools.pairwise(transfers):
                if _issue_order(a) > _issue_order(b):
                    refuse(Rule.RANK, f"expected the ranks of {name} in order of issue, got {a} before {b}")


def _issue_order(t: Transfer) -> tuple[int, bool]:
    """Orders by tick; within one, what is awaited at the same tick and does not lead to the device is issued first."""
    return t.issue_at, not (t.target is not Tier.DEVICE and t.issue_at == t.ready_by)


def _service_order(u: HostUpdate) -> tuple[int, bool]:
    return u.issue_at, u.issue_at < u.ready_by
