"""What the checker accepts is true: plans are carried out byte by byte, with transfers at the worst moments.

The interpreter here knows no versions and no rules. It holds bytes in tiers, runs every op on what lies on the device,
and compares with a plain run of the same ops. A transfer or an update on the host may read and write each byte at its
issue or at its await; memory that is not held reads as nonsense, and nothing may be written there.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from dataclasses import replace
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieroff.core.check.plan import check
from tieroff.core.machine import LINK_NAMES
from tieroff.core.plan import IDEAL_EXECUTOR, HostUpdate, Plan, Repeat, Residency, Transfer
from tieroff.core.schedule import Tick, make_schedule
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import InvalidPlanError

DEVICE, HOST, NVME = Tier.DEVICE, Tier.HOST, Tier.NVME
ROUNDS = 3
NONSENSE = "nonsense"
Place = tuple[int, Tier, int]


class Wrong(Exception):
    """An accepted plan gave another result than the plain run."""


Item = TypeVar("Item", Residency, Transfer)


class Interpreter:
    """Carries out a plan for some rounds."""

    def __init__(self, plan: Plan, ring: Trace, rng: random.Random) -> None:
        self.plan, self.ring, self.rng = plan, ring, rng
        self.n = len(ring.ops)
        self.order = [*range(self.n)] * ROUNDS
        self.reads, self.writes, self.left = self.plain_run()
        self.memory: dict[Place, object] = {}
        self.fresh: set[Place] = set()
        self.late: dict[object, deque[list[tuple[Place, Place, str, object]]]] = defaultdict(deque)
        self.updates: dict[HostUpdate, deque[tuple[int, str]]] = defaultdict(deque)
        self.moment_of: dict[int, int] = {}
        for r in plan.residencies:
            if r.stop > self.n or r.stop - r.start == self.n:
                value = f"first {r.tensor}" if ring.tensors[r.tensor].is_persistent else NONSENSE
                self.memory.update(dict.fromkeys(self.places(r, r.tier), value))

    def plain_run(self) -> tuple[list[dict[int, object]], list[dict[int, object]], list[dict[int, object]]]:
        """Returns, per moment, what its op reads and writes, and all values that it leaves."""
        values: dict[int, object] = {i: f"first {i}" for i in range(len(self.ring.tensors))}
        reads: list[dict[int, object]] = []
        writes: list[dict[int, object]] = []
        left: list[dict[int, object]] = []
        for moment, index in enumerate(self.order):
            op = self.ring.ops[index]
            reads.append({t: values[t] for t in op.reads})
            writes.append({t: hash((moment, t, tuple(values[r] for r in op.reads))) for t in op.writes})
            values.update(writes[-1])
            left.append(dict(values))
        return reads, writes, left

    def places(self, item: Residency | Transfer, tier: Tier) -> list[Place]:
        stop = item.stop_byte or self.ring.tensors[item.tensor].size_bytes
        return [(item.tensor, tier, b) for b in range(item.first_byte, stop)]

    def put(self, place: Place, value: object) -> None:
        if place not in self.memory:
            raise Wrong(f"{place} is written and not held")
        self.memory[place] = value

    def run(self) -> None:
        ticks = make_schedule(self.plan).ticks
        begins_at = defaultdict(list)
        for tick in ticks:
            for r in tick.begins:
                begins_at[r.start].append(r)
        begins_at[self.n] = begins_at[0]
        before = -1
        for moment, index in enumerate(self.order):
            if before >= 0 or index:
                self.close(before + 1, ticks, begins_at)
            if index == 0 and before in (-1, self.n - 1):
                self.check_kept(moment)
                self.close(0, ticks, begins_at)
            self.moment_of[index] = moment
            self.open(index, ticks)
            before = index
            if all(u.op != index for u in self.plan.host_updates):
                self.run_op(index, moment)

    def close(self, index: int, ticks: tuple[Tick, ...], begins_at: dict[int, list[Residency]]) -> None:
        """The first two parts of a tick. A copy that is awaited at once may lead to what begins only now."""
        tick = ticks[index]
        starting = {p for r in begins_at[index] for p in self.places(r, r.tier)} - self.memory.keys()
        self.memory.update(dict.fromkeys(starting, NONSENSE))
        for t in tick.issue_first:
            self.issue(t)
        for u in tick.update_first:
            self.issue_update(u)
        for t in tick.await_outs:
            self.finish(t)
        for u in tick.await_updates:
            self.finish_update(u)
        self.fresh |= {p for p in starting if self.memory[p] is not NONSENSE}
        for p in starting:
            if p not in self.fresh:
                del self.memory[p]
        for r in tick.ends:
            for p in self.places(r, r.tier):
                self.memory.pop(p, None)
                self.fresh.discard(p)
        for t in tick.await_ins if index == self.n else ():
            self.finish(t)

    def open(self, index: int, ticks: tuple[Tick, ...]) -> None:
        tick = ticks[index]
        for r in tick.begins:
            for p in self.places(r, r.tier):
                if p not in self.fresh:
                    self.memory[p] = NONSENSE
        self.fresh.clear()
        for t in tick.issues:
            self.issue(t)
        for u in tick.updates:
            self.issue_update(u)
        for t in tick.await_ins:
            self.finish(t)
        for repeat in tick.repeats:
            self.run_repeat(repeat)

    def issue(self, t: Transfer) -> None:
        job = []
        for source, target in zip(self.places(t, t.source), self.places(t, t.target), strict=True):
            when = self.rng.choice(("now", "torn", "late"))
            value = self.memory.get(source, NONSENSE)
            if when == "now":
                self.put(target, value)
            job.append((source, target, when, value))
        self.late[t].append(job)

    def finish(self, t: Transfer) -> None:
        if not self.late[t]:
            return  # issued in the round before the first
        for source, target, when, value in self.late[t].popleft():
            if when == "torn":
                self.put(target, value)
            elif when == "late":
                self.put(target, self.memory.get(source, NONSENSE))

    def run_op(self, index: int, moment: int, tier: Tier = DEVICE) -> None:
        self.read(index, moment, tier)
        self.write(index, moment, tier)

    def read(self, index: int, moment: int, tier: Tier) -> None:
        for tensor, value in self.reads[moment].items():
            for b in range(self.ring.tensors[tensor].size_bytes):
                found = self.memory.get((tensor, tier, b), NONSENSE)
                if found != value:
                    raise Wrong(f"op {index} at {moment} reads {found} for {value} in {tier}, tensor {tensor} byte {b}")

    def write(self, index: int, moment: int, tier: Tier) -> None:
        for tensor, value in self.writes[moment].items():
            for b in range(self.ring.tensors[tensor].size_bytes):
                self.put((tensor, tier, b), value)

    def run_repeat(self, repeat: Repeat) -> None:
        self.run_op(repeat.op, self.moment_of[repeat.op])

    def issue_update(self, u: HostUpdate) -> None:
        when = self.rng.choice(("now", "torn", "late"))
        moment = self.moment_of.get(u.op, -1)
        if u.issue_at == u.op and u.issue_at == u.ready_by:  # the clock has not opened this op yet
            moment = next(m for m in range(moment + 1, len(self.order)) if self.order[m] == u.op)
        if when != "late":
            self.read(u.op, moment, HOST)
        if when == "now":
            self.write(u.op, moment, HOST)
        self.updates[u].append((moment, when))

    def finish_update(self, u: HostUpdate) -> None:
        if not self.updates[u]:
            return
        moment, when = self.updates[u].popleft()
        if when == "late":
            self.read(u.op, moment, HOST)
        if when != "now":
            self.write(u.op, moment, HOST)

    def check_kept(self, moment: int) -> None:
        """Every byte of a persistent tensor is somewhere as the plain run left it, unless it is being updated."""
        busy = {t for u, jobs in self.updates.items() if jobs for t in self.ring.ops[u.op].writes}
        for tensor, t in enumerate(self.ring.tensors):
            if not t.is_persistent or tensor in busy or not moment:
                continue
            for b in range(t.size_bytes):
                value = self.left[moment - 1][tensor]
                if all(self.memory.get((tensor, tier, b), NONSENSE) != value for tier in Tier):
                    raise Wrong(f"byte {b} of tensor {tensor} is lost before {moment}")


def random_trace(rng: random.Random) -> Trace:
    """Returns a trace of 3 to 7 ops; what is not persistent is written before it is read."""
    n = rng.randint(3, 7)
    reads: list[set[int]] = [set() for _ in range(n)]
    writes: list[set[int]] = [set() for _ in range(n)]
    tensors = []
    for index in range(rng.randint(1, 4)):
        is_persistent = rng.random() < 0.5
        uses = sorted(rng.sample(range(n), rng.randint(1, min(4, n))))
        for position, op in enumerate(uses):
            if not is_persistent and position == 0:
                writes[op].add(index)
                continue
            reads[op].add(index)
            if rng.random() < 0.3:
                writes[op].add(index)
                if rng.random() < 0.5:
                    reads[op].discard(index)
        kind = TensorClass.PARAMETER if is_persistent else TensorClass.ACTIVATION
        tensors.append(Tensor(f"t{index}", rng.choice((1, 2, 3)), kind, is_persistent=is_persistent))
    optimizer = rng.randint(1, n)
    ops = [
        Op(f"op{i}", 1, tuple(sorted(reads[i])), tuple(sorted(writes[i])), phase="optimizer" if i >= optimizer else "")
        for i in range(n)
    ]
    return Trace(tuple(ops), tuple(tensors))


def settle(plan: Plan, ring: Trace) -> Plan:
    """Returns the plan with ranks in order of issue and its true peaks."""
    links: dict[str, list[Transfer]] = defaultdict(list)
    for t in plan.transfers:
        links[LINK_NAMES.get((t.source, t.target), "")].append(t)
    ranked = []
    for own in links.values():
        own.sort(key=lambda t: (t.issue_at, t.target is DEVICE or t.issue_at < t.ready_by))
        ranked += [replace(t, rank=rank) for rank, t in enumerate(own)]
    used: Counter[tuple[Tier, int]] = Counter()
    for r in plan.residencies:
        size = ring.tensors[r.tensor].part_bytes(r.first_byte, r.stop_byte)
        for op in range(r.start, r.stop):
            used[r.tier, op % len(ring.ops)] += size
    peaks = {tier: max(used[tier, op] for op in range(len(ring.ops))) for tier in Tier}
    return replace(plan, transfers=tuple(ranked), peak_bytes=peaks)


def start_plan(trace: Trace) -> Plan:
    """Returns the plan that moves nothing."""
    n = len(trace.ops)
    held = []
    for index, t in enumerate(trace.tensors):
        uses = [i for i, op in enumerate(trace.ops) if index in op.reads + op.writes]
        span = (0, n) if t.is_persistent or not uses else (uses[0], uses[-1] + 1)
        held.append(Residency(index, DEVICE, *span))
    budget = dict.fromkeys(Tier, 1 << 40)
    return settle(Plan("random", trace.digest, n, budget, {}, tuple(held), ()), trace)


class Editor:
    """Random edits of a plan; most of them spoil it, and some make another good one."""

    def __init__(self, ring: Trace, rng: random.Random) -> None:
        self.ring, self.rng = ring, rng
        self.n = len(ring.ops)

    def edit(self, plan: Plan) -> Plan:
        edits = (self.send_away, self.send_away, self.nudge, self.drop, self.repeat, self.update, self.copy, self.cut)
        return settle(self.rng.choice((*edits, self.wrap))(plan), self.ring)

    def window(self) -> tuple[int, int]:
        start = self.rng.randrange(self.n)
        return start, start + self.rng.choice((0, 1, 1, 2, 3, self.n))

    def send_away(self, plan: Plan) -> Plan:
        """Takes ops out of a residency on the device; a copy out and a load, or a repeat, bridge them."""
        device = [r for r in plan.residencies if r.tier is DEVICE]
        if not device:
            return plan
        r = self.rng.choice(device)
        a, b = sorted(self.rng.sample(range(r.start, r.stop + 1), 2)) if r.stop - r.start > 1 else (r.start, r.stop)
        tier = self.rng.choice((HOST, NVME))
        part = {"first_byte": r.first_byte, "stop_byte": r.stop_byte}
        kept = [x for x in plan.residencies if x != r]
        if r.stop - r.start == self.n and self.ring.tensors[r.tensor].is_persistent:
            kept.append(self.ringed(replace(r, start=b, stop=a + self.n)))
        else:
            kept += [replace(r, stop=a)] * (a > r.start) + [self.ringed(replace(r, start=b))] * (b < r.stop)
        ready = b + self.rng.choice((0, 0, 1, 2))
        if self.ring.tensors[r.tensor].is_persistent and a < self.n and self.rng.random() < 0.3:
            b, ready = self.rng.randint(a, self.n - 1), self.n + 1  # back across the end of the ring
        out_at = max(a - self.rng.choice((0, 0, 1, 2)), 0)
        if self.rng.random() < 0.5 or not self.ring.tensors[r.tensor].is_persistent:
            until = min(ready + 1, self.n) if not self.ring.tensors[r.tensor].is_persistent else ready + 1
            below = self.ringed(Residency(r.tensor, tier, out_at, max(until, out_at + 1), **part))
        else:
            below = Residency(r.tensor, tier, 0, self.n, **part)
        moves = [Transfer(r.tensor, DEVICE, tier, *self.fold(out_at, a), 0, **part)] * (self.rng.random() < 0.8)
        moves += [Transfer(r.tensor, tier, DEVICE, *self.fold(b, ready), 0, **part)] * (self.rng.random() < 0.9)
        held = (*kept, below) if below not in kept else tuple(kept)
        return replace(plan, residencies=tuple(held), transfers=(*plan.transfers, *moves))

    def wrap(self, plan: Plan) -> Plan:
        """Has a persistent tensor come back while the step ends: its load is awaited in the next step."""
        tensor = self.rng.randrange(len(self.ring.tensors))
        uses = [i for i, op in enumerate(self.ring.ops) if tensor in op.reads + op.writes]
        if not self.ring.tensors[tensor].is_persistent or not uses or uses[0] < 1 or uses[-1] + 1 >= self.n:
            return plan
        release, tier = uses[-1] + 1, self.rng.choice((HOST, NVME))
        load = self.rng.randint(release, self.n - 1)
        back = Transfer(tensor, tier, DEVICE, load, self.n + self.rng.randint(1, uses[0] + 1), 0)
        out = Transfer(tensor, DEVICE, tier, release, release, 0)
        held = [r for r in plan.residencies if r.tensor != tensor]
        held += [Residency(tensor, DEVICE, load, release + self.n), Residency(tensor, tier, 0, self.n)]
        moves = [t for t in plan.transfers if t.tensor != tensor]
        return replace(plan, residencies=tuple(held), transfers=(*moves, out, back))

    def ringed(self, r: Residency) -> Residency:
        shift = r.start // self.n * self.n
        return replace(r, start=r.start - shift, stop=r.stop - shift)

    def fold(self, issue: int, ready: int) -> tuple[int, int]:
        if issue == ready == self.n and self.rng.random() < 0.7:
            return issue, ready
        shift = issue // self.n * self.n
        return issue - shift, ready - shift

    def nudge(self, plan: Plan) -> Plan:
        """Moves one tick of one item."""
        by = self.rng.choice((-2, -1, -1, 1, 1, 2))
        if plan.transfers and self.rng.random() < 0.6:
            t = self.rng.choice(plan.transfers)
            key = self.rng.choice(("issue_at", "ready_by"))
            moved = tuple(replace(x, **{key: getattr(x, key) + by}) if x == t else x for x in plan.transfers)
            return replace(plan, transfers=moved)
        if plan.host_updates and self.rng.random() < 0.6:
            u = self.rng.choice(plan.host_updates)
            key = self.rng.choice(("issue_at", "ready_by"))
            updates = tuple(replace(x, **{key: getattr(x, key) + by}) if x == u else x for x in plan.host_updates)
            return replace(plan, host_updates=updates)
        if not plan.residencies:
            return plan
        r = self.rng.choice(plan.residencies)
        key = self.rng.choice(("start", "stop"))
        held = tuple(self.ringed(replace(x, **{key: getattr(x, key) + by})) if x == r else x for x in plan.residencies)
        return replace(plan, residencies=held)

    def drop(self, plan: Plan) -> Plan:
        """Takes out a transfer or a residency."""
        if plan.transfers and self.rng.random() < 0.7:
            t = self.rng.choice(plan.transfers)
            return replace(plan, transfers=tuple(x for x in plan.transfers if x != t))
        if not plan.residencies:
            return plan
        r = self.rng.choice(plan.residencies)
        return replace(plan, residencies=tuple(x for x in plan.residencies if x != r))

    def repeat(self, plan: Plan) -> Plan:
        """Runs an op again, and gives what it writes a gap on the device that ends with it."""
        op = self.rng.randrange(self.n - 1)
        at = self.rng.randrange(op + 1, self.n)
        held: list[Residency] = []
        for r in plan.residencies:
            if r.tensor in self.ring.ops[op].writes and r.tier is DEVICE and r.start <= op < r.stop and self.rng.random() < 0.9:
                gone = self.rng.randint(op + 1, at)
                held.append(replace(r, stop=min(r.stop, gone)))
                if at < r.stop or gone <= at:
                    held.append(replace(r, start=at, stop=max(r.stop, at + 1)))
            else:
                held.append(r)
        return replace(plan, residencies=tuple(held), repeats=(*plan.repeats, Repeat(op, at)))

    def update(self, plan: Plan) -> Plan:
        """Lets the host run an op of the optimizer, mostly with all that it touches in host memory."""
        ops = [i for i, op in enumerate(self.ring.ops) if op.phase == "optimizer"]
        if not ops:
            return plan
        op = self.rng.choice(ops)
        issue = op + self.rng.choice((0, 0, 1, 2))
        u = HostUpdate(op, issue, issue + self.rng.choice((0, 1, 2, 3)), 1)
        held, moves = list(plan.residencies), list(plan.transfers)
        for tensor in {*self.ring.ops[op].reads, *self.ring.ops[op].writes}:
            if self.rng.random() < 0.1 or not self.ring.tensors[tensor].is_persistent:
                continue
            held = [r for r in held if r.tensor != tensor] + [Residency(tensor, HOST, 0, self.n)]
            moves = [t for t in moves if t.tensor != tensor]
            for use, other in enumerate(self.ring.ops):
                if tensor in other.reads + other.writes and use != op:
                    held.append(Residency(tensor, DEVICE, use, use + 1))
                    moves.append(Transfer(tensor, HOST, DEVICE, use, use, 0))
                    if tensor in other.writes:
                        moves.append(Transfer(tensor, DEVICE, HOST, use + 1, use + 1, 0))
        return replace(plan, residencies=tuple(held), transfers=tuple(moves), host_updates=(*plan.host_updates, u))

    def copy(self, plan: Plan) -> Plan:
        """Gives a tensor that is below a second copy there, or moves the one it has."""
        below = [r for r in plan.residencies if r.tier is not DEVICE]
        if not below:
            return plan
        r = self.rng.choice(below)
        other = NVME if r.tier is HOST else HOST
        at = self.rng.randint(r.start, max(r.stop - 1, r.start))
        ready = at + self.rng.choice((0, 1, 2))
        start, end = self.fold(at, ready)
        part = {"first_byte": r.first_byte, "stop_byte": r.stop_byte}
        new = self.ringed(replace(r, tier=other, start=at, stop=max(r.stop, at + 1)))
        moved = [Transfer(r.tensor, r.tier, other, start, end, 0, **part)]
        held, moves = list(plan.residencies), list(plan.transfers)
        if self.rng.random() < 0.6 and ready > r.start and r.stop - r.start < self.n:
            held = [replace(x, stop=ready) if x == r else x for x in held]
            moves = [replace(t, source=other) if (t.tensor, t.source) == (r.tensor, r.tier) else t for t in moves]
        return replace(plan, residencies=(*held, new), transfers=(*moves, *moved))

    def cut(self, plan: Plan) -> Plan:
        """Cuts every item of a tensor in two."""
        tensor = self.rng.randrange(len(self.ring.tensors))
        size = self.ring.tensors[tensor].size_bytes
        if size == 1:
            return plan
        at = self.rng.randrange(1, size)

        def parts(item: Item) -> list[Item]:
            if item.tensor != tensor or not item.first_byte < at < (item.stop_byte or size):
                return [item]
            return [replace(item, stop_byte=at), replace(item, first_byte=at)]

        held = tuple(x for r in plan.residencies for x in parts(r))
        return replace(plan, residencies=held, transfers=tuple(x for t in plan.transfers for x in parts(t)))


def features(plan: Plan) -> set[str]:
    """Returns what a plan makes use of."""
    found = {f"{t.source.value} to {t.target.value}" for t in plan.transfers}
    wraps = any(t.ready_by > plan.op_count for t in plan.transfers)
    pairs = {
        "repeat": plan.repeats,
        "host update": plan.host_updates,
        "update across the end": [u for u in plan.host_updates if u.ready_by > plan.op_count],
        "wrap": wraps,
        "part": [t for t in plan.transfers if t.first_byte],
    }
    return found | {name for name, value in pairs.items() if value}


def walk(seed: int, edits: int) -> Counter[str]:
    """Edits a plan at random; every one that the checker accepts is carried out. Returns how often each feature was."""
    rng = random.Random(seed)
    trace = random_trace(rng)
    good = plan = start_plan(trace)
    editor = Editor(trace, rng)
    seen: Counter[str] = Counter()
    for _ in range(edits):
        plan = editor.edit(plan)
        try:
            check(plan, trace, IDEAL_EXECUTOR)
        except InvalidPlanError:
            if rng.random() < 0.4:
                plan = good
            continue
        good = plan
        try:
            Interpreter(plan, trace, rng).run()
        except Wrong as wrong:
            pytest.fail(f"{wrong}\n{plan}\n{trace}")
        seen.update(features(plan))
    return seen


def test_walks_reach_every_feature() -> None:
    seen = sum((walk(seed, 60) for seed in range(60)), Counter())
    tiers = [tier.value for tier in Tier]
    links = {f"{a} to {b}" for a in tiers for b in tiers if a != b}
    names = {"repeat", "host update", "update across the end", "wrap", "part"}
    assert set(seen) == links | names


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_accepted_plans_give_the_results_of_the_plain_run(seed: int) -> None:
    walk(seed, 60)
