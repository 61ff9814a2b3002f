"""Submodules that `torch.compile` made: a call of one is one op, and all its parameters are there before it begins.

Inside compiled code nothing of ours runs: an item access that fetches would end the compiled graph there, and the graphs that
are left compute other last bits than the one that the plain run compiles. So for the time of a call its modules have
plain dicts of fetched values. They have them in every call, also where nothing needs fetching: for dicts of another class, code
would be compiled again. Threads take turns, since each call gives the modules their own dicts back.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tieroff.core.seams import Recorder
from tieroff.runtime.execution.autograd import current_graph_task, functorch_is_active
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.forward.inputs import nodes_behind, storages_in
from tieroff.runtime.hooks.forward.slot import ForwardSlot, behind_slots
from tieroff.runtime.hooks.parameters.access import QuietDict
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.items.offloaded import unwatch
from tieroff.runtime.signal_safety import runs_user_code


def find_compiled(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the outermost modules inside a model whose calls are compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # without it nothing is compiled; importing it takes long
    if dynamo is None:
        return
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        is_optimized = isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None
        if module not in inside and (is_optimized or is_compiled(getattr(module, "forward", None))):
            inside.update(module.modules())
            yield module


def is_compiled(function: object) -> bool:
    """Returns whether this is what `torch.compile` makes of a function: of a module's forward, by assignment or a decorator."""
    function = behind_slots(function)
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def advice_of(model: torch.nn.Module) -> str:
    """Returns what makes the ops of a model smaller that is compiled as a whole; "" for any other."""
    if next(find_compiled(model), None) is not model:
        return ""
    inner = getattr(model, "_orig_mod", model)
    lists = {n: m for n, m in inner.named_modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.Sequential))}
    is_list = lists.pop("", None) is not None
    largest = max(lists, key=lambda name: sum(p.numel() for p in lists[name].parameters()), default="" if is_list else "blocks")
    blocks = f"model.{largest}" if largest else "model"
    return (
        "the model is compiled as a whole, and one compiled call is one op: compile its blocks instead, "
        f"`for block in {blocks}: block.compile()` before tieroff.wrap (regional compilation)"
    )


