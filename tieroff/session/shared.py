"""A budget that several models share: one device budget, one host pool, one drive.

[Note: parts]
Every model has a part of the device budget, so that no step has to know what another model holds at the same moment. What
a model needs is known when its first step was traced: its peak with nothing moved, and its floor, the least that it runs in.
Each part is the floor, and of what the budget has beyond all floors as much as the way from floor to peak is long. A share
is of the sum of all peaks. A model without a step counts with the bytes of its parameters as its peak; one that is not
trained (a teacher) keeps nothing on the device between its forwards, and gets what its largest layer takes.

Parts change when a model joins, leaves, sleeps, or shows a step that needs more. A plan that holds more than its part is
made again before its model's next step, which waits for that. Until then its bytes are taken: another model's part counts from
what is left. Plans are made beside training, and a part may change meanwhile: a plan is compared with the part as it is when a
step that would follow it begins. One that was made for a smaller part is followed until there is a better one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from tieroff.config import Config
from tieroff.core.plan import Plan
from tieroff.core.seams import Fit, Recorder
from tieroff.core.tensor import Tier
from tieroff.core.trace import Trace
from tieroff.device_budget import DeviceBudget
from tieroff.errors import ConfigError
from tieroff.planner.least import Least
from tieroff.planner.problem.problem import live_bytes
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.engine import Engine
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.resources import Resources
from tieroff.session.links import Links
from tieroff.storage.engines import Engine as IoEngine
from tieroff.storage.store import Store

# A part that grew by less is not worth a new plan.
_WORTHWHILE = 1.1
# Parameters that a forward without a step has on the device at once: a weight and its bias.
_READ_AT_ONCE = 2


@dataclass(frozen=True)
class Below:
    """What lies under all models of a budget.

    Attributes:
        device: where they compute.
        settings: the parts of the config that say what there is.
        links: the machine of the first model.
        stores, io: opened by it.
    """

    device: torch.device
    settings: object
    links: Links
    stores: dict[Tier, Store]
    io: IoEngine | None


@dataclass
class SharedResources(Resources):
    """The resources of one of several models; the stores are closed by the last."""

    leave: Callable[[], None]

    def close_stores(self) -> None:
        """Closes the stores when no other model has them."""
        self.leave()


@dataclass
class Said:
    """What people were told of a budget.

    Attributes:
        told_bytes: the most that it was said to be raised to.
    """

    told_bytes: int = 0


@dataclass(eq=False)
class Part:
    """One model's part of a budget; see [Note: parts].

    Attributes:
        peak_bytes, floor_bytes: of its steps that were seen, each the largest.
        plan_bytes: what the plan of the step that runs, or ran last, has on the device at most; 0 without a plan.
        engine: once there is one.
    """

    budget: Budget
    model: torch.nn.Module
    peak_bytes: int = 0
    floor_bytes: int = 0
    plan_bytes: int = 0
    engine: Engine | None = None
    _seen: set[str] = field(default_factory=set)
    _made_for: dict[tuple[str, int, int], int] = field(default_factory=dict)  # a plan -> the part that it was asked for with
    _tried: dict[str, int] = field(default_factory=dict)  # digest of a trace -> the largest part that had no plan

    def watch(self, engine: Engine) -> None:
        """Takes the engine; what it holds is no part of a step of another model that is traced."""
        self.engine = engine
        engine.executor.traffic.tell_held = self._tell_held

    def begin_recording(self, recorder: Recorder) -> None:
        """A step of this model is about to be traced."""
        self.budget.recording = (self, recorder)
        for part in self.budget.parts:
            if part is not self and part.engine is not None:
                for held in _held_by(part.engine):
                    recorder.disown(held.untyped_storage())

    def _tell_held(self, memory: torch.Tensor) -> None:
        recording = self.budget.recording
        if recording is not None and recording[0] is not self:
            recording[1].disown(memory.untyped_storage())

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Of all models of the budget."""
        return tuple(part.engine for part in self.budget.parts if part.engine is not None)

    def see(self, trace: Trace, needs: Least) -> None:
        """Takes what a traced step needs."""
        if trace.digest in self._seen:
            return
        peak_bytes = int(live_bytes(trace).max())
        with self.budget.lock:
            self._seen.add(trace.digest)
            self.peak_bytes = max(self.peak_bytes, peak_bytes)
            self.floor_bytes = max(self.floor_bytes, needs.enough_bytes)

    @property
    def peak(self) -> int:
        """What the plain run has on the device of this model."""
        return self.peak_bytes or _bytes_of(self.model)

    @property
    def floor(self) -> int:
        """The least that it gets."""
        if self._seen:
            return self.floor_bytes
        sizes = sorted((p.numel() * p.element_size() for p in self.model.parameters()), reverse=True)
        return sum(sizes[:_READ_AT_ONCE])

    @property
    def is_asleep(self) -> bool:
        """True while everything of it that can move lies below."""
        return self.engine is not None and self.engine.is_asleep

    @property
    def held_bytes(self) -> int:
        """What the plan of its last step may have on the device now."""
        return 0 if self.is_asleep else self.plan_bytes

    @property
    def ceiling(self) -> int:
        """The most that it can use."""
        is_trained = bool(self._seen) or any(p.requires_grad for p in self.model.parameters())
        return max(self.peak if is_trained and not self.is_asleep else 0, self.floor)

    def limit_bytes(self) -> int:
        """Returns the bytes of the device that its steps may use, by what is asked for."""
        with self.budget.lock:
            return self.budget.part_of(self)

    def take(self, plan: Plan, part_bytes: int) -> None:
        """A plan was made, which was asked for when the part was this large."""
        with self.budget.lock:
            self._made_for[_mark(plan)] = part_bytes

    def failed(self, digest: str, part_bytes: int) -> None:
        """No plan of this trace was found for a part of this size."""
        with self.budget.lock:
            self._tried[digest] = max(self._tried.get(digest, 0), part_bytes)

    def fit(self, plan: Plan | None) -> Fit:
        """Returns how a plan suits the part, when a step that follows it is about to begin; None: it follows none."""
        with self.budget.lock:
            self.plan_bytes = plan.peak_bytes[Tier.DEVICE] if plan is not None else 0  # the plan before counts no more
            if self.budget.wanted is None or plan is None:
                return Fit.SUITS
            most_bytes = self.budget.part_of(self)
            made_for = self._made_for.get(_mark(plan), most_bytes)
            if most_bytes < made_for and self.plan_bytes > most_bytes:
                return Fit.ABOVE  # else it was raised above its part when it was made, and said so
            tried = max(made_for, self._tried.get(plan.trace_digest, 0))
            return Fit.ROOMIER if most_bytes > tried * _WORTHWHILE and not plan.moves_nothing else Fit.SUITS

    def lower_bytes(self, size_bytes: int) -> int:
        """Returns its part of a lower tier of this size, which is shared by what the models have altogether."""
        with self.budget.lock:
            return int(size_bytes * self.peak / max(sum(part.peak for part in self.budget.parts), 1))

    def resources(
        self, config: Config, backend: Backend, links: Links, open_below: Callable[[], Resources]
    ) -> tuple[SharedResources, Links]:
        """Returns what the model's engine runs on, and the machine: see `Budget.below`."""
        below = self.budget.below(config, backend.device, links, open_below)
        return SharedResources(backend, below.stores, below.io, self.leave), below.links

    def leave(self) -> None:
        """The model is unwrapped: its part is free for the others. Idempotent."""
        self.budget.give_up(self)


