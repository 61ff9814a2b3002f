"""The engine of one wrapped model: from homes at wrap, over tracing and planning, to planned steps and unwrap."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tieroff.core.history import History
from tieroff.core.io.run_folder import Run, save_run
from tieroff.core.plan import Plan
from tieroff.core.seams import Foresight, PlanSource
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import StateError
from tieroff.runtime.execution.autograd import functorch_is_active, is_followed, refused_hooks
from tieroff.runtime.hooks.forward.compiled import CompiledCall, find_compiled
from tieroff.runtime.hooks.forward.inputs import as_computed, elements_in, makes_graph, signature_of, to_device
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.hooks.host_view import HostView
from tieroff.runtime.hooks.parameters.access import install, uninstall
from tieroff.runtime.hooks.parameters.fsdp2 import fsdp_roots
from tieroff.runtime.hooks.recompute.layers import layers_of
from tieroff.runtime.hooks.unattached import check_shares, inside
from tieroff.runtime.items.offloaded import untouched
from tieroff.runtime.lifecycle.early import EarlyBegin, has_begun
from tieroff.runtime.lifecycle.repair import is_torn_by, repair
from tieroff.runtime.lifecycle.steps import Steps
from tieroff.runtime.managed.model import ManagedModel
from tieroff.runtime.movable import refuse_copies, refuse_lazy
from tieroff.runtime.optimizer import state_dicts
from tieroff.runtime.optimizer.bucketed import BucketedStep
from tieroff.runtime.reporting import Reporting
from tieroff.runtime.resources import Resources
from tieroff.runtime.settings import Settings
from tieroff.runtime.signal_safety import is_interrupting, leaves_modes_alone, runs_user_code
from tieroff.runtime.step.mode import PASS
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
        with contextlib.ExitStack() as refused:
            refused.callback(self._backend.close)  # others may use it on; `close` needs all that follows
            self._managed = ManagedModel(model, resources, settings, foresight)
            self._steps = Steps(self._managed, plans)
            self.executor = self._managed.executor
            self._reporting = Reporting(self._managed, self._steps, plans)
            self._compiled: dict[torch.nn.Module, CompiledCall] = {}
            self._slots: list[state_dicts.Handle] = []
            refused.pop_all()
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
        refuse_copies(self.model)
        refuse_lazy(self.model, "one forward on real data before tieroff.wrap")
        layers_of(self.model, self.settings.recompute_layers)  # says now what no module is called
        self._backend.tune_allocator(self.settings.allocator_threshold_bytes)
        if self._backend.device.type != "cpu":
            self._managed.move_to_device()
        self._slots += self._managed.covers
        self._managed.register()
        self._managed.unattached.watch(self._steps.before_first_update)
        self.executor.shards.await_first_forward(self.model)
        self.executor.communication.watch(self.model)
        install(self.model, self.executor.reads)
        self._take_compiled()
        if self.model in fsdp_roots(self.model):
            self._slots.append(EarlyBegin(self._managed, self._steps))
        root = ForwardSlot(self.model, self._forward)  # begin_in has others, whose inputs are no inputs of the forward
        root.engine = self
        self._slots.append(root)
        self._slots.append(state_dicts.refuse_in_child(self.model, self._managed.can_read, self))
        if self._backend.device.type != "cpu":
            given = state_dicts.install(self.model, self._managed.given_out)
            self._slots += [given, ForwardSlot(self.model, self._state_dict, "state_dict")]
        else:
            self._slots += [state_dicts.part_model(self.model, self._managed.below), state_dicts.copy_in_handlers(self.model)]

    def _take_compiled(self) -> None:
        """Intercepts the calls of the submodules that are compiled by now, and of no others."""
        compiled = dict.fromkeys(find_compiled(self.model))
        for gone in self._compiled.keys() - compiled.keys():
            self._compiled.pop(gone).remove()
        for module in compiled:
            known = self._compiled.get(module)
            if known is None or not known.is_current:
                self._compiled[module] = CompiledCall(module, self.executor.reads, self.executor.context)
        self.executor.hooks.has_compiled = bool(self._compiled)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the optimizer whose `step` ends a training step.

        Raises:
            StateError: there is one already, or this one cannot be stepped in parts or as a whole.
        """
        optimizer = inside(optimizer)
        self._managed.check_alive()
        if self._managed.stepper is not None:
            raise StateError("an optimizer is attached already; a wrapped model has one: tieroff.unwrap(model) to take another")
        check_shares(self.model, optimizer)
        self._managed.unattached.attach(optimizer)
        executor = self.executor
        stepper = BucketedStep(optimizer, executor.context, executor.gradients, self._steps, self.settings)
        self._slots.append(state_dicts.refuse_in_child(optimizer, self._managed.can_read))
        below, given, device = self._managed.below, self._managed.given_out, self._backend.device
        self._slots.append(state_dicts.install_on_optimizer(optimizer, device, below, given))
        self._slots += state_dicts.load_below(optimizer, device, self._steps.end_updated, stepper.state.take_over)
        self._steps.come_back()
        self._managed.attach(stepper)
        self._steps.forget()

    @property
    def is_closed(self) -> bool:
        """True once everything was given back, or is about to be."""
        return self._managed.is_closed

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The attached optimizer, None while there is none."""
        return self._managed.optimizer

    def begin_in(self, method: str) -> None:
        """Lets steps begin in another method of the model too, one that a trainer calls in place of its forward.

        Args:
            method: name of a method that computes the loss, and neither runs backward nor updates. Naming it twice is naming
                it once.
        """
        self._managed.check_alive()
        if not callable(getattr(self.model, method, None)):
            near = difflib.get_close_matches(method, dir(self.model), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "name one that computes the loss, such as 'training_step'"
            raise StateError(f"expected the name of a method of {type(self.model).__name__}, got {method!r}; {hint}")
        if not isinstance(self.model.__dict__.get(method), ForwardSlot):
            self._slots.append(ForwardSlot(self.model, self._in_step, method))

    def settle(self) -> None:
        """Takes over what was changed from outside since the last step, and puts optimizer state that is new below."""
        self._managed.check_alive()
        self._steps.come_back()
        self._steps.check_model()
        if self._managed.stepper is not None:
            self._managed.stepper.state.take_over()

    def take_filled(self, parameter: torch.nn.Parameter) -> None:
        """Takes a parameter that was on the meta device and has its value now; it moves to its lower tier at once."""
        self._steps.come_back()
        self._managed.take_filled(parameter)
        self._steps.forget()

    def trim(self, parameter: torch.Tensor) -> None:
        """Drops the pages of a parameter's home from memory and page cache; its value stays."""
        self._managed.trim(parameter)

    def sleep(self) -> None:
        """Sends everything below that can move; see `tieroff.sleep`."""
        self.settle()
        self._steps.sleep()

    def wake(self) -> None:
        """Brings back what the plan keeps on the device; see `tieroff.wake`."""
        self._steps.wake()

    @property
    def is_asleep(self) -> bool:
        """True from `sleep` to `wake`, or to the next step."""
        return self._managed.is_asleep

    def close(self) -> None:
        """Gives everything back: a plain module and optimizer with their values intact; threads and files end."""
        if self.is_closed:
            return
        self._managed.is_closed = True
        if not self._managed.is_own_process:
            return  # a forked child: its copies of descriptors are closed by the stores, nothing else is its own
        self._managed.unattached.stop()
        repair(self._managed)  # an exception may have left anything
        self._managed.given_out.take_back()
        self.executor.abandon()
        self._steps.close()
        self._plans.close()
        for slot in (*self._slots, *self._compiled.values(), *self._steps.recomputation.slots.values()):
            slot.remove()
        uninstall(self.model)
        try:
            if self._managed.stepper is not None:
                self._managed.stepper.remove()
            self._managed.give_back()
        finally:  # also when a drive does not give a value back
            self._resources.close()

    @runs_user_code
    def _forward(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in the place of the model's forward, also where that is called inside another method that begins a step."""
        if self.settings.compute_dtype is not None and not self.is_closed:
            args, kwargs = as_computed(self.settings.compute_dtype, args, kwargs)
        return self._in_step(inner, args, kwargs)

    @leaves_modes_alone
    @runs_user_code
    def _in_step(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a method of the model that begins a step, or is called in one that did."""
        self._managed.check_alive()
        if self._managed.may_be_on_meta:
            self._managed.check_filled()
        executor = self.executor
        if self._managed.stepper is not None:
            self._managed.stepper.early.check_forward()
        if executor.reads.beside.count:
            return inner(*args, **kwargs)
        if not torch.is_grad_enabled() and is_interrupting():
            args, kwargs = to_device(self._backend.device, args, kwargs)
            with executor.interrupting():
                return inner(*args, **kwargs)
        if executor.reads.is_interrupting() or is_followed():
            return self._beside(inner, args, kwargs)
        if executor.reads.is_apart():
            if not torch.is_grad_enabled():
                return self._beside(inner, args, kwargs)
            executor.claim()
        if executor.reads.depth:
            return inner(*args, **kwargs)
        if functorch_is_active():
            return inner(*args, **kwargs) if self.settings.compute_dtype is None else self._infer(inner, args, kwargs)
        args, kwargs = to_device(self._backend.device, args, kwargs)
        if not makes_graph(self.model, args, kwargs):
            return self._infer(inner, args, kwargs)
        is_bypassed = self._steps.stays_bypassed(args, kwargs)
        if not is_bypassed:
            walk = self._managed.walk()
            if walk.has_substitutes:
                return self._infer(inner, args, kwargs)
            signature = signature_of(self.model, args, kwargs, walk.trained)
            if walk.has_compiled or self._compiled:
                self._take_compiled()
        try:
            if is_bypassed:
                self._steps.begin_bypassed(args, kwargs)
            elif not has_begun(executor):
                self._steps.begin_forward(signature, args, kwargs, walk)
            executor.reads.depth += 1
            with contextlib.ExitStack() as hooks:
                if executor.state.mode is not PASS or self.settings.compute_dtype is not None:
                    hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(*executor.hooks.pair()))
                out = inner(*args, **kwargs)
            executor.reads.check_casts()
            executor.shards.check_seam()
            self._steps.returned(out)
            return out
        except BaseException as error:
            torch.set_grad_enabled(True)  # as it was, already for what follows: see `leaves_modes_alone`
            self._steps.broke()
            if (refused := refused_hooks(error)) is not None:
                raise refused from error
            raise
        finally:
            executor.reads.depth, executor.state.inside = 0, executor.state.inside + 1  # outside of the `try`
            executor.forward_is_left(self._steps.broke)

    @runs_user_code
    def _state_dict(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs in the place of the model's `state_dict`: what lies below is given out there."""
        self._managed.given_out.take_back()
        with self.executor.guard.on_host():
            return inner(*args, **kwargs)

    @runs_user_code
    def _beside(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward beside the step: in another thread, in a handler while the engine moves something, or for a graph."""
        args, kwargs = to_device(self._backend.device, args, kwargs)
        with self.executor.beside():
            return inner(*args, **kwargs)

    @runs_user_code
    def _infer(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward that is no part of the step (no gradients, functional_call): parameters are fetched as they are read."""
        self._steps.mend()
        try:
            with self.executor.state.lock:  # other threads may read
                self._steps.check_model()
            with self.executor.inferring(elements_in((args, kwargs))):
                out = inner(*args, **kwargs)
                self.executor.shards.check_seam()
                return out
        except BaseException as error:
            if is_torn_by(self._managed, error):
                self._steps.broke()
            raise

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which tensors saved outside the model, by a loss for example, are moved like its own.

        Enter it after the model's forward has begun the step: around the loss, or around forward and loss together.
        """
        return self.executor.hooks.scope()

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
        """What the last planned step that was looked at did when; see [Note: quiet events] in step/quiet.py."""
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
        return self.executor.device_bytes

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
        return self._reporting.explain(detail=detail)

    def save_run(self, folder: str | Path) -> None:
        """Writes what the last planned step was and did into a folder, for `tieroff report` and other programs.

        The files are config.toml, trace.json, plan.json, timeline.json, steps.json, planned_machine.toml, explain.txt, and of
        a rank of several collectives.json: `tieroff report FOLDER` shows all ranks that saved into `FOLDER/rank-N`.

        Raises:
            StateError: no step has run under a plan yet.
            OSError: a file cannot be written; each one is whole, or as it was before.
        """
        save_run(self._reporting.run(), folder)

    def save_report(self, path: str | Path) -> None:
        """Writes one HTML page that shows the last planned step: memory, lanes, stalls, decisions, predicted and measured.

        Raises:
            StateError: no step has run under a plan yet.
            ConfigError: plotly is not installed, or the path names no .html file in a folder that exists.
            OSError: the file cannot be written; what was there before is as it was.
        """
        self._write_report(self._reporting.run(), Path(path))