def compiled_count() -> int:
    """Returns how many graphs this process has compiled so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


class CompiledCall:
    """Stands round the calls of one compiled module."""

    def __init__(self, module: torch.nn.Module, reads: ParameterReads, context: StepContext) -> None:
        self._module, self._reads, self._context = module, reads, context
        self._plain: dict[torch.nn.Module, dict[str, Any]] = {}
        self._turn = threading.RLock()
        self._slot: ForwardSlot | None = None
        self._inner = module._compiled_call_impl
        if self._inner is None:
            self._slot = ForwardSlot(module, self._around)
        else:
            module._compiled_call_impl = self._called

    @property
    def is_current(self) -> bool:
        """False when the module was compiled again since."""
        if self._slot is not None:
            return self._slot.is_in_place
        return self._module._compiled_call_impl == self._called

    def remove(self) -> None:
        """Gives the module its own call back."""
        if self._slot is not None:
            self._slot.remove()
        elif self.is_current:
            self._module._compiled_call_impl = self._inner

    @runs_user_code
    def _called(self, *args: Any, **kwargs: Any) -> Any:
        assert self._inner is not None
        return self._around(self._inner, args, kwargs)

    @runs_user_code
    def _around(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if functorch_is_active():
            return inner(*args, **kwargs)
        # A signal handler that interrupted the engine cannot wait: another thread may wait for what it interrupted.
        has_turn = self._turn.acquire(blocking=not self._reads.is_interrupting())
        try:
            return self._with_plain_dicts(inner, args, kwargs) if has_turn else inner(*args, **kwargs)
        finally:
            if has_turn:
                self._turn.release()

    @runs_user_code
    def _with_plain_dicts(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads, recorder = self._reads, self._context.state.record.recorder
        is_outside = not reads.depth and current_graph_task() == -1
        own = {m: p for m in self._module.modules() if isinstance(p := m.__dict__.get("_parameters"), QuietDict)}
        homes = [home for parameters in own.values() for home in dict.values(parameters) if home is not None]
        given: dict[torch.nn.Module, dict[str, Any]] = {}
        is_beside = bool(reads.beside.count) or reads.is_apart()
        stays = contextlib.ExitStack()
        try:
            if not is_beside:
                stays.enter_context(self._context.on_demand.in_call())
            for module, parameters in own.items():
                given[module] = self._fetch(module, parameters)
            for home in homes:
                unwatch(home)  # compiled code is guarded by the class, too
            if recorder is None or is_outside or is_beside:
                return inner(*args, **kwargs)
            return self._recorded(recorder, homes, inner, args, kwargs)
        finally:
            for module, parameters in own.items():
                self._give_back(module, parameters, given.get(module))
            stays.close()
            self._watch_again(homes)

    def _watch_again(self, homes: list[torch.Tensor]) -> None:
        """Compiled code has run, and user code runs next."""
        with self._context.state.lock:
            for home in homes:
                item = self._context.homes.parameter(home)
                if item is not None:
                    item.watch(self._context.traffic)

    @runs_user_code
    def _recorded(
        self, recorder: Recorder, homes: list[torch.Tensor], inner: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Runs compiled code, which reads its parameters and makes tensors that no recorder sees; so does its backward."""
        parameters, casts = self._context.homes.parameters, self._reads.casts
        for item in (parameters.get(id(home)) for home in homes if not casts.applies_to(home)):  # a cast is there by itself
            if item is not None:
                recorder.read(item.key)
        recorder.begin_unseen(storages_in((args, kwargs, list(self._module.buffers()))), makes_first=True)
        made: list[torch.UntypedStorage] = []
        try:
            out = inner(*args, **kwargs)
            nodes = _compiled_nodes(out, (args, kwargs))
            made += storages_in((out, [_kept_by(node) for node in nodes]))
        finally:
            recorder.end_unseen(made)
            made.clear()  # a storage that is held does not die
        for node in nodes:
            node.register_prehook(lambda grads: recorder.begin_unseen(storages_in(grads)))
            node.register_hook(lambda grads, _: recorder.end_unseen(storages_in(grads)))
        return out

    def _fetch(self, module: torch.nn.Module, parameters: QuietDict) -> dict[str, Any]:
        """Puts a dict of fetched values in the place of a module's parameters; returns a copy of it.

        It is the same dict each time, since compiled code is guarded by what it saw.
        """
        given = {name: parameters[name] for name in parameters}
        plain = self._plain.setdefault(module, {})
        if plain.keys() != given.keys():
            plain.clear()
        plain.update(given)
        module.__dict__["_parameters"] = plain
        return given

    def _give_back(self, module: torch.nn.Module, parameters: QuietDict, given: dict[str, Any] | None) -> None:
        """Gives a module its own dict back; `given` is what it had meanwhile, None where the fetch raised."""
        module.__dict__["_parameters"] = parameters
        plain = self._plain.get(module, {})
        if given is not None:
            for name, value in plain.items():
                if value is not given.get(name):
                    parameters[name] = value  # assigned by the module's own forward
        for name in plain:  # it keeps its size, since another thread may go through it, and no cast
            plain[name] = dict.get(parameters, name)


def _kept_by(node: torch.autograd.graph.Node) -> list[torch.Tensor]:
    """Returns what a compiled graph keeps for its backward past all hooks on saved tensors."""
    return list(getattr(node, "_tensors_no_vc_check", None) or ())


def _compiled_nodes(out: Any, given: Any) -> list[torch.autograd.graph.Node]:
    """Returns the backward of each graph that a call ran: several where its code breaks the graph."""
    return [node for node in nodes_behind(out, given) if "CompiledFunction" in node.name()]
