"""Runs a training loop plain and wrapped, and compares every number that comes out, bit for bit."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import tieroff
from tests.support.delayed import DelayedBackend
from tests.support.oracles.bytes.device import DeviceBytes, Scratch, aside
from tieroff.core.machine import Machine, save_machine
from tieroff.core.tensor import UNIT_BYTES, Tier, allocated_bytes
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.backend.place import HomePlace
from tieroff.runtime.engine import Engine
from tieroff.runtime.items.item import Item
from tieroff.runtime.movable import local_of
from tieroff.tracing.recording.scratch import PeakCounter

SEED = 20
STEPS = 6
PEAK_TOLERANCE = 0.02
NVME_BYTES = 16 << 20
SMALL_HOST_BYTES = 64 << 10
LARGE_HOST_BYTES = 64 << 20
_NUMBERS_BYTES = 64 * torch.float32.itemsize  # what numbers of gradients are kept in: see tieroff/runtime/hooks/scaled.py

State = dict[str, Tensor]
Step = Callable[["Trainer"], None]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def mean_of_squares(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).float().square().mean()


def plain_step(trainer: Trainer) -> None:
    """What most loops do: forward, backward, clip, update, schedule."""
    trainer.loss().backward()
    trainer.update()


@dataclass(frozen=True)
class Workload:
    """A model and its training loop, the same each time it is built.

    Attributes:
        name: for the test's id.
        build: makes the model; torch is seeded before.
        batch: makes the inputs of one forward, on the CPU; torch is seeded before each step.
        objective: model and inputs -> loss.
        step: one training step.
        optimizer: parameters -> optimizer.
        classes: tensor classes of which bytes have to move.
        steps: how many are run; the last three must be planned ones.
        unseen_bytes: what torch makes beside its operators, such as states of random generators.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    objective: Callable[..., Tensor] = mean_of_squares
    step: Step = plain_step
    optimizer: OptimizerFactory = adamw
    classes: frozenset[str] = frozenset({"activation", "parameter", "gradient", "optimizer"})
    steps: int = STEPS
    unseen_bytes: int = 0


@dataclass(frozen=True)
class Tiers:
    """Room below the device."""

    name: str
    host_bytes: int
    has_nvme: bool


HOST = Tiers("host", LARGE_HOST_BYTES, has_nvme=False)
NVME = Tiers("nvme", 0, has_nvme=True)
MIXED = Tiers("mixed", SMALL_HOST_BYTES, has_nvme=True)
TIERS = (HOST, NVME, MIXED)

BACKENDS: dict[str, Callable[[], Backend]] = {"cpu": CpuBackend, "delayed": lambda: DelayedBackend(SEED)}


@dataclass
class Outcome:
    """Everything that a run computed, in copies that no recorder saw being made.

    Attributes:
        unseen_bytes: of a plain run, what no trace has; see `unseen_bytes`.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[State] = field(default_factory=list)
    values: list[State] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    unseen_bytes: int = 0


class Trainer:
    """One training loop; `step` of the workload drives it."""

    def __init__(
        self, workload: Workload, device: torch.device, clip: Callable[..., Tensor] = nn.utils.clip_grad_norm_
    ) -> None:
        torch.manual_seed(SEED)
        self.workload = workload
        self.device = device
        self.model = workload.build().to(device)
        self.optimizer = workload.optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)
        self.outcome = Outcome()
        self._clip = clip
        self.taken: DeviceBytes | None = None  # counts a wrapped run

    def batch(self) -> tuple[Tensor, ...]:
        return tuple(tensor.to(self.device) for tensor in self.workload.batch())

    def loss(self) -> Tensor:
        loss = self.workload.objective(self.model, *self.batch())
        return self.note(loss)

    def note(self, loss: Tensor) -> Tensor:
        self.outcome.losses.append(copy_of(loss))
        return loss

    def update(self, *, set_to_none: bool = True, clips: bool = True, clears: bool = True) -> None:
        if clips:
            self.note(self._clip(self.model.parameters(), 1.0))
        with tieroff.on_host(self.model) if self.taken is not None else contextlib.nullcontext():
            gradients = {name: copy_of(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        self.outcome.gradients.append(gradients)
        self.optimizer.step()
        if clears:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        self.scheduler.step()

    def run(self, index: int) -> None:
        torch.manual_seed(SEED + 1 + index)
        self.workload.step(self)
        self.outcome.values.append({name: copy_of(value) for name, value in self.model.state_dict().items()})

    def finish(self) -> Outcome:
        self.outcome.optimizer = state_of(self.optimizer)
        return self.outcome


def copy_of(tensor: Tensor) -> Tensor:
    """Returns a copy on the CPU that no dispatch mode sees: a look from outside, no part of the user's program."""
    with _disable_current_modes(), torch.no_grad(), aside():
        copy = local_of(tensor).detach().to("cpu", copy=True)
        return copy if copy.layout is torch.strided else copy.to_dense()


