"""The independent checker of plans. It shares no code with the planner and derives everything from the trace itself.

[Note: rules]
| rule | a plan is refused when |
|---|---|
| digest | it is for another trace, or another number of ops |
| range | an index, a tick or an interval is out of range, or tiers of a transfer make no sense |
| overlap | two residencies of one tensor in one tier share an op |
| required | an op or a hold requires a tensor that is not on the device |
| not_ready | an op uses a tensor whose load is not awaited yet |
| budget | bytes at an op exceed a tier's budget |
| source | the source of a transfer is not resident from `issue_at` to `ready_by` |
| target | the target of a transfer is not resident from `issue_at` on |
| stale_copy | a copy's source is written between issue and ready |
| invalid_copy | a transfer reads a tier that has no valid copy |
| from_nowhere | a residency begins without the tensor's birth and without a transfer into it |
| lost_data | the last valid copy is dropped though it is needed later |
| rank | ranks of a link are no permutation, or do not follow the order of issue |
| capability | the executor cannot do it: tier, wrap, host to NVMe, size, movable, gradient without its parameter |
| peak | `peak_bytes` is not what the residencies add up to |
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import NoReturn

from tieroff.core.plan import Capabilities, Plan, Residency, Transfer
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.trace import Trace
from tieroff.errors import InvalidPlanError
from tieroff.units import format_bytes


def check(plan: Plan, trace: Trace, capabilities: Capabilities | None = None) -> None:
    """Returns when a plan is right for a trace and an executor; see [Note: rules].

    Raises:
        InvalidPlanError: the first rule found broken; `rule` names it.
    """
    _Check(plan, trace, capabilities or Capabilities()).run()


def _fail(rule: str, message: str) -> NoReturn:
    raise InvalidPlanError(f"{rule}: {message}", rule=rule)


class _Check:
    def __init__(self, plan: Plan, trace: Trace, capabilities: Capabilities) -> None:
        self._plan = plan
        self._trace = trace
        self._capabilities = capabilities
        self._n = len(trace.ops)
        self._residencies: dict[int, list[Residency]] = defaultdict(list)
        self._transfers: dict[int, list[Transfer]] = defaultdict(list)

    def run(self) -> None:
        """Applies all rules; those that later ones rely on come first."""
        plan, trace = self._plan, self._trace
        if plan.trace_digest != trace.digest:
            _fail("digest", f"expected a plan for trace {trace.digest}, got one for {plan.trace_digest}")
        if plan.op_count != self._n:
            _fail("digest", f"expected {self._n} ops, got {plan.op_count}")
        for residency in plan.residencies:
            self._check_residency_range(residency)
            self._residencies[residency.tensor].append(residency)
        for transfer in plan.transfers:
            self._check_transfer_range(transfer)
            self._transfers[transfer.tensor].append(transfer)
        self._check_capabilities()
        self._check_ranks()
        uses, required, writes = self._uses()
        for tensor in range(len(trace.tensors)):
            life = _TensorCheck(
                trace, tensor, self._residencies[tensor], self._transfers[tensor], uses[tensor], writes[tensor]
            )
            life.check_cover(required[tensor])
            life.check_transfers()
            life.check_data(required[tensor])
        self._check_bytes()

    def _check_residency_range(self, r: Residency) -> None:
        n = self._n
        if not 0 <= r.tensor < len(self._trace.tensors):
            _fail("range", f"expected a tensor below {len(self._trace.tensors)}, got {r}")
        if not (0 <= r.start < n and r.start < r.stop <= r.start + n):
            _fail("range", f"expected 0 <= start < {n} and start < stop <= start + {n}, got {r}")
        if r.stop > n and not self._trace.tensors[r.tensor].is_persistent:
            _fail("range", f"expected a tensor that is not persistent to end with the step, got {r}")

    def _check_transfer_range(self, t: Transfer) -> None:
        n = self._n
        if not 0 <= t.tensor < len(self._trace.tensors):
            _fail("range", f"expected a tensor below {len(self._trace.tensors)}, got {t}")
        is_end = t.issue_at == t.ready_by == n and t.target is not Tier.DEVICE
        if not (0 <= t.issue_at < n and t.issue_at <= t.ready_by <= t.issue_at + n) and not is_end:
            _fail("range", f"expected 0 <= issue_at < {n} and issue_at <= ready_by <= issue_at + {n}, got {t}")
        if t.source == t.target:
            _fail("range", f"expected two different tiers, got {t}")
        if t.ready_by > n and not self._trace.tensors[t.tensor].is_persistent:
            _fail("range", f"expected a tensor that is not persistent to move within the step, got {t}")

    def _check_capabilities(self) -> None:
        can = self._capabilities
        for r in self._plan.residencies:
            if r.tier is not Tier.DEVICE and r.tier not in can.tiers:
                _fail("capability", f"the executor has no tier {r.tier.value}: {r}")
        for t in self._plan.transfers:
            if Tier.DEVICE not in (t.source, t.target) and not can.moves_host_nvme:
                _fail("capability", f"the executor moves nothing between host and nvme: {t}")
            if t.ready_by > self._n and not can.wraps:
                _fail("capability", f"the executor moves nothing across the end of the step: {t}")
        for index, tensor in enumerate(self._trace.tensors):
            if not self._is_moved(index):
                continue
            if tensor.kind is TensorClass.INPUT or not tensor.is_movable:
                _fail("capability", f"tensor {index} ({tensor.name}) cannot move")
            if tensor.size_bytes < can.min_bytes:
                _fail("capability", f"tensor {index} ({tensor.name}) is below min_bytes and must stay on the device")
            if not can.wraps and tensor.is_persistent:
                for r in self._residencies[index]:
                    if r.tier is Tier.DEVICE and (r.stop > self._n or r.stop - r.start == self._n):
                        _fail("capability", f"tensor {index} is moved and on the device across the step's end: {r}")
        if self._plan.recompute and not can.recompute:
            _fail("capability", "the executor recomputes nothing")
        if can.gradient_follows_parameter:
            self._check_gradients()

    def _is_moved(self, tensor: int) -> bool:
        return bool(self._transfers[tensor]) or any(r.tier is not Tier.DEVICE for r in self._residencies[tensor])

    def _check_gradients(self) -> None:
        """A gradient that can move at all is moved exactly when its parameter is, and to the same tier."""
        busy = self._uses()[1]
        for index, tensor in enumerate(self._trace.tensors):
            if tensor.kind is not TensorClass.GRADIENT or tensor.owner < 0:
                continue
            leaves, follows = self._is_moved(tensor.owner), self._is_moved(index)
            required = busy[index]
            ops = [i for i in range(self._n) if required[i]]
            end = max(ops[-1] + 1, tensor.lives_until) if ops else 0
            is_idle = bool(ops) and (tensor.is_persistent or len(ops) < end - ops[0])
            can_move = tensor.is_movable and tensor.size_bytes >= self._capabilities.min_bytes and is_idle
            if (follows and not leaves) or (leaves and not follows and can_move and len(ops) < self._n):
                _fail("capability", f"gradient {index} and its parameter {tensor.owner} must move together")
            tiers = [{r.tier for r in self._residencies[i] if r.tier is not Tier.DEVICE} for i in (index, tensor.owner)]
            if follows and tiers[0] != tiers[1]:
                _fail("capability", f"gradient {index} must move to the tier of its parameter {tensor.owner}")

    def _check_ranks(self) -> None:
        links: dict[tuple[Tier, Tier], list[Transfer]] = defaultdict(list)
        for transfer in self._plan.transfers:
            links[transfer.source, transfer.target].append(transfer)
        for (source, target), transfers in links.items():
            name = f"{source.value} to {target.value}"
            transfers.sort(key=lambda t: t.rank)
            if [t.rank for t in transfers] != list(range(len(transfers))):
                _fail("rank", f"expected the ranks from {name} to be 0 to {len(transfers) - 1}, each once")
            for a, b in itertools.pairwise(transfers):
                if _issue_order(a) > _issue_order(b):
                    _fail("rank", f"expected ranks from {name} in order of issue, got {a} before {b}")

    def _uses(self) -> tuple[list[list[int]], list[bytearray], list[list[int]]]:
        """Returns, per tensor, the ops that use it, a mask of where it is required, and the ops that write it."""
        uses: list[list[int]] = [[] for _ in self._trace.tensors]
        writes: list[list[int]] = [[] for _ in self._trace.tensors]
        required = [bytearray(self._n) for _ in self._trace.tensors]
        for index, op in enumerate(self._trace.ops):
            for tensor in sorted({*op.reads, *op.writes}):
                uses[tensor].append(index)
                required[tensor][index] = 1
            for tensor in sorted(set(op.writes)):
                writes[tensor].append(index)
        for index, t in enumerate(self._trace.tensors):
            for start, stop in t.holds:
                required[index][start:stop] = b"\x01" * (stop - start)
        return uses, required, writes

    def _check_bytes(self) -> None:
        plan = self._plan
        changes = {tier: [0] * (2 * self._n + 1) for tier in Tier}
        for r in plan.residencies:
            size = self._trace.tensors[r.tensor].size_bytes
            changes[r.tier][r.start] += size
            changes[r.tier][r.stop] -= size
        used: dict[Tier, list[int]] = {}
        for tier in Tier:
            line = list(itertools.accumulate(changes[tier]))
            used[tier] = [line[op] + line[op + self._n] for op in range(self._n)]
        used[Tier.DEVICE] = [
            held + op.transient_bytes for held, op in zip(used[Tier.DEVICE], self._trace.ops, strict=True)
        ]
        for tier in Tier:
            peak = max(used[tier], default=0)
            limit = plan.budget_bytes.get(tier, 0)
            if peak > limit:
                op = used[tier].index(peak)
                _fail(
                    "budget",
                    f"{tier.value} holds {format_bytes(peak)} at op {op} ({self._trace.ops[op].name}), "
                    f"over its budget of {format_bytes(limit)}",
                )
            if plan.peak_bytes.get(tier, 0) != peak:
                _fail("peak", f"expected peak_bytes of {tier.value} to be {peak}, got {plan.peak_bytes.get(tier, 0)}")


def _issue_order(t: Transfer) -> tuple[int, bool]:
    """Orders by tick; within one, copies out that are awaited at the same tick are issued first."""
    return t.issue_at, not (t.target is not Tier.DEVICE and t.issue_at == t.ready_by)


# Order of events at a tick; data moves in this order. Ops come last.
_READY_OUT, _END, _BEGIN, _ISSUE, _READY_IN, _OP = range(6)


class _TensorCheck:
    """The rules that concern one tensor alone."""

    def __init__(
        self,
        trace: Trace,
        tensor: int,
        residencies: list[Residency],
        transfers: list[Transfer],
        uses: list[int],
        writes: list[int],
    ) -> None:
        self._n = len(trace.ops)
        self._is_persistent = trace.tensors[tensor].is_persistent
        self._lives_until = trace.tensors[tensor].lives_until
        self._residencies = residencies
        self._transfers = transfers
        self._uses = uses
        self._writes = set(writes)
        self._name = f"tensor {tensor} ({trace.tensors[tensor].name})"

    def check_cover(self, required: bytearray) -> None:
        """Rules overlap and required."""
        masks = {tier: bytearray(self._n) for tier in Tier}
        for r in self._residencies:
            mask = masks[r.tier]
            for start, stop in ((r.start, min(r.stop, self._n)), (0, max(0, r.stop - self._n))):
                if any(mask[start:stop]):
                    _fail("overlap", f"{self._name} has two residencies in {r.tier.value} that overlap, one is {r}")
                mask[start:stop] = b"\x01" * (stop - start)
        if not self._residencies:
            _fail("required", f"{self._name} has no residency at all")
        missing = int.from_bytes(required, "little") & ~int.from_bytes(masks[Tier.DEVICE], "little")
        if missing:
            op = ((missing & -missing).bit_length() - 1) // 8
            _fail("required", f"{self._name} is required at op {op} and is not on the device")

    def check_transfers(self) -> None:
        """Rules source, target and from_nowhere."""
        for t in self._transfers:
            if not any(self._holds(r, t.source, t.issue_at, t.ready_by) for r in self._residencies):
                _fail("source", f"{self._name} is not in {t.source.value} from issue to ready: {t}")
            if not any(self._holds_start(r, t) for r in self._residencies):
                _fail("target", f"{self._name} is not in {t.target.value} from the issue on: {t}")
        for r in self._residencies:
            is_whole = self._is_persistent and r.stop - r.start == self._n
            if is_whole and (r.tier is Tier.DEVICE or self._transfers):
                continue
            if not self._is_persistent and r.tier is Tier.DEVICE and r.start == self._birth():
                continue
            if not any(t.target is r.tier and self._holds_start(r, t) for t in self._transfers):
                _fail("from_nowhere", f"{self._name} has neither birth nor transfer at the start of {r}")

    def _birth(self) -> int:
        return min((r.start for r in self._residencies if r.tier is Tier.DEVICE), default=0)

    def _holds(self, r: Residency, tier: Tier, start: int, stop: int) -> bool:
        """True when a residency covers the events from tick `start` to tick `stop`, in the ring."""
        if r.tier is not tier:
            return False
        is_whole = self._is_persistent and r.stop - r.start == self._n
        return is_whole or any(
            r.start <= start + shift and stop + shift <= r.stop and start + shift <= r.stop for shift in (0, self._n)
        )

    def _holds_start(self, r: Residency, t: Transfer) -> bool:
        if r.tier is not t.target:
            return False
        is_whole = self._is_persistent and r.stop - r.start == self._n
        reach = max(t.ready_by, t.issue_at + 1) if t.target is Tier.DEVICE else t.ready_by
        return is_whole or any(
            r.start <= t.issue_at + shift < r.stop and reach + shift <= max(r.stop, r.start + 1)
            for shift in (0, self._n)
        )

    def check_data(self, required: bytearray) -> None:
        """Rules not_ready, stale_copy, invalid_copy and lost_data: versions of the data are followed event by event.

        A persistent tensor is followed for two steps: the first begins with valid data in every tier in which it is
        resident at the step's start, the second with what the first left.
        """
        steps = 2 if self._is_persistent else 1
        last_need = max((i for i in range(self._n) if required[i]), default=0)
        last_need = max(last_need, self._lives_until - 1)
        state = _Versions(self._name, self._is_persistent, last_need, self._n)
        for r in self._residencies:
            if self._is_persistent and (r.stop > self._n or r.stop - r.start == self._n):
                state.valid[r.tier] = 0
        for _, kind, item in sorted(self._events(steps), key=lambda e: e[0]):
            state.apply(kind, item)

    def _events(self, steps: int) -> list[tuple[tuple[int, int, int], int, object]]:
        events: list[tuple[tuple[int, int, int], int, object]] = []
        for step in range(steps):
            base = step * self._n
            for r in self._residencies:
                if self._is_persistent and r.stop - r.start == self._n:
                    continue
                events.append(((base + r.start, _BEGIN, 0), _BEGIN, (r, base + r.start)))
                events.append(((base + r.stop, _END, 0), _END, (r, base + r.stop)))
                if r.stop > self._n and step == 0:
                    events.append(((r.stop - self._n, _END, 0), _END, (r, r.stop - self._n)))
            for t in self._transfers:
                is_out = t.target is not Tier.DEVICE
                ready = _READY_OUT if is_out else _READY_IN
                is_first = is_out and t.issue_at == t.ready_by
                issue = (base + t.issue_at, _READY_OUT if is_first else _ISSUE, 0)
                job = (t, base)
                events.append((issue, _ISSUE, job))
                events.append(((base + t.ready_by, ready, 1), ready, job))
                if t.ready_by > self._n and step == 0:
                    events.append(((t.ready_by - self._n, ready, 1), ready, (t, -self._n)))
            events += [((base + op, _OP, 0), _OP, (base + op, op in self._writes)) for op in self._uses]
        limit = steps * self._n
        return [e for e in events if e[0][0] <= limit]


class _Versions:
    """Which version of the data each tier holds; absent: not resident; None: no valid data yet."""

    def __init__(self, name: str, is_persistent: bool, last_need: int, op_count: int) -> None:
        self._name = name
        self._is_persistent = is_persistent
        self._last_need = last_need
        self._n = op_count
        self._current = 0
        self._in_flight: dict[tuple[Transfer, int], int] = {}
        self.valid: dict[Tier, int | None] = {}

    def apply(self, kind: int, item: object) -> None:
        """Applies one event of `_TensorCheck._events`."""
        match kind, item:
            case 0 | 4, (Transfer() as t, int(base)):
                self._ready(t, base)
            case 1, (Residency() as r, int(tick)):
                self._end(r, tick)
            case 2, (Residency() as r, int(tick)):
                self._begin(r)
            case 3, (Transfer() as t, int(base)):
                self._issue(t, base)
            case 5, (int(op), bool(writes)):
                self._run_op(op, writes)

    def _begin(self, r: Residency) -> None:
        is_birth = not self._is_persistent and r.tier is Tier.DEVICE and not self.valid
        self.valid.setdefault(r.tier, self._current if is_birth else None)

    def _issue(self, t: Transfer, base: int) -> None:
        if self.valid.get(t.source) != self._current:
            _fail("invalid_copy", f"{self._name} has no valid copy in {t.source.value} when this is issued: {t}")
        self._in_flight[t, base] = self._current

    def _ready(self, t: Transfer, base: int) -> None:
        version = self._in_flight.pop((t, base), None)
        if version is None:  # issued in the step before the first
            version = self._current
        if version != self._current:
            _fail("stale_copy", f"{self._name} is written while this copies it: {t}")
        self.valid[t.target] = version

    def _run_op(self, op: int, writes: bool) -> None:
        if self.valid.get(Tier.DEVICE) != self._current:
            _fail("not_ready", f"{self._name} is used at op {op % self._n} and its data is not on the device yet")
        if writes:
            self._current += 1
            self.valid[Tier.DEVICE] = self._current

    def _end(self, r: Residency, tick: int) -> None:
        version = self.valid.pop(r.tier, None)
        is_needed = self._is_persistent or tick <= self._last_need
        is_last = all(other != self._current for other in self.valid.values())
        if version == self._current and is_needed and is_last:
            _fail("lost_data", f"{self._name} has no other valid copy when this ends: {r}")