class Budget:
    """A device budget for a whole program: `tieroff.wrap(model, optimizer, budget=b)` for each of its models.

    The models share the bytes on the device, the host pool and the folders on the drive. Each has a part of the device budget:
    the least that its steps run in, and of what is left the more, the more it needs.

    Args:
        device: bytes such as 6442450944 or "6GiB", a share such as "50%" of what all models need together with nothing moved,
            or "min", the least that they run in; None, what the device has free.

    Raises:
        ConfigError: the value has another form.
    """

    def __init__(self, device: int | str | DeviceBudget | None = None) -> None:
        self.wanted = DeviceBudget.parse(device) if device is not None else None
        self.parts: list[Part] = []
        self.lock = threading.RLock()
        self.recording: tuple[Part, Recorder] | None = None  # whose step was traced last
        self.told = Said()
        self._below: Below | None = None

    def __repr__(self) -> str:
        return f"tieroff.Budget({self.wanted.written() if self.wanted is not None else None!r})"

    def join(self, model: torch.nn.Module) -> Part:
        """Returns the part of a model that is about to be wrapped."""
        part = Part(self, model)
        with self.lock:
            self.parts.append(part)
        return part

    def below(self, config: Config, device: torch.device, links: Links, open_below: Callable[[], Resources]) -> Below:
        """Returns what lies under all models, which the first one opens.

        Raises:
            ConfigError: this model computes elsewhere than the others, or wants other tiers.
            StoreError: a drive failed or is full.
        """
        settings = (config.budget.host, config.budget.nvme, config.nvme)
        if self._below is None:
            resources = open_below()
            self._below = Below(device, settings, links, resources.stores, resources.io)
        if self._below.device != device:
            raise ConfigError(f"expected the models of one tieroff.Budget on one device, got {self._below.device} and {device}")
        if self._below.settings != settings:
            raise ConfigError(
                "expected the models of one tieroff.Budget to share [budget] host and nvme and all of [nvme], got other values "
                "for this model; give every model the same config, or a Budget of its own"
            )
        return self._below

    def part_of(self, part: Part) -> int:
        """Returns the bytes of the device that a model may have now, by its part and what the others hold. Under the lock."""
        total_bytes = self.total_bytes()
        others = (max(other.held_bytes, self._divided(other, total_bytes)) for other in self.parts if other is not part)
        own_bytes = self._divided(part, total_bytes)
        return min(own_bytes, max(total_bytes - sum(others), part.floor))

    def total_bytes(self) -> int:
        """Returns the device bytes of all models together, where a budget was asked for. Under the lock."""
        assert self.wanted is not None
        if self.wanted.is_least:
            return sum(part.floor for part in self.parts)
        return self.wanted.resolve(sum(part.peak for part in self.parts))

    def asked_and_least(self) -> tuple[int, int, int]:
        """Returns the bytes that were asked for, those that all models run in at least, and how many models there are."""
        with self.lock:
            return self.total_bytes(), sum(part.floor for part in self.parts), len(self.parts)

    def _divided(self, part: Part, total_bytes: int) -> int:
        floors, ceilings = (sum(getattr(each, name) for each in self.parts) for name in ("floor", "ceiling"))
        if total_bytes < floors:
            return int(part.floor * total_bytes / floors)  # too little for some step, which says so
        if total_bytes >= ceilings:
            return int(part.ceiling * total_bytes / max(ceilings, 1))
        return part.floor + int((total_bytes - floors) * (part.ceiling - part.floor) / (ceilings - floors))

    def give_up(self, part: Part) -> None:
        """A model leaves; the last one closes the stores."""
        with self.lock:
            if part in self.parts:
                self.parts.remove(part)
                self.recording = None
            below = self._below
            if self.parts or below is None:
                return
            self._below = None
        for store in below.stores.values():
            store.close()
        if below.io is not None:
            below.io.close()


def _held_by(engine: Engine) -> Iterator[torch.Tensor]:
    """Yields the memory that an engine holds of its tensors, on the device and below."""
    for item in (*engine.executor.homes, *engine.executor.activations):
        if item.device is not None:
            yield item.device
        if isinstance(item, HomeItem) and item.lower is not None:
            yield item.lower
    yield from engine.executor.resident()


def _mark(plan: Plan) -> tuple[str, int, int]:
    """Returns what tells a plan from others of its step, however long it is predicted to take."""
    return plan.trace_digest, plan.budget_bytes[Tier.DEVICE], plan.peak_bytes[Tier.DEVICE]


def _bytes_of(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