def state_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns a copy of an optimizer's state dict, as a flat mapping."""
    found = optimizer.state_dict()
    flat: dict[str, Any] = {}
    for index, entries in found["state"].items():
        for key, value in entries.items():
            flat[f"state {index} {key}"] = copy_of(value) if isinstance(value, Tensor) else value
    for number, group in enumerate(found["param_groups"]):
        for key, value in group.items():
            flat[f"group {number} {key}"] = copy_of(value) if isinstance(value, Tensor) else value
    return flat


def are_same_bits(a: Any, b: Any) -> bool:
    """True for tensors equal in type, shape and every bit (so NaN equals itself and 0 is not -0), or equal values."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if a.numel() == 0:
        return True
    return torch.equal(bits_of(a), bits_of(b))


def bits_of(tensor: Tensor) -> Tensor:
    """Returns the elements' bytes, in order."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Returns the keys whose values are not the same in both."""
    return [key for key in sorted(a.keys() | b.keys()) if not (key in a and key in b and are_same_bits(a[key], b[key]))]


def assert_equal(plain: Outcome, wrapped: Outcome) -> None:
    """Asserts that two runs computed the same numbers, and names the first that differ."""
    assert len(plain.losses) == len(wrapped.losses)
    differ = [i for i, (a, b) in enumerate(zip(plain.losses, wrapped.losses, strict=True)) if not are_same_bits(a, b)]
    assert differ == [], "losses and norms differ"
    for kind in ("gradients", "values"):
        ours, theirs = getattr(plain, kind), getattr(wrapped, kind)
        assert len(ours) == len(theirs)
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert differing(a, b) == [], f"{kind} differ in step {step}"
    assert differing(plain.optimizer, wrapped.optimizer) == [], "the optimizer's state differs"


# -- the engine's side -------------------------------------------------------------------------------------------------


class Recorded(logging.Handler):
    """Keeps the messages at WARNING and above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def warnings_of_tieroff() -> Iterator[list[str]]:
    """Collects what tieroff warns of meanwhile."""
    recorded = Recorded()
    logger = logging.getLogger("tieroff")
    logger.addHandler(recorded)
    # pytest keeps records, and with them errors, their frames and the tensors in those.
    propagates, logger.propagate = logger.propagate, False
    try:
        yield recorded.messages
    finally:
        logger.propagate = propagates
        logger.removeHandler(recorded)


def machine_file(folder: Path) -> Path:
    """Writes a machine with made-up links, so that no test measures the real ones."""
    path = folder / "machine.toml"
    if not path.exists():
        speed = 4 << 30
        save_machine(
            Machine(
                name="test",
                measured="datasheet",
                device_bytes=1 << 40,
                host_bytes=1 << 40,
                nvme_bytes=1 << 40,
                d2h_bytes_per_s=speed,
                h2d_bytes_per_s=speed,
                nvme_write_bytes_per_s=speed // 4,
                nvme_read_bytes_per_s=speed // 2,
            ),
            path,
        )
    return path


def config_for(tiers: Tiers, folder: Path, *, policy: str = "floor", device: str = "100%") -> dict[str, Any]:
    """Returns a config under which everything may move."""
    budget: dict[str, Any] = {"device": device, "host": tiers.host_bytes}
    nvme: dict[str, Any] = {"dirs": []}
    if tiers.has_nvme:
        budget["nvme"] = NVME_BYTES
        nvme = {"dirs": [str(folder)], "staging": "1MiB"}
    plan = {"policy": policy, "min_bytes": 0, "machine": str(machine_file(folder))}
    return {"budget": budget, "nvme": nvme, "plan": plan}


def items_of(engine: Engine) -> list[Item]:
    """Returns every tensor under the engine's care."""
    return [*engine.executor.homes, *engine.executor.activations]


