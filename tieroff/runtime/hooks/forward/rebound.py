"""What Functions keep of parameters on their ctx, beside what they save: rebound to handles after forward.

[Note: kept on a ctx]
A Function may keep a view of a parameter as an attribute of its ctx (`ctx.tensors = (None, weight.view(-1, 1))`), which no
hook on saved tensors sees. Such a view holds the memory, so the parameter could not leave before backward, and
`weight.data = x` would neither free it nor be seen by it. So where a parameter of several tensors was read, the modules
around it look, when their forward returns, at what the graph gained since: a view of a parameter that a node keeps is taken
off it, and noted by its geometry. Before the node runs, the parameter is brought up and the view is made anew; after it, the
view goes again. An object that the node keeps, such as a quantization state, is left as it is: the tensors in it lie where
the parameter lies. Other tensors on that ctx, such as the Function's input, come and go with it: see [Note: tensors on a ctx].

Nothing of any library is named or replaced here. What is found nowhere (a view in a closure, in another object, in a node of
C++) holds its parameter up, as any alias does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.execution.fetch import ParameterFetch
from tieroff.runtime.hooks.forward.on_ctx import OnCtx, Packs
from tieroff.runtime.hooks.packed import ParameterView
from tieroff.runtime.hooks.parameters.live import LiveValues
from tieroff.runtime.items.joined.items import JoinedParameter
from tieroff.runtime.items.offloaded import leaves
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.movable import is_wrapper
from tieroff.runtime.step.mode import DEMAND, PLANNED

_DEPTH = 3  # of lists and objects on a ctx


class _Node:
    """A node of the graph that keeps views of parameters, or objects that hold their tensors.

    Args:
        items: the parameters.
        kept: by attribute of the node, what it holds with a handle in the place of each tensor that comes and goes.
    """

    def __init__(self, node: Any, items: list[ParameterItem], kept: dict[str, Any], fetch: ParameterFetch) -> None:
        self._node = weakref.ref(node)
        self._items, self._kept, self._fetch = items, kept, fetch
        self._given = dict[str, Any]()
        vars(node).update(kept)
        node.register_prehook(self._before)
        node.register_hook(self._after)

    def _before(self, grads: Any) -> None:
        """The node runs next."""
        for item in self._items:
            self._fetch.again(item)
        node: Any = self._node()
        here = vars(node)
        self._given = {name: _with_tensors(value) for name, value in self._kept.items() if here.get(name) is value}
        here.update(self._given)

    def _after(self, inputs: Any, outputs: Any) -> None:
        """The node ran; with a kept graph it may again. What its backward put on the ctx itself stays there."""
        node: Any = self._node()
        here, given = vars(node), self._given
        here.update({name: self._kept[name] for name, value in given.items() if here.get(name) is value})
        self._given = {}


def _with_tensors(value: Any) -> Any:
    if isinstance(value, (ParameterView, OnCtx)):
        return value.made()
    return type(value)(map(_with_tensors, value)) if type(value) in (list, tuple) else value


class _Returning:
    """A forward hook of one module. A copy or a pickle of it, in a copied model, looks for nothing.

    Args:
        own: the module's own parameters of several tensors.
    """

    def __init__(self, rebound: Rebound | None = None, own: Sequence[ParameterItem] = ()) -> None:
        self._rebound, self._own = rebound, own

    def __call__(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if self._rebound is not None and not torch.compiler.is_dynamo_compiling():
            self._rebound.returned(self._own, out)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Returning:
        return _Returning()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Returning, ()


class Rebound:
    """Finds what Functions keep of parameters of several tensors, while their modules' forwards return.

    See [Note: kept on a ctx].

    Attributes:
        packs: moves what else a ctx keeps.
    """

    packs: Packs

    def __init__(self, context: StepContext, fetch: ParameterFetch, live: LiveValues) -> None:
        self._context, self._fetch, self._live = context, fetch, live
        self._read: dict[int, ParameterItem] = {}  # by id, whose users have not returned yet
        self._since = 0  # number of the first node that may keep one
        self._handles: list[Any] = []

    def watch(self, model: torch.nn.Module, items: Iterable[ParameterItem]) -> None:
        """Looks from now on after each forward of the modules that have such a parameter, or have one of these inside."""
        self.close()
        leaves_of = {id(item.leaf): item for item in items if isinstance(item, JoinedParameter)}
        if not leaves_of:
            return
        own = {
            name: [leaves_of[id(p)] for p in module._parameters.values() if id(p) in leaves_of]
            for name, module in model.named_modules()
        }
        around = {""} | {name[:end] for name, found in own.items() if found for end in _ends(name)}
        for name, module in model.named_modules():
            if name in around:
                self._handles.append(module.register_forward_hook(_Returning(self, own[name])))

    def close(self) -> None:
        """Looks at nothing from now on."""
        while self._handles:
            self._handles.pop().remove()
        self._read.clear()

    def begin(self) -> None:
        """A step begins; a forward that broke off left nothing to look for."""
        self._read.clear()

    def read(self, item: ParameterItem) -> None:
        """Somebody got this parameter, and may give it to a Function."""
        if isinstance(item, JoinedParameter) and torch.is_grad_enabled():
            if not self._read:
                self._since = torch._C._autograd._get_sequence_nr()
            self._read[id(item)] = item

    def returned(self, own: Sequence[ParameterItem], out: Any) -> None:
        """The forward of a module with these parameters returns."""
        if not self._read:
            return
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            found = self._look(out)
        for item in (*own, *found.values()):
            self._read.pop(id(item), None)  # what was done with it is behind what was returned, or nowhere

    def _look(self, out: Any) -> dict[int, ParameterItem]:
        """Rebinds what nodes behind this output keep of the parameters that were read; returns those that were found."""
        front = [leaf.grad_fn for leaf in leaves(out) if isinstance(leaf, torch.Tensor)]
        seen, found = set[Any](), dict[int, ParameterItem]()
        while front:
            node: Any = front.pop()
            if node is None or node in seen or node._sequence_nr() < self._since:
                continue
            seen.add(node)
            front += [following for following, _ in node.next_functions]
            if isinstance(node, BackwardCFunction):
                found.update(self._rebind(node))
        return found

    def _rebind(self, node: Any) -> dict[int, ParameterItem]:
        found: dict[int, ParameterItem] = {}
        kept = {name: self._without_views(old, found, _DEPTH) for name, old in vars(node).items()}
        if found:
            if self._context.state.mode in (DEMAND, PLANNED):
                kept = {name: self._without_others(value, node, _DEPTH) for name, value in kept.items()}
            changed = {name: value for name, value in kept.items() if value is not vars(node)[name]}
            _Node(node, list(found.values()), changed, self._fetch)
        return found

    def _without_others(self, value: Any, node: Any, depth: int) -> Any:
        """Returns a value with what stands for tensors that are no parameter's; itself where it has none."""
        if isinstance(value, torch.Tensor):
            is_free = OnCtx.may_stand_for(value, node) and self._live.on(value.untyped_storage()) is None
            return OnCtx(value, self.packs) if is_free else value
        if not depth or type(value) not in (list, tuple):
            return value
        values = [self._without_others(one, node, depth - 1) for one in value]
        return value if all(map(is_, values, value)) else type(value)(values)

    def _without_views(self, value: Any, found: dict[int, ParameterItem], depth: int) -> Any:
        """Returns a value with views of parameters that were read noted instead; itself where it has none."""
        if isinstance(value, torch.Tensor):
            return self._noted(value, found)
        if not depth:
            return value
        if type(value) in (list, tuple):
            values = [self._without_views(one, found, depth - 1) for one in value]
            return value if all(map(is_, values, value)) else type(value)(values)
        if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
            for one in vars(value).values():  # it keeps what it has: these are a parameter's own tensors
                if isinstance(one, torch.Tensor):
                    found.update((id(item), item) for item in self._read.values() if _is_one_of(one, item))
                else:
                    self._without_views(one, found, depth - 1)
        return value

    def _noted(self, tensor: torch.Tensor, found: dict[int, ParameterItem]) -> Any:
        if is_wrapper(tensor) or tensor.layout is not torch.strided:
            found.update((id(item), item) for item in self._read.values() if _is_one_of(tensor, item))
            return tensor
        item = self._live.on(tensor.untyped_storage())
        if not isinstance(item, ParameterItem) or self._read.get(id(item)) is not item:
            return tensor
        found[id(item)] = item
        if _is_one_of(tensor, item):
            return tensor
        return ParameterView.noted(tensor, item)


def _is_one_of(tensor: torch.Tensor, item: ParameterItem) -> bool:
    return any(tensor is one for one in (item.tensor, item.outer, *item.others))


def _ends(name: str) -> Iterator[int]:
    """Yields where the names of a module and of those around it end."""
    yield len(name)
    yield from (place for place, letter in enumerate(name) if letter == ".")
