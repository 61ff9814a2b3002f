"""Submodules that `torch.compile` made: a call of one is one op, and all its parameters are there before it begins.

Inside compiled code nothing of ours runs: an item access that fetches would end the compiled graph there, and the graphs that
are left compute other last bits than the one that the plain run compiles. So for the time of a call its modules have
plain dicts of fetched values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tieroff.core.seams import Recorder
from tieroff.runtime.at_work import calls_user_code
from tieroff.runtime.execution.autograd import current_graph_task, functorch_is_active
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.forward.inputs import leaves_of
from tieroff.runtime.hooks.forward.slot import ForwardSlot
from tieroff.runtime.hooks.parameters.access import FetchingDict
from tieroff.runtime.hooks.parameters.gate import Gate
from tieroff.runtime.items.hollow import unwatch


def find_compiled(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yields the outermost modules inside a model whose calls are compiled."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # without it nothing is compiled; importing it takes long
    if dynamo is None:
        return
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        is_compiled = isinstance(module, dynamo.OptimizedModule) or module._compiled_call_impl is not None
        if is_compiled and module not in inside:
            inside.update(module.modules())
            yield module


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

    def __init__(self, module: torch.nn.Module, gate: Gate, context: StepContext) -> None:
        self._module, self._gate, self._context = module, gate, context
        self._plain: dict[torch.nn.Module, dict[str, Any]] = {}
        self._slot: ForwardSlot | None = None
        self._inner = module._compiled_call_impl
        if self._inner is None:
            self._slot = ForwardSlot(module, self._around)
        else:
            module._compiled_call_impl = self._called

    @property
    def is_current(self) -> bool:
        """False when the module was compiled again since."""
        return self._slot is not None or self._module._compiled_call_impl == self._called

    def remove(self) -> None:
        """Gives the module its own call back."""
        if self._slot is not None:
            self._slot.remove()
        elif self.is_current:
            self._module._compiled_call_impl = self._inner

    @calls_user_code
    def _called(self, *args: Any, **kwargs: Any) -> Any:
        assert self._inner is not None
        return self._around(self._inner, args, kwargs)

    @calls_user_code
    def _around(self, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gate = self._gate
        is_outside = not gate.depth and current_graph_task() == -1
        if is_outside or functorch_is_active():
            return inner(*args, **kwargs)
        own: dict[torch.nn.Module, FetchingDict] = {}
        homes: list[torch.Tensor] = []
        if gate.is_open:
            own = {m: p for m in self._module.modules() if isinstance(p := m.__dict__["_parameters"], FetchingDict)}
            homes = [home for fetching in own.values() for home in dict.values(fetching) if home is not None]
        try:
            given = {module: self._fetch(module, fetching) for module, fetching in own.items()}
            for home in homes:
                unwatch(home)  # compiled code is guarded by the class, too
            if self._context.state.record.recorder is None:
                return inner(*args, **kwargs)
            return self._recorded(self._context.state.record.recorder, homes, functools.partial(inner, *args, **kwargs))
        finally:
            for module, fetching in own.items():
                module.__dict__["_parameters"] = fetching
                for name, value in self._plain[module].items():
                    if value is not given[module].get(name):
                        fetching[name] = value  # assigned by the module's own forward
                self._plain[module].clear()
            self._watch_again(homes)

    def _watch_again(self, homes: list[torch.Tensor]) -> None:
        """Compiled code has run, and user code runs next."""
        with self._context.state.lock:
            for home in homes:
                item = self._context.homes.parameter(home)
                if item is not None:
                    item.watch(self._context.traffic)

    @calls_user_code
    def _recorded(self, recorder: Recorder, homes: list[torch.Tensor], run: Callable[[], Any]) -> Any:
        """Runs compiled code, which reads its parameters and makes tensors that no recorder sees; so does its backward."""
        parameters, casts = self._context.homes.parameters, self._gate.casts
        for item in (parameters.get(id(home)) for home in homes if not casts.applies_to(home)):  # a cast is there by itself
            if item is not None:
                recorder.read(item.key)
        recorder.begin_unseen()
        try:
            out = run()
        finally:
            recorder.end_unseen()
        tensors = [leaf for leaf in leaves_of(out) if isinstance(leaf, torch.Tensor)]
        for node in {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}:
            if "CompiledFunction" in node.name():
                node.register_prehook(lambda grads: recorder.begin_unseen())
                node.register_hook(lambda *grads: recorder.end_unseen())
        return out

    def _fetch(self, module: torch.nn.Module, fetching: FetchingDict) -> dict[str, Any]:
        """Puts a dict of fetched values in the place of a module's parameters; returns a copy of it.

        It is the same dict each time, since compiled code is guarded by what it saw.
        """
        given = {name: fetching[name] for name in fetching}
        plain = self._plain.setdefault(module, {})
        plain.update(given)
        module.__dict__["_parameters"] = plain
        return given
