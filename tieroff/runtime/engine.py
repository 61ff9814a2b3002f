"""The engine of one wrapped model: from homes at wrap, over tracing and planning, to planned steps and unwrap."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tieroff.core.explain.describe import Explained, explain
from tieroff.core.history import History
from tieroff.core.io.run_folder import Run, save_run
from tieroff.core.plan import Plan
from tieroff.core.seams import Foresight, PlanSource
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.runtime.custody import Custody
from tieroff.runtime.execution.autograd import functorch_is_active
from tieroff.runtime.hooks.forward.compiled import CompiledCall, find_compiled
from tieroff.runtime.hooks.forward.recurrent import RecurrentWeights
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.hooks.host_view import HostView
from tieroff.runtime.hooks.parameters.access import install, uninstall
from tieroff.runtime.hooks.recompute.layers import layers_of
from tieroff.runtime.items.hollow import untouched
from tieroff.runtime.lifecycle.repair import repair
from tieroff.runtime.lifecycle.steps import Steps
from tieroff.runtime.optimizer import state_dicts
from tieroff.runtime.optimizer.bucketed import BucketedStep
from tieroff.runtime.resources import Resources
from tieroff.runtime.settings import Settings
from tieroff.runtime.step.kinds import StepKind
from tieroff.runtime.step.mode import Mode
from tieroff.runtime.step.stats import Stats

WriteReport = Callable[[Run, Path], None]


class Engine:
    """Keeps one model's training inside a budget. Made by `tieroff.wrap`.

    Attributes:
        model: the wrapped module.
        trace, plan: of the kind of step that ran last; StateError before they exist.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        settings: Settings,
        resources: Resources,
        plans: PlanSource,
        foresight: Foresight | None,
        write_report: WriteReport,
    ) -> None:
        """Takes the model over; from here on its parameters may lie below.

        Args:
            model: the root module whose forward begins a step.
            settings: what may move, and how the step runs.
            resources: the device and the stores, which are closed with the engine.
            plans: makes the plans.
            foresight: predicts what steps without a plan use next; None: they fetch each tensor on first use.
            write_report: draws a run on a page.

        Raises:
            StateError: the model cannot be wrapped; it is as it was.
            StoreError: a tier cannot take the parameters; the model is as it was.
        """
        self.model = model
        self.settings = settings
        self.stores = resources.stores
        self._resources, self._backend = resources, resources.backend
        self._plans, self._write_report = plans, write_report
        self._custody = Custody(model, resources, settings, foresight)
        self._steps = Steps(self._custody, plans)
        self.executor = self._custody.executor
        self._compiled: dict[torch.nn.Module, CompiledCall] = {}
        self._slots: list[ForwardSlot | RecurrentWeights | state_dicts.Handle] = []
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def _take_over(self) -> None:
        if getattr(self.model, "_compiled_call_impl", None) is not None:
            raise StateError(
                "this model was compiled in place (model.compile()): calls of it go past tieroff; wrap torch.compile(model) "
                "instead, or leave it uncompiled"
            )
        for module in self.model.modules():
            if any(p is not None and torch.nn.parameter.is_lazy(p) for p in module._parameters.values()):
                raise StateError(
                    f"{type(module).__name__} has lazy parameters, whose sizes nobody knows yet; run one forward on real "
                    "data before tieroff.wrap"
                )
        layers_of(self.model, self.settings.recompute_layers)  # says now what no module is called
        self._backend.tune_allocator(self.settings.allocator_threshold_bytes)
        if self._backend.device.type != "cpu":
            self._custody.move_to_device()
        self._custody.register()
        install(self.model, self.executor.gate)
        for module in self.model.modules():
            if isinstance(module, torch.nn.RNNBase):
                self._slots.append(RecurrentWeights(module, self.executor.gate))
        self._take_compiled()
        root = ForwardSlot(self.model, self._forward)  # begin_in has others, whose inputs are no inputs of the forward
        root.engine = self
        self._slots.append(root)
        self._slots.append(state_dicts.refuse_in_child(self.model, self._custody.can_read))
        if self._backend.device.type != "cpu":
            self._slots.append(state_dicts.install(self.model))
            self._slots.append(ForwardSlot(self.model, self._state_dict, "state_dict"))

    def _take_compiled(self) -> None:
        """Intercepts the calls of submodules that are compiled by now."""
        for module in list(find_compiled(self.model)):
            known = self._compiled.get(module)
            if known is None or not known.is_current:
                self._compiled[module] = CompiledCall(module, self.executor.gate, self.executor.context)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer whose `step` ends a training step.

        Raises:
            StateError: there is one already, or this one cannot be stepped in parts or as a whole.
        """
        self._custody.check_alive()
        if self._custody.stepper is not None:
            raise StateError("an optimizer is attached already; a wrapped model has one")
        executor = self.executor
        stepper = BucketedStep(optimizer, executor.context, executor.gradients, self._steps, self.settings)
        self._slots.append(state_dicts.refuse_in_child(optimizer, self._custody.can_read))
        if self._backend.device.type != "cpu":
            self._slots.append(state_dicts.install_on_optimizer(optimizer))
        self._custody.attach(stepper)
        self._steps.forget()

    @property
    def is_closed(self) -> bool:
        """True once everything was given back, or is about to be."""
        return self._custody.is_closed

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The attached optimizer, None while there is none."""
        stepper = self._custody.stepper
        return stepper.optimizer if stepper is not None else None

    def begin_in(self, method: str) -> None:
        """Lets steps begin in another method of the model too, one that a trainer calls in place of its forward.

        Args:
            method: name of a method that computes the loss, and neither runs backward nor updates. Naming it twice is naming
                it once.
        """
        self._custody.check_alive()
        if not isinstance(self.model.__dict__.get(method), ForwardSlot):
            self._slots.append(ForwardSlot(self.model, self._in_step, method))

    def settle(self) -> None:
        """Takes over what was changed from outside since the last step, and puts optimizer state that is new below."""
        self._custody.check_alive()
        self._steps.check_model()
        if self._custody.stepper is not None:
            self._custody.stepper.state.take_over()

    def take_filled(self, parameter: torch.nn.Parameter) -> None:
        """Takes a parameter that was on the meta device and has its value now; it moves to its lower tier at once."""
        self._custody.take_filled(parameter)
        self._steps.forget()

    def trim(self, parameter: torch.Tensor) -> None:
        """Drops the pages of a parameter's home from memory and page cache; its value stays."""
        self._custody.trim(parameter)

    def close(self) -> None:
        """Gives everything back: a plain module and optimizer with their values intact; threads and files end."""
        if self.is_closed:
            return
        self._custody.is_closed = True
        if not self._custody.is_own_process:
            return  # a forked child: its copies of descriptors are closed by the stores, nothing else is its own
        repair(self._custody)  # an exception may have left anything
        self.executor.abandon()
        self._steps.close()
        for slot in (*self._slots, *self._compiled.values(), *self._steps.recomputation.slots.values()):
            slot.remove()
        uninstall(self.model)
        try:
            if self._custody.stepper is not None:
                self._custody.stepper.remove()
            self._custody.give_back()
        finally:  # also when a drive does not give a value back
            self._backend.tune_allocator(None)
            self._backend.close()
            self._resources.close_stores()

    def _forward(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in the place of the model's forward, also where that is called inside another method that begins a step."""
        if self.settings.compute_dtype is not None and not self.is_closed:
            args, kwargs = self._as_computed(args, kwargs)
        return self._in_step(inner, args, kwargs)

    def _in_step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a method of the model that begins a step, or is called in one that did."""
        self._custody.check_alive()
        if self._custody.may_be_hollow:
            self._custody.check_filled()
        executor = self.executor
        if self._custody.stepper is not None:
            self._custody.stepper.early.check_forward()
        if executor.gate.depth:
            return inner(*args, **kwargs)
        if functorch_is_active():
            return inner(*args, **kwargs) if self.settings.compute_dtype is None else self._infer(inner, args, kwargs)
        args, kwargs = self._to_device(args, kwargs)
        if not torch.is_grad_enabled() or self._custody.has_substitutes():
            return self._infer(inner, args, kwargs)
        self._take_compiled()
        try:
            self._steps.begin_forward(args, kwargs)
            executor.gate.depth += 1
            with contextlib.ExitStack() as hooks:
                if executor.state.mode is not Mode.PASS or self.settings.compute_dtype is not None:
                    hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(*self._saved_tensors_hooks()))
                out = inner(*args, **kwargs)
            executor.gate.check_casts()
            return out
        except BaseException as error:
            torch.set_grad_enabled(True)  # as it was: an exception may come between a guard's entry and its exit
            self._steps.broke()
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                raise StateError(
                    "torch.func transforms inside the forward of a wrapped model do not work while its saved tensors are "
                    "moved (torch: no saved tensor hooks under functorch); wrap the parts that do not use them"
                ) from error
            raise
        finally:
            executor.gate.depth = 0
            executor.gate.forget_casts()
            executor.on_demand.release_reachable()

    def _state_dict(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in the place of the model's `state_dict`: what lies below is given out there."""
        with self.executor.guard.on_host():
            return inner(*args, **kwargs)

    def _saved_tensors_hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        saved = self.executor.saved_tensors
        pack, unpack = saved.pack if self.executor.state.mode is not Mode.PASS else saved.pack_casts, saved.unpack
        # Modules of torch's own that are compiled in place run as they are, and torch would compile what they call instead.
        return (torch.compiler.disable(pack), torch.compiler.disable(unpack)) if self._compiled else (pack, unpack)

    def _to_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = self._backend.device
        if device.type == "cpu":
            return args, kwargs

        def move(leaf: Any) -> Any:
            return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) and leaf.device != device else leaf

        args, kwargs = torch.utils._pytree.tree_map(move, (args, kwargs))
        return args, kwargs

    def _as_computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the inputs in the type that the model computes in."""

        def cast(leaf: Any) -> Any:
            is_cast = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(self.settings.compute_dtype) if is_cast else leaf

        args, kwargs = torch.utils._pytree.tree_map(cast, (args, kwargs))
        return args, kwargs

    def _infer(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward that is no part of the step (no gradients, functional_call): parameters are fetched as they are read."""
        self._steps.check_model()
        with self.executor.inferring():
            return inner(*args, **kwargs)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which tensors saved outside the model, by a loss for example, are moved like its own.

        Enter it after the model's forward has begun the step: around the loss, or around forward and loss together.
        """
        return self.executor.saved_tensors.scope()

    def on_host(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context in which parameters, gradients and buffers are used on the host; see `tieroff.on_host`."""
        if self._backend.device.type == "cpu":
            return contextlib.nullcontext()
        return HostView(self.model, self.executor.homes, self.executor.guard.value_on_host)

    @property
    def trace(self) -> Trace:
        last = self._steps.last
        if last is None or last.trace is None:
            raise StateError("there is no trace yet; it exists after the first training step")
        return last.trace

    @property
    def plan(self) -> Plan:
        last = self._steps.last
        if last is None or last.planned is None:
            raise StateError("there is no plan yet; it is made after the second training step")
        return last.planned.plan

    @property
    def timeline(self) -> Timeline:
        """What the last planned step did when, on compute and on each link."""
        last = self._steps.last if self._steps.readings.last is not None else None
        if last is None or last.ran is None:
            raise StateError("there is no timeline yet; the first planned step is the third")
        return last.ran.timeline

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._backend.device

    def watch(self, seen: Callable[[Stats, Plan | None], None]) -> None:
        """Calls `seen` after every step, with its figures and the plan of its kind, or None while it has none."""
        self._steps.readings.watchers.append(seen)

    @property
    def device_bytes(self) -> int:
        """Bytes of device copies that the engine holds now."""
        return self.executor.traffic.device_bytes

    @property
    def own_device_bytes(self) -> int:
        """Bytes on the device that are the step's: what the engine holds there, and parameters and buffers that stay."""
        device, cared = self._backend.device, self.executor.homes.parameters
        with untouched():
            staying = {
                t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                for t in (*self.model.parameters(), *self.model.buffers())
                if t.device == device and t.layout is torch.strided and id(t) not in cared
            }
        return self.device_bytes + sum(staying.values())

    def stats(self) -> Stats:
        """Returns the figures of the last step.

        Raises:
            StateError: no step has ended yet.
        """
        stats = self._steps.readings.last
        if stats is None:
            raise StateError("there are no figures yet; run a training step first")
        return stats

    @property
    def history(self) -> History:
        """The figures of the last 4096 steps, oldest first."""
        return History(tuple(self._steps.readings.history))

    def explain(self, *, detail: bool = False) -> str:
        """Returns text: five lines on what moved and where, what it cost, exactness, and what was left alone.

        It is of the kind of step that ran last, or, while that has no plan, of the last kind that has one.

        Args:
            detail: adds bytes per class and link, what keeps tensors on the device, and the biggest that move.
        """
        if self._steps.last is None:
            return "No training step has run yet: nothing is known of this model's tensors."
        for kind in self._kinds():
            if kind.planned is not None:
                return self._explain(kind, kind.planned.trace, kind.planned.plan, detail=detail)
        return "The first two steps are traced and measured, with everything moved out; the plan comes with the third."

    def _kinds(self) -> Iterator[StepKind]:
        """Yields the kinds of steps, the one that ran last first."""
        if self._steps.last is not None:
            yield self._steps.last
        yield from reversed(self._steps.kinds.values())

    def _explain(self, kind: StepKind, trace: Trace, plan: Plan, *, detail: bool) -> str:
        stats = self._steps.readings.last
        measured = stats.figures() if stats is not None else None
        is_cpu, dtype = self._backend.device.type == "cpu", self.settings.compute_dtype
        compute_type = "bf16" if dtype is torch.bfloat16 else ""
        stepper = self._custody.stepper
        leaves_gradients = kind.recorded is not None and kind.recorded.leaves_gradients
        may_update = leaves_gradients and stepper is not None and stepper.could_update_in_backward
        step = Explained(trace, plan, measured, self._unmoved_by_reason(), is_cpu, compute_type, may_update)
        return "\n".join(explain(step, detail=detail))

    def _unmoved_by_reason(self) -> dict[str, list[str]]:
        reasons: dict[str, list[str]] = {}
        for name, reason in self._custody.unmoved.items():
            reasons.setdefault(reason, []).append(name)
        return reasons

    def _run(self) -> Run:
        for kind in self._kinds():
            if kind.planned is not None and kind.planned.plan.moves_nothing:
                trace, plan, timeline = kind.planned.trace, kind.planned.plan, Timeline((), (), ())
            elif kind.ran is not None:
                trace, plan, timeline = kind.ran.trace, kind.ran.plan, kind.ran.timeline
            else:
                continue
            explanation = self._explain(kind, trace, plan, detail=True)
            machine = self._plans.machine_of(trace)
            return Run(trace, plan, timeline, self.settings.config_toml, self.history.steps, machine, explanation)
        raise StateError("no step has run under a plan yet; the first planned step is the third: run more steps")

    def save_run(self, folder: str | Path) -> None:
        """Writes what the last planned step was and did into a folder, for `tieroff report` and other programs.

        The files are config.toml, trace.json, plan.json, timeline.json, steps.json, planned_machine.toml and explain.txt.

        Raises:
            StateError: no step has run under a plan yet.
            OSError: a file cannot be written; each one is whole, or as it was before.
        """
        save_run(self._run(), folder)

    def save_report(self, path: str | Path) -> None:
        """Writes one HTML page that shows the last planned step: memory, lanes, stalls, decisions, predicted and measured.

        Raises:
            StateError: no step has run under a plan yet.
            ConfigError: plotly is not installed, or the path names no .html file in a folder that exists.
            OSError: the file cannot be written; what was there before is as it was.
        """
        self._write_report(self._run(), Path(path))