def assert_accounts(engine: Engine) -> None:
    """Asserts that the engine's counts are the sums of what it holds."""
    executor = engine.executor
    executor.activations.drain()
    executor.gradients.sweep()
    items = items_of(engine)
    assert executor.traffic.device_bytes == sum(
        allocated_bytes(item.size_bytes, executor.traffic.backend.device.type) for item in items if item.device is not None
    )
    for store in engine.stores.values():
        placed = sum(item.size_bytes for item in items if item.place is not None and item.place.tier is store.tier)
        assert placed <= store.used_bytes <= store.capacity_bytes


def assert_all_moved(engine: Engine, workload: Workload, tiers: Tiers) -> None:
    """Asserts that tensors of every class that the model has moved, over every link that there is."""
    stats = engine.stats()
    moved = {kind for kind, size_bytes in stats.moved_bytes_by_class.items() if size_bytes}
    assert moved == set(workload.classes)
    links = {link for link, size_bytes in stats.moved_bytes.items() if size_bytes}
    assert links == ({"d2h", "h2d"} if tiers.host_bytes else set()) | ({"nvme_write", "nvme_read"} if tiers.has_nvme else set())


def assert_planned(engine: Engine, tiers: Tiers, taken_bytes: int | None = None, unseen_bytes: int = 0) -> None:
    """Asserts that the step followed its plan, in the memory that the plan predicted.

    Args:
        engine: whose step is over.
        tiers: room below the device.
        taken_bytes, unseen_bytes: see `assert_as_counted`.
    """
    stats, plan = engine.stats(), engine.plan
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert sum(stats.moved_bytes.values()) > 0
    predicted = plan.peak_bytes[Tier.DEVICE]
    assert stats.peak_device_bytes <= plan.budget_bytes[Tier.DEVICE]
    assert abs(stats.peak_device_bytes - predicted) <= PEAK_TOLERANCE * predicted, (
        f"expected a peak of {predicted} bytes, got {stats.peak_device_bytes}"
    )
    assert stats.peak_host_bytes <= tiers.host_bytes
    if taken_bytes is not None:
        assert_as_counted(engine, taken_bytes, unseen_bytes)


def assert_as_counted(engine: Engine, taken_bytes: int, unseen_bytes: int = 0) -> None:
    """Asserts that a planned step took what the engine says that it did, and no more than its budget.

    Args:
        engine: whose step is over.
        taken_bytes: the step's peak by a count that is not the engine's (`DeviceBytes`).
        unseen_bytes: what no trace has; see `Outcome`.
    """
    said, budget = engine.stats().peak_device_bytes, engine.plan.budget_bytes[Tier.DEVICE]
    within = PEAK_TOLERANCE * taken_bytes
    counted = f"got {taken_bytes} bytes by a count of its own, at most {unseen_bytes} beside; the engine says {said}"
    assert taken_bytes <= budget + unseen_bytes, f"expected at most {budget} bytes of the device, {counted}"
    assert taken_bytes <= said + within + unseen_bytes, f"expected what stats() says, {counted}"
    if engine.executor.traffic.backend.device.type == "cpu":  # elsewhere the scratch of an op may be less the next time
        assert said - within <= taken_bytes, f"expected what stats() says, {counted}"


def run_plain(workload: Workload, device: torch.device, **options: Any) -> Outcome:
    """Runs the workload as it is."""
    trainer = Trainer(workload, device, **options)
    for index in range(workload.steps):
        is_looked_at = index == 1  # ops take the same scratch in each step
        scratch = Scratch(device, PeakCounter.from_bytes)
        with scratch if is_looked_at else contextlib.nullcontext():
            trainer.run(index)
        if is_looked_at:
            trainer.outcome.unseen_bytes = unseen_bytes(trainer, scratch.most_bytes)
    return trainer.finish()


