"""The engine of one wrapped model: from homes at wrap, over tracing and planning, to planned steps and unwrap."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tieroff.core.describe import describe
from tieroff.core.files import save_plan, save_timeline, save_trace
from tieroff.core.plan import Plan
from tieroff.core.recording import Recorder
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.runtime.backend import Backend
from tieroff.runtime.custody import Custody, Settings
from tieroff.runtime.hooks import ForwardSlot, RecurrentWeights
from tieroff.runtime.optimizer import BucketedStep
from tieroff.runtime.parameters import functorch_is_active, install, uninstall
from tieroff.runtime.program import Mode
from tieroff.runtime.stats import Stats
from tieroff.runtime.steps import MakePlan, Steps
from tieroff.storage.store import Store
from tieroff.units import format_bytes, format_seconds


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
        make_plan: MakePlan,
        make_recorder: Callable[[], Recorder],
        on_close: Callable[[], None],
    ) -> None:
        self.model = model
        self.settings = settings
        self.stores = stores
        self._backend = backend
        self._on_close = on_close
        self._custody = Custody(model, backend, stores, settings)
        self._steps = Steps(self._custody, make_plan, make_recorder)
        self.executor = self._custody.executor
        self._slots: list[ForwardSlot | RecurrentWeights] = []
        self._pid = os.getpid()
        self.is_closed = False
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def _take_over(self) -> None:
        for module in self.model.modules():
            if any(p is not None and torch.nn.parameter.is_lazy(p) for p in module._parameters.values()):
                raise StateError(
                    f"{type(module).__name__} has lazy parameters, whose sizes nobody knows yet; run one forward on real "
                    "data before tieroff.wrap"
                )
        self._backend.tune_allocator(self.settings.allocator_threshold_bytes)
        if self._backend.device.type != "cpu":
            self._custody.move_to_device()
        self._custody.register()
        install(self.model, self.executor.gate)
        for module in self.model.modules():
            if isinstance(module, torch.nn.RNNBase):
                self._slots.append(RecurrentWeights(module, self.executor.gate))
        root = ForwardSlot(self.model, self._forward)
        root.engine = self
        self._slots.append(root)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer whose `step` ends a training step.

        Raises:
            StateError: there is one already, or this one cannot be stepped in parts or as a whole.
        """
        self._check_alive()
        if self._custody.stepper is not None:
            raise StateError("an optimizer is attached already; a wrapped model has one")
        self._custody.stepper = BucketedStep(
            optimizer, self.executor, self._before_update, self._steps.after_update, self.settings.min_bytes
        )
        self._custody.stepper.take_over_state()
        self._steps.programs.clear()

    def close(self) -> None:
        """Gives everything back: a plain module and optimizer with their values intact; threads and files end."""
        if self.is_closed:
            return
        self.is_closed = True
        if os.getpid() != self._pid:
            return  # a forked child: its copies of descriptors are closed by the stores, nothing else is its own
        self.executor.abandon()
        for slot in (*self._slots, *self._steps.recomputed.values()):
            slot.remove()
        uninstall(self.model)
        try:
            if self._custody.stepper is not None:
                self._custody.stepper.remove()
            self._custody.give_back()
        finally:  # also when a drive does not give a value back
            self._backend.tune_allocator(None)
            self._backend.close()
            self._on_close()

    def _forward(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in the place of the model's forward."""
        self._check_alive()
        executor = self.executor
        if executor.gate.depth or functorch_is_active():
            return inner(*args, **kwargs)
        args, kwargs = self._to_device(args, kwargs)
        if not torch.is_grad_enabled() or self._custody.has_substitutes():
            return self._infer(inner, args, kwargs)
        self._steps.begin_forward(args, kwargs)
        executor.gate.new_forward(self._backend.device)
        executor.gate.depth += 1
        try:
            if executor.mode is Mode.PASS:
                return inner(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(executor.saved_tensors.pack, executor.saved_tensors.unpack):
                return inner(*args, **kwargs)
        except BaseException as error:
            self._steps.broke()
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                raise StateError(
                    "torch.func transforms inside the forward of a wrapped model do not work while its saved tensors are "
                    "moved (torch: no saved tensor hooks under functorch); wrap the parts that do not use them"
                ) from error
            raise
        finally:
            executor.gate.depth -= 1
            executor.on_demand.let_go()

    def _to_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = self._backend.device
        if device.type == "cpu":
            return args, kwargs

        def move(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) and not leaf.is_cuda else leaf

        args, kwargs = torch.utils._pytree.tree_map(move, (args, kwargs))
        return args, kwargs

    def _infer(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward that is no part of the step (no gradients, functional_call): parameters are fetched as they are read."""
        executor = self.executor
        self._steps.check_model()
        mode, executor.mode = executor.mode, Mode.IDLE
        executor.gate.depth += 1
        try:
            return inner(*args, **kwargs)
        finally:
            executor.gate.depth -= 1
            executor.on_demand.let_go()
            executor.mode = mode

    def _before_update(self) -> None:
        self._check_alive()
        self._steps.before_update()

    def _check_alive(self) -> None:
        if os.getpid() != self._pid:
            raise StateError("this model was wrapped in the parent process; a forked child cannot run it: wrap it there")
        if self.is_closed:
            raise StateError("this engine is closed; wrap the model again")

    @property
    def trace(self) -> Trace:
        last = self._steps.last
        if last is None or last.trace is None:
            raise StateError("there is no trace yet; it exists after the first training step")
        return last.trace

    @property
    def plan(self) -> Plan:
        last = self._steps.last
        if last is None or last.plan is None:
            raise StateError("there is no plan yet; it is made after the second training step")
        return last.plan

    @property
    def timeline(self) -> Timeline:
        """What the last planned step did when, on compute and on each link."""
        timeline = self._steps.timeline
        if timeline is None:
            raise StateError("there is no timeline yet; the first planned step is the third")
        return timeline

    @property
    def device_bytes(self) -> int:
        """Bytes of device copies that the engine holds now."""
        return self.executor.traffic.device_bytes

    def stats(self) -> Stats:
        """Returns the figures of the last step.

        Raises:
            StateError: no step has ended yet.
        """
        stats = self._steps.stats
        if stats is None:
            raise StateError("there are no figures yet; run a training step first")
        return stats

    def explain(self) -> str:
        """Returns text: what lives where and why, predicted and measured time, what was left alone and by which rule."""
        last = self._steps.last
        if last is None:
            return "No training step has run yet: nothing is known of this model's tensors."
        if last.plan is None or last.trace is None:
            return "The first two steps are traced and measured, with everything moved out; the plan comes with the third."
        lines = describe(last.trace, last.plan)
        stats = self._steps.stats
        if stats is not None:
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
        for name, reason in self._custody.unmoved.items():
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
