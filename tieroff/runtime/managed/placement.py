"""Placement: where the tensors of a model lie between two steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from tieroff.core.tensor import TensorClass, Tier, allocated_bytes
from tieroff.runtime.executor import Executor
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.table import ResidentSnapshot, bytes_elsewhere, is_leaving, leave_place, lies_in
from tieroff.runtime.step.kinds import Planned, Recording, StepKind


class Placement:
    """Puts parameters, optimizer state and kept gradients where the next step's plan has them as it begins.

    Args:
        executor: has the items, and moves them.
        allocator_threshold_bytes: see `Settings`.
    """

    def __init__(self, executor: Executor, allocator_threshold_bytes: int | None) -> None:
        self._executor, self._backend = executor, executor.traffic.backend
        self._allocator_threshold_bytes = allocator_threshold_bytes
        self._snapshot = ResidentSnapshot(())

    def forget(self) -> None:
        """Everything was given back."""
        self._snapshot = ResidentSnapshot(())

    def place_for(self, kind: StepKind, *, is_looked_at: bool = False) -> None:
        """Puts parameters and optimizer state where the plan of this kind of step has them between steps.

        Those that go to files move first and those that go to host memory last, so that host memory is free by then; sooner
        where the device needs their room. Gradients that were kept come up where nothing moves: what backward adds to them
        then passes no hook of ours. Those that another kind's plan left on the device go where this one has them.

        Args:
            kind: of the step that begins.
            is_looked_at: whether they are as the engine left them was asked, and nobody but the engine ran since.
        """
        homes, traffic = self._executor.homes, self._executor.traffic
        traffic.spill.fills_in_order = not isinstance(kind.stage, Planned)
        is_same = isinstance(kind.stage, Planned) and self._executor.runner.follows(kind.stage)
        kept = homes.gradients.values() if kind.moves_nothing or not is_same else ()
        below: Iterable[HomeItem] = chain(homes.parameters.values(), homes.states.values())
        if is_same:
            below = self.not_resident(is_looked_at=is_looked_at)  # few: the step before left most where they are to be
        items = chain(below, kept)
        between = _TiersBetweenSteps(kind)
        targets = [
            (item, tier) for item in items if not lies_in(item, tier := between.of(item)) and not between.is_on_its_way(item)
        ]
        for item, tier in targets:
            if tier is Tier.NVME:
                self._send_below(item, tier)
        to_host = [item for item, tier in targets if tier is Tier.HOST]
        for item, tier in targets:
            if tier is None and item.tensor is not None:
                self._make_room(item, to_host, kind)
                item.refresh(traffic)
                item.lift(traffic)
                leave_place(item, traffic)
        for item in to_host:
            self._send_below(item, Tier.HOST)
        # Memory that need not leave the process when it is freed need not be zeroed when it is wanted again.
        self._backend.tune_allocator(None if kind.moves_nothing else self._allocator_threshold_bytes)

    def _make_room(self, item: HomeItem, to_host: list[HomeItem], kind: StepKind) -> None:
        """Sends what goes to host memory while an item that comes up does not fit beside it, and host memory has room."""
        traffic, stage = self._executor.traffic, kind.stage
        store = traffic.stores.get(Tier.HOST)
        budget_bytes = stage.plan.budget_bytes.get(Tier.DEVICE) if isinstance(stage, Planned) else None
        if store is None or budget_bytes is None:
            return
        needed_bytes = allocated_bytes(item.size_bytes, self._backend.device.type)
        while to_host and traffic.device_bytes + needed_bytes > budget_bytes:
            if store.capacity_bytes - store.used_bytes < to_host[-1].size_bytes:
                return
            self._send_below(to_host.pop(), Tier.HOST)

    def keep_freed(self, kind: StepKind) -> None:
        """Lets the backend keep freed memory for reuse in the step that begins, up to the step's peak or the budget."""
        limit_bytes = self._executor.on_demand.room_bytes
        if isinstance(kind.stage, Recording):
            limit_bytes = 0  # an op's scratch memory shows in what the process takes from the system
        elif isinstance(kind.stage, Planned) and self._backend.device.type == "cpu":  # else nobody uses the limit
            scratch_bytes = kind.stage.recorded.scratch_bytes
            limit_bytes = kind.stage.plan.peak_bytes[Tier.DEVICE] - self._bytes_elsewhere(kind.stage) - scratch_bytes
        self._backend.keep_freed(max(limit_bytes, 0))

    def _bytes_elsewhere(self, planned: Planned) -> int:
        """Returns the bytes that lie on the device in memory which the backend did not give, right after `place_for`."""
        gave, homes, snapshot = self._backend.gave, self._executor.homes, self._snapshot
        if snapshot.plan is not planned:
            return bytes_elsewhere(homes, gave)
        return snapshot.bytes_elsewhere(gave) + bytes_elsewhere(chain(snapshot.others, homes.gradients.values()), gave)

    def _send_below(self, item: HomeItem, tier: Tier) -> None:
        if item.tensor is None:
            return
        if item.tier is not tier:
            item.refresh(self._executor.traffic)
            item.lift(self._executor.traffic)
            leave_place(item, self._executor.traffic)
            item.tier = tier
        item.leave(self._executor.traffic)

    def not_resident(self, *, is_looked_at: bool = False) -> list[HomeItem]:
        """Returns the parameters and optimizer state that the plan moves, or that are not where it has them all the time."""
        items = (*self._executor.homes.parameters.values(), *self._executor.homes.states.values())
        plan = self._executor.runner.planned
        if not self._snapshot.is_of(items, plan) or not (is_looked_at or self._snapshot.holds()):
            self._snapshot = ResidentSnapshot(items, plan)
        return self._snapshot.others


class _TiersBetweenSteps:
    """Where the items of a model lie at the start of a step."""

    def __init__(self, kind: StepKind) -> None:
        stage = kind.stage if isinstance(kind.stage, Planned) else None
        self._stage = stage
        if stage is not None:
            self._index, self._tiers = stage.recorded.index, stage.executable.tiers
            self._late = stage.executable.late
            self._moves_nothing, self._is_updated = stage.plan.moves_nothing, stage.recorded.is_updated

    def is_on_its_way(self, item: HomeItem) -> bool:
        """True for an item that leaves where the plan wants it, and only in the course of the step."""
        if self._stage is None or not self._late:
            return False
        index = self._index.get(item.key, -1)
        return index in self._late and item.tier is self._tiers[index] and is_leaving(item)

    def of(self, item: HomeItem) -> Tier | None:
        """Returns the lower tier of an item, or None for the device."""
        if self._stage is None or item.is_sliced:
            return item.tier
        index = self._index.get(item.key, -1)
        if index < 0 and item.kind is TensorClass.OPTIMIZER and not self._is_updated:
            return item.tier  # the plan has no room for it, and no op of the step uses it
        if self._moves_nothing or (index >= 0 and index not in self._tiers):
            return None
        return self._tiers.get(index, item.tier)