def unseen_bytes(trainer: Trainer, scratch_bytes: int) -> int:
    """Returns what a step takes that its trace does not have: little, and of a model of some KiB more than a hundredth.

    That is the memory of numbers that are kept of gradients which leave, before or after the peak as the plan has it, and on
    the CPU the scratch of ops on small tensors.
    """
    own_bytes = trainer.workload.unseen_bytes
    if trainer.device.type == "cpu":
        return own_bytes + scratch_bytes + _NUMBERS_BYTES
    return own_bytes + 2 * UNIT_BYTES


def run_wrapped(
    workload: Workload,
    config: dict[str, Any],
    backend: Backend,
    after_step: Callable[[int, Engine], None],
    *,
    peaks: list[int] | None = None,
    **options: Any,
) -> Outcome:
    """Runs the workload wrapped, unwraps it, and asserts that nothing is left; returns what it computed.

    `peaks` gets the peak of each step's device bytes, by a count that is not the engine's, before `after_step` is called.
    """
    peaks = [] if peaks is None else peaks
    taken = DeviceBytes(backend.device)
    trainer = Trainer(workload, backend.device, **options)
    tieroff.wrap(trainer.model, trainer.optimizer, config, backend=backend)
    engine = tieroff.engine(trainer.model)
    try:
        for index in range(workload.steps):
            taken.begin()
            trainer.taken = taken
            trainer.run(index)
            peaks.append(taken.peak_bytes)
            assert_accounts(engine)
            after_step(index, engine)
        before = state_of(trainer.optimizer)
        homes = [ref(item.place.home) for item in items_of(engine) if isinstance(item.place, HomePlace)]
    finally:
        tieroff.unwrap(trainer.model)
    outcome = trainer.finish()
    assert differing(before, outcome.optimizer) == [], "unwrap changed the optimizer's state"
    last = {name: copy_of(value) for name, value in trainer.model.state_dict().items()}
    assert differing(last, outcome.values[-1]) == [], "unwrap changed the model's values"
    assert all(type(module._parameters) is dict for module in trainer.model.modules())
    gc.collect()
    assert engine.executor.traffic.device_bytes == 0
    assert [home for home in homes if home() is not None] == [], "homes outlive their engine"
    return outcome


def check_parity(
    workload: Workload,
    tiers: Tiers,
    make_backend: Callable[[], Backend],
    folder: Path,
    *,
    policy: str = "floor",
    device: str = "100%",
    **options: Any,
) -> Engine:
    """Asserts that a workload computes the same numbers wrapped as plain, and that it ran as planned.

    Returns the closed engine, for more questions.
    """
    backend = make_backend()
    engines: list[Engine] = []
    peaks: list[int] = []
    planned: list[int] = []

    def counted(index: int) -> int | None:
        if backend.device.type == "cpu":
            return peaks[-1]
        # The trainer's look at gradients after backward, which no trace has, brings up those that lie below; plans differ in
        # which these are, and later ones follow times measured here: of planned steps the least.
        return min(planned) if index == workload.steps - 1 else None

    def after_step(index: int, engine: Engine) -> None:
        if index == 0:
            engines.append(engine)
        if engine.stats().phase == "planned":
            planned.append(peaks[-1])
        if index >= workload.steps - 3:
            assert_planned(engine, tiers, counted(index), plain.unseen_bytes)
            if policy == "floor":
                assert_all_moved(engine, workload, tiers)

    plain = run_plain(workload, backend.device, **options)
    with warnings_of_tieroff() as messages:
        config = config_for(tiers, folder, policy=policy, device=device)
        wrapped = run_wrapped(workload, config, backend, after_step, peaks=peaks, **options)
    assert_equal(plain, wrapped)
    if tiers is MIXED:
        # Sixteen pages of host memory may be free in pieces, whatever is left free: the NVMe takes over, and it is said.
        messages = [message for message in messages if "the free memory is in pieces" not in message]
    assert messages == []
    return engines[0]
