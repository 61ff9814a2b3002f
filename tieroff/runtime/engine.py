"""The engine of one wrapped model: from homes at wrap, over tracing and planning, to planned steps and unwrap."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref as _weak

import torch

from tieroff.core.describe import describe
from tieroff.core.files import save_plan, save_timeline, save_trace
from tieroff.core.plan import Plan
from tieroff.core.recording import Recorder, Subject
from tieroff.core.tensor import TensorClass, Tier
from tieroff.core.timeline import OpSpan, Timeline, TransferSpan
from tieroff.core.trace import Trace
from tieroff.errors import CaptureError, StateError, StoreError
from tieroff.runtime.backend import Backend
from tieroff.runtime.executor import Executor
from tieroff.runtime.hooks import ForwardSlot, RecurrentWeights, recompute, signature_of, storages_of
from tieroff.runtime.homes import HomeItem, ParameterItem, why_unmovable
from tieroff.runtime.item import Item, Traffic
from tieroff.runtime.optimizer import BucketedStep
from tieroff.runtime.parameters import functorch_is_active, install, uninstall
from tieroff.runtime.program import Mode, Phase, Program
from tieroff.runtime.stats import Stats
from tieroff.storage.store import Store
from tieroff.units import format_bytes, format_seconds

log = logging.getLogger("tieroff")

# Kinds of steps (signatures) whose traces and plans are kept.
_PROGRAMS_KEPT = 16
# Steps in a row that must leave a plan before the kind is traced again; doubled each time.
_MISMATCHES_BEFORE_RETRACE = 2
_RECORDINGS_AT_MOST = 6

_ENDS = {
    "d2h": (Tier.DEVICE, Tier.HOST),
    "h2d": (Tier.HOST, Tier.DEVICE),
    "nvme_write": (Tier.DEVICE, Tier.NVME),
    "nvme_read": (Tier.NVME, Tier.DEVICE),
}


@dataclass(frozen=True)
class Settings:
    """What the engine is told; all of it comes from the config.

    Attributes:
        covers: tensor classes that may move.
        min_bytes: smaller tensors stay.
        spill: lower tiers in the order in which they are filled while nothing is planned.
        allocator_threshold_bytes: see `Backend.tune_allocator`; None leaves the allocator alone.
    """

    covers: frozenset[TensorClass]
    min_bytes: int
    spill: tuple[Tier, ...]
    allocator_threshold_bytes: int | None = None
    keep_timeline: bool = True
    chosen: dict[str, str] = field(default_factory=dict)
    config_toml: str = ""


class Engine:
    """Keeps one model's training inside a budget. Made by `tieroff.wrap`.

    Attributes:
        model: the wrapped module.
        trace, plan: of the kind of step that ran last; StateError before they exist.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Backend,
        stores: dict[Tier, Store],
        settings: Settings,
        make_plan: Callable[[Trace], Plan],
        make_recorder: Callable[[], Recorder],
        on_close: Callable[[], None],
    ) -> None:
        self.model = model
        self.settings = settings
        self.stores = stores
        self._backend = backend
        self._make_plan, self._make_recorder, self._on_close = make_plan, make_recorder, on_close
        self._traffic = Traffic(backend, stores, self._demote)
        self._traffic.keep_spans = settings.keep_timeline
        self.executor = Executor(self._traffic, self._tier_for, settings.min_bytes, settings.covers)
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._program: Program | None = None
        self._last: Program | None = None
        self._stepper: BucketedStep | None = None
        self._failed_tiers: set[Tier] = set()
        self._unmoved: dict[str, str] = {}
        self._recomputed: dict[str, ForwardSlot] = {}
        self._recurrent: list[RecurrentWeights] = []
        self._grad_hooks: dict[int, Any] = {}
        self._identity: tuple[Any, ...] = ()
        self._step_is_over = True
        self._begun_ns = self._recompute_ns = 0
        self._stats: Stats | None = None
        self._timeline: Timeline | None = None
        self._pid = os.getpid()
        self.is_closed = False
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    # -- taking over and giving back -------------------------------------------------------------------------------

    def _take_over(self) -> None:
        for module in self.model.modules():
            if any(torch.nn.parameter.is_lazy(p) for p in module._parameters.values()):
                raise StateError(
                    f"{type(module).__name__} has lazy parameters, whose sizes nobody knows yet; run one forward on real "
                    "data before tieroff.wrap"
                )
        self._backend.tune_allocator(self.settings.allocator_threshold_bytes)
        if self._backend.device.type != "cpu":
            self._move_to_device()
        self._register_parameters()
        install(self.model, self.executor.gate)
        for module in self.model.modules():
            if isinstance(module, torch.nn.RNNBase):
                self._recurrent.append(RecurrentWeights(module, self.executor.gate))
        self._root = ForwardSlot(self.model, self._forward)
        self._root.engine = self

    def _move_to_device(self) -> None:
        """Puts buffers, and parameters that will have no home below, on the device; the others go there as they are used."""
        device = self._backend.device
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
        for parameter in self.model.parameters():
            if parameter.device != device and self._why_kept(parameter):
                parameter.data = parameter.data.to(device)

    def _register_parameters(self) -> None:
        """Makes an item of every parameter that can have a home below."""
        gate = self.executor.gate
        known = {id(item.tensor): item for item in gate.items.values() if item.tensor is not None}
        gate.items, self._unmoved = {}, {}
        self.executor.names_by_id = {}
        for position, (name, parameter) in enumerate(self.model.named_parameters()):
            self.executor.names_by_id[id(parameter)] = name
            self._hook_gradient(parameter)
            item = known.pop(id(parameter), None)
            if item is not None and item.is_current():
                item.position, item.key = position, ("param", position)
                gate.items[id(parameter)] = item
                continue
            if item is not None:
                item.detach(self._traffic)
            reason = self._why_kept(parameter)
            if reason:
                self._unmoved[name] = reason
                continue
            size_bytes = parameter.numel() * parameter.element_size()
            if parameter.device != self._backend.device:
                parameter.data = parameter.data.to(self._backend.device)  # one at a time: it goes below right after
            item = ParameterItem(position, name, parameter, self._tier_for(size_bytes), self._backend.device)
            item.adopt(self._traffic)
            gate.items[id(parameter)] = item
            item.leave(self._traffic)
        for gone in known.values():
            gone.detach(self._traffic)
        gate.is_open = bool(gate.items)
        self._identity = self._look()

    def _why_kept(self, parameter: torch.Tensor) -> str:
        if TensorClass.PARAMETER not in self.settings.covers:
            return "parameters are not covered"
        if parameter.numel() * parameter.element_size() < max(self.settings.min_bytes, 1):
            return "smaller than min_bytes"
        return why_unmovable(parameter)

    def _hook_gradient(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._grad_hooks or not (parameter.requires_grad and parameter.is_leaf):
            return

        def gradient_arrived(home: torch.Tensor) -> None:
            item = self.executor.gate.items.get(id(home))
            if item is not None and item.tensor is home and not self.is_closed:
                self.executor.gradients.arrived(item)

        def about_to_accumulate(grads: Any) -> None:
            home = parameter_ref()
            item = self.executor.gate.items.get(id(home)) if home is not None else None
            if item is not None and item.tensor is home and not self.is_closed:
                self.executor.gradients.about_to_accumulate(item)

        parameter_ref = _weak(parameter)
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._grad_hooks[id(parameter)] = (
            parameter.register_post_accumulate_grad_hook(gradient_arrived),
            node.register_prehook(about_to_accumulate),
            node,  # the parameter itself holds its node only weakly
        )

    def _look(self) -> tuple[Any, ...]:
        """Returns what tells whether somebody changed the model's parameters from outside."""
        return tuple(
            (id(p), p.requires_grad, p.dtype)
            for module in self.model.modules()
            for p in module._parameters.values()
            if p is not None
        )

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer whose `step` ends a training step.

        Raises:
            StateError: there is one already, or this one cannot be stepped in parts or as a whole.
        """
        self._check_alive()
        if self._stepper is not None:
            raise StateError("an optimizer is attached already; a wrapped model has one")
        self._stepper = BucketedStep(
            optimizer, self.executor, self._before_update, self._after_update, self.settings.min_bytes
        )
        self._programs.clear()

    def close(self) -> None:
        """Gives everything back: a plain module and optimizer with their values intact; threads and files end."""
        if self.is_closed:
            return
        self.is_closed = True
        if os.getpid() != self._pid:
            return  # a forked child: its copies of descriptors are closed by the stores, nothing else is its own
        self.executor.abandon()
        for slot in (getattr(self, "_root", None), *self._recurrent, *self._recomputed.values()):
            if slot is not None:
                slot.remove()
        uninstall(self.model)
        for arrived, before, _ in self._grad_hooks.values():
            arrived.remove()
            before.remove()
        self._grad_hooks.clear()
        if self._stepper is not None:
            self._stepper.remove()
        for gradient in list(self.executor.gradients.values()):
            gradient.bring_home(self._traffic)
        for item in list(self.executor.gate.items.values()):
            item.bring_home(self._traffic)
        self.executor.gate.items.clear()
        self.executor.gate.is_open = False
        self.executor.bring_activations_home()
        self._backend.tune_allocator(None)
        self._backend.close()
        self._on_close()

    # -- the step --------------------------------------------------------------------------------------------------

    def _forward(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in the place of the model's forward."""
        self._check_alive()
        executor = self.executor
        if executor.gate.depth or functorch_is_active():
            return inner(*args, **kwargs)
        args, kwargs = self._to_device(args, kwargs)
        if not torch.is_grad_enabled() or self._has_substitutes():
            return self._infer(inner, args, kwargs)
        self._begin_forward(args, kwargs)
        executor.gate.depth += 1
        try:
            if executor.mode is Mode.PASS:
                return inner(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(executor.saved_tensors.pack, executor.saved_tensors.unpack):
                return inner(*args, **kwargs)
        except BaseException as error:
            self._broke()
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                raise StateError(
                    "torch.func transforms inside the forward of a wrapped model do not work while its saved tensors are "
                    "moved (torch: no saved tensor hooks under functorch); wrap the parts that do not use them"
                ) from error
            raise
        finally:
            executor.gate.depth -= 1
            executor.drop_held()

    def _to_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = self._backend.device
        if device.type == "cpu":
            return args, kwargs

        def move(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) and not leaf.is_cuda else leaf

        return torch.utils._pytree.tree_map(move, (args, kwargs))

    def _infer(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward that is no part of the step (no gradients, functional_call): parameters are fetched as they are read."""
        executor = self.executor
        self._check_model()
        mode, executor.mode = executor.mode, Mode.IDLE
        executor.gate.depth += 1
        try:
            return inner(*args, **kwargs)
        finally:
            executor.gate.depth -= 1
            executor.drop_held()
            executor.mode = mode

    def _begin_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = signature_of(self.model, args, kwargs)
        executor = self.executor
        executor.gradients.sweep()
        if not self._step_is_over and self._was_skipped():
            self._finish_step()
        if self._step_is_over or self._program is None:
            self._end_ring()
            self._check_model()
            self._start_step(signature)
        if executor.mode is not Mode.PASS:
            executor.saved_tensors.fixed = (
                storages_of((args, kwargs)) | storages_of(list(self.model.buffers())) | self._homes_on_device()
            )
            executor.tick(("forward", signature), lambda: "forward", "forward")

    def _was_skipped(self) -> bool:
        """True when the step's backward is over and its gradients were cleared without an update (GradScaler, or none)."""
        if self._stepper is None:
            return self.executor.saw_backward
        return self.executor.saw_backward and all(
            p.grad is None for group in self._stepper.optimizer.param_groups for p in group["params"]
        )

    def _start_step(self, signature: Hashable) -> None:
        program = self._programs.get(signature)
        if program is None:
            program = self._programs[signature] = Program(signature)
            while len(self._programs) > _PROGRAMS_KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(signature)
        self._settle_phase(program)
        self._place_for(program)
        recorder = None
        if program.phase is Phase.RECORD:
            recorder = self._make_recorder()
        self._program = self._last = program
        self.executor.begin(program, recorder)
        self._assign(program)
        self._step_is_over = False
        self._begun_ns, self._recompute_ns = time.monotonic_ns(), 0
        if recorder is not None:
            self._start_recorder(recorder)

    def _start_recorder(self, recorder: Recorder) -> None:
        try:
            recorder.start()
        except CaptureError as error:
            log.warning("%s; this step runs on demand", error)
            self.executor.recorder = None
            return
        for item in self._home_items():
            self.executor.bind(item)

    def _settle_phase(self, program: Program) -> None:
        """Decides whether a kind of step whose last runs left its plan is traced again."""
        if program.phase is Phase.PLANNED and program.mismatches >= _MISMATCHES_BEFORE_RETRACE << program.retraces:
            log.info("the step has left its plan %d times in a row: it is traced again", program.mismatches)
            program.phase = Phase.RECORD
            program.retraces += 1
            program.mismatches = 0

    def _place_for(self, program: Program) -> None:
        """Puts parameters where this program's plan has them between steps: on the device, or in a lower tier."""
        planned = program.phase is Phase.PLANNED
        for item in self.executor.gate.items.values():
            index = program.index.get(item.key, -1) if planned else -1
            if planned and (program.moves_nothing or (index >= 0 and index not in program.tiers)):
                item.refresh(self._traffic)
                item.lift(self._traffic)
                item.leave_place(self._traffic)
            else:
                self._send_below(item, program.tiers.get(index, item.tier) if planned else item.tier)
        if self._stepper is not None:
            for state in self._stepper.items.values():
                index = program.index.get(state.key, -1) if planned else -1
                if planned and index in program.tiers:
                    self._send_below(state, program.tiers[index])
                elif not planned:
                    self._send_below(state, state.tier)
                elif program.moves_nothing:
                    state.lift(self._traffic)
                    state.leave_place(self._traffic)
        self.executor.gate.is_open = not program.moves_nothing

    def _send_below(self, item: HomeItem, tier: Tier) -> None:
        if item.tensor is None:
            return
        if item.tier is not tier:
            item.refresh(self._traffic)
            item.lift(self._traffic)
            item.leave_place(self._traffic)
            item.tier = tier
        item.leave(self._traffic)

    def _assign(self, program: Program) -> None:
        for item in self._home_items():
            self.executor.assign(item)

    def _home_items(self) -> Iterator[HomeItem]:
        yield from self.executor.gate.items.values()
        yield from self.executor.gradients.values()
        if self._stepper is not None:
            yield from self._stepper.items.values()

    def _homes_on_device(self) -> set[int]:
        return {
            p.untyped_storage()._cdata
            for p in self.model.parameters()
            if p.layout is torch.strided and type(p) in (torch.Tensor, torch.nn.Parameter)
        }

    def _before_update(self) -> None:
        """`optimizer.step` was called."""
        self._check_alive()
        if self._program is None or self._step_is_over:
            # Gradients that came from elsewhere: an update outside any step of ours, on demand.
            self._end_ring()
            self.executor.mode = Mode.IDLE

    def _after_update(self) -> None:
        """`optimizer.step` is about to return."""
        if self._program is not None and not self._step_is_over:
            self._finish_step()
        else:
            assert self._stepper is not None
            self._stepper.lower_all()

    def _finish_step(self) -> None:
        self._step_is_over = True
        self._note_stats()

    def _end_ring(self) -> None:
        """The ring closes: what user code did between the steps belonged to the last op."""
        program = self._program
        if program is None:
            return
        executor = self.executor
        mode = executor.mode
        keys, names = executor.end()
        recorder, executor.recorder = executor.recorder, None
        self._program = None
        if mode is not Mode.DEMAND or program.phase is Phase.PLANNED:
            return
        if self._stepper is not None and ("end",) not in keys:
            return  # skipped by a GradScaler, or broken off: the next step is as good
        if program.phase is Phase.RECORD:
            self._keep_recording(program, recorder, keys, names)
        elif keys == program.keys:
            self._plan(program)
        else:
            log.info("two steps in a row differed: the step is traced again")
            program.phase = Phase.RECORD

    def _keep_recording(
        self, program: Program, recorder: Recorder | None, keys: list[Hashable], names: list[str]
    ) -> None:
        program.retraces += 1
        if recorder is None:
            return
        if program.retraces > _RECORDINGS_AT_MOST:
            if program.retraces == _RECORDINGS_AT_MOST + 1:
                log.warning("steps of this model do not repeat: they run with transfers on demand (right, but slower)")
            return
        program.keys, program.names = keys, names
        subjects = self._subjects()
        program.trace = recorder.finish(subjects, [0] * len(keys), type(self.model).__name__)
        program.index = {subject.key: i for i, subject in enumerate(subjects)}
        program.phase = Phase.MEASURE

    def _subjects(self) -> list[Subject]:
        subjects = [
            Subject(item.key, item.name, item.size_bytes, item.kind, is_persistent=True) for item in self._home_items()
            if item.kind is not TensorClass.GRADIENT
        ]  # fmt: skip
        subjects += self.executor.recorded_subjects()
        return subjects

    def _plan(self, program: Program) -> None:
        assert program.trace is not None
        executor = self.executor
        durations = [max(b - a, 0) for a, b in zip(executor.starts_ns, executor.stops_ns, strict=True)]
        program.durations_ns = durations
        program.trace = program.trace.with_durations(durations)
        plan = self._make_plan(program.trace)
        wanted = set(plan.recompute) - set(self._recomputed)
        if wanted:
            for name in sorted(wanted):
                self._recomputed[name] = recompute(self.model.get_submodule(name), executor.gate, self._timing_recompute)
            program.phase = Phase.RECORD
            return
        program.adopt(plan)
        for store in self.stores.values():
            store.reserve(plan.peak_bytes.get(store.tier, 0))  # a full drive is known now, not in mid-run

    @contextlib.contextmanager
    def _timing_recompute(self) -> Iterator[None]:
        start_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._recompute_ns += time.monotonic_ns() - start_ns

    def _broke(self) -> None:
        """An exception left the forward: what the step had begun is cleared; the next forward begins a new one."""
        self.executor.abandon()
        self._program = None
        self._step_is_over = True

    def _check_model(self) -> None:
        """Adopts what somebody changed from outside: parameters replaced, converted, frozen, assigned."""
        if self._has_substitutes():
            return
        changed = self._look() != self._identity or any(
            not item.is_current() for item in self.executor.gate.items.values()
        )
        if not changed:
            return
        log.info("the model's parameters were changed from outside: they are taken over as they are now")
        install(self.model, self.executor.gate)
        self._register_parameters()
        self._programs.clear()

    def _has_substitutes(self) -> bool:
        """True while other tensors stand in for parameters, for one call only (torch.func.functional_call)."""
        return any(
            p is not None and type(p) is not torch.nn.Parameter and not isinstance(p, torch.nn.Parameter)
            for module in self.model.modules()
            for p in module._parameters.values()
        )

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise StateError("this model was wrapped in the parent process; a forked child cannot run it: wrap it there")
        if self.is_closed:
            raise StateError("this engine is closed; wrap the model again")

    # -- tiers -----------------------------------------------------------------------------------------------------

    def _tier_for(self, size_bytes: int) -> Tier:
        """Returns the first lower tier with room, while nothing is planned."""
        for tier in self.settings.spill:
            store = self.stores[tier]
            if tier not in self._failed_tiers and store.capacity_bytes - store.used_bytes >= size_bytes:
                return tier
        return self.settings.spill[-1]

    def _demote(self, item: Item, error: StoreError) -> bool:
        """After a failed copy out: True when the item may try another tier. Its source is intact."""
        others = [t for t in self.settings.spill if t is not item.tier and t not in self._failed_tiers]
        for tier in others:
            if self.stores[tier].capacity_bytes - self.stores[tier].used_bytes >= item.size_bytes:
                level = logging.DEBUG if error.errno == errno.ENOSPC and self._program_is_unplanned() else logging.WARNING
                log.log(level, "%s: %s goes to %s instead", error, item.name, tier.value)
                item.tier = tier
                return True
        return False

    def _program_is_unplanned(self) -> bool:
        """True while tiers are filled in order and one of them being full is nothing special."""
        return self._program is None or self._program.phase is not Phase.PLANNED

    # -- what people ask -------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        if self._last is None or self._last.trace is None:
            raise StateError("there is no trace yet; it exists after the first training step")
        return self._last.trace

    @property
    def plan(self) -> Plan:
        if self._last is None or self._last.plan is None:
            raise StateError("there is no plan yet; it is made after the second training step")
        return self._last.plan

    @property
    def timeline(self) -> Timeline:
        """What the last planned step did when, on compute and on each link."""
        if self._timeline is None:
            raise StateError("there is no timeline yet; the first planned step is the third")
        return self._timeline

    def _note_stats(self) -> None:
        executor, program = self.executor, self._program
        assert program is not None
        executor.pause()
        now_ns = time.monotonic_ns()
        compute_ns = sum(b - a for a, b in zip(executor.starts_ns, executor.stops_ns, strict=False))
        host, nvme = self.stores.get(Tier.HOST), self.stores.get(Tier.NVME)
        is_pass = executor.mode is Mode.PASS
        phase = {Phase.RECORD: "traced", Phase.MEASURE: "measured", Phase.PLANNED: "planned"}[program.phase]
        if is_pass:
            phase = "nothing moved"
        elif program.phase is Phase.PLANNED and executor.mode is not Mode.PLANNED:
            phase = "on demand"
        counts = self._traffic.counts
        self._stats = Stats(
            step_s=(now_ns - self._begun_ns) / 1e9,
            compute_s=(now_ns - self._begun_ns if is_pass else compute_ns) / 1e9,
            stall_s=counts.stall_ns / 1e9,
            recompute_s=self._recompute_ns / 1e9,
            peak_device_bytes=executor.peak_bytes,
            peak_host_bytes=host.peak_bytes if host is not None else 0,
            nvme_bytes=nvme.used_bytes if nvme is not None else 0,
            moved_bytes=dict(counts.moved_bytes),
            moved_bytes_by_class=dict(counts.by_class),
            fallbacks=counts.fallbacks,
            phase=phase,
            settings={"backend": self._backend.name, **self.settings.chosen},
        )
        if executor.mode is Mode.PLANNED and self._traffic.keep_spans:
            self._timeline = self._measured_timeline(program)

    def _measured_timeline(self, program: Program) -> Timeline:
        start_ns = self._begun_ns
        executor = self.executor
        ops = tuple(
            OpSpan(max(a - start_ns, 0), max(b - start_ns, 0))
            for a, b in zip(executor.starts_ns, executor.stops_ns, strict=False)
        )
        transfers = []
        for index, link, arrival, size_bytes in self._traffic.spans:
            if index < 0 or not arrival.stop_ns:
                continue
            source, target = _ENDS[link]
            transfers.append(
                TransferSpan(
                    index, source, target, arrival.start_ns - start_ns, arrival.stop_ns - start_ns, size_bytes
                )
            )
        transfers.sort(key=lambda span: span.start_ns)
        step_ns = max([span.stop_ns for span in ops], default=0)
        return Timeline(ops, tuple(transfers), (), {}, step_ns)

    def stats(self) -> Stats:
        """Returns the figures of the last step.

        Raises:
            StateError: no step has ended yet.
        """
        if self._stats is None:
            raise StateError("there are no figures yet; run a training step first")
        return self._stats

    def explain(self) -> str:
        """Returns text: what lives where and why, predicted and measured time, what was left alone and by which rule."""
        if self._last is None:
            return "No training step has run yet: nothing is known of this model's tensors."
        if self._last.plan is None or self._last.trace is None:
            return "The first two steps are traced and measured, with everything moved out; the plan comes with the third."
        lines = describe(self._last.trace, self._last.plan)
        if self._stats is not None:
            stats = self._stats
            lines.append(
                f"Last step ({stats.phase}): {format_seconds(stats.step_s)}, of which compute "
                f"{format_seconds(stats.compute_s)} and waiting for transfers {format_seconds(stats.stall_s)}; "
                f"device peak {format_bytes(stats.peak_device_bytes)} by the engine's count."
            )
        lines.append("Numbers are those of the plain run, bit for bit: nothing is rounded or reordered.")
        lines.append("Tensors saved outside the model's forward (by a loss, say) are counted, not moved; tieroff.scope does.")
        for reason, names in self._unmoved_by_reason().items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            lines.append(f"Left alone, {reason}: {shown}.")
        return "\n".join(lines)

    def _unmoved_by_reason(self) -> dict[str, list[str]]:
        reasons: dict[str, list[str]] = {}
        for name, reason in self._unmoved.items():
            reasons.setdefault(reason, []).append(name)
        return reasons

    def save_run(self, folder: str | Path) -> None:
        """Writes config.toml, trace.json, plan.json and timeline.json of the last planned step into a folder.

        Raises:
            StateError: no step has run under a plan yet.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        trace, plan = self.trace, self.plan
        (path / "config.toml").write_text(self.settings.config_toml, encoding="utf-8")
        save_trace(trace, path / "trace.json")
        save_plan(plan, path / "plan.json")
        timeline = Timeline((), (), ()) if plan.moves_nothing else self.timeline
        save_timeline(timeline, path / "timeline.json")
