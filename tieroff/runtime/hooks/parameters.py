"""Fetched parameters: every use of a moved parameter in forward or backward sees a device copy.

A module's `_parameters` becomes a dict whose item access, while a wrapped forward or a backward runs, makes sure that the
home's device copy is there; iteration yields homes. So every use is seen, whoever reads it.

[Note: lifted or minted]
Where home and device are of one kind (the CPU backend) the home itself is lifted: its `.data` lies on the device copy for
a while, and item access returns the home. Where they are not (a host tensor as home, a CUDA device), item access returns a
tensor minted on the device copy: it carries the edge of one autograd node that belongs to the home and lives as long as
its item, so gradients of all uses are summed in the order of the plain run, and hooks, accumulation and DDP act on the
home. One node per access would sum them in another order.

[Note: computed in another type]
With a compute type every read of a floating parameter gives its value cast to that type, minted on any backend, with homes
that stay on the device too. The copy in the home's own type may go as soon as the cast is made. Autograd keeps no casts,
also where nothing moves: they are made again in backward, which sees a home that was written meanwhile. Gradients of one
backward are summed in the compute type and reach the home in its own, which is what FSDP2 does on one rank. The cast belongs
to nobody: a write to it would be lost, so it is an error (of one through `.data`, in the recorded step).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.multiprocessing.reductions import StorageWeakRef

from tieroff.core.seams import Recorder
from tieroff.errors import StateError
from tieroff.runtime.items.homes import ParameterItem
from tieroff.runtime.tensors import probe_of

# The id of the running graph task, or -1 outside a backward.
current_graph_task = torch._C._current_graph_task_id


class Stays:
    """Stands for the item of a parameter that has none: it stays on the device, and only its casts come and go."""

    __slots__ = ("dtype", "name", "tensor")

    def __init__(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self.tensor: torch.Tensor = tensor
        self.dtype = dtype
        self.name = f"a parameter of shape {list(tensor.shape)} that stays on the device"

    def cast(self) -> torch.Tensor:
        """Returns its value in the type that is computed with."""
        return self.tensor.detach().to(self.dtype)


class Gate:
    """Says whether item access fetches, and how. One per engine, shared by all its dicts.

    Attributes:
        is_open: some parameter is below, so accesses have to be looked at.
        updated: ids of parameters that were updated in the backward that runs.
        depth: how many wrapped forwards are running.
        lifts: see [Note: lifted or minted].
        items: id of a home -> its item.
        fetch: returns the valid device value of an item.
        fetch_home: has the home itself lie on the device, and returns it.
        to_home: brings a gradient to the device that its home lies on (only where that is another one).
        dismiss: the device copy of an item is not needed at this moment any more.
        recorder: returns who watches the step that runs, or None.
        compute_dtype: what parameters are cast to for computing; None leaves them as they are.
        live: device values by their storage.
        cast: ids of host homes that were read under autocast since the running forward began.
    """

    def __init__(
        self,
        lifts: bool,
        fetch: Callable[[ParameterItem], torch.Tensor],
        fetch_home: Callable[[ParameterItem], torch.Tensor],
        to_home: Callable[[torch.Tensor, ParameterItem], torch.Tensor],
        dismiss: Callable[[ParameterItem], None],
        recorder: Callable[[], Recorder | None],
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.is_open = False
        self.updated: set[int] = set()
        self.depth = 0
        self.lifts = lifts
        self.items: dict[int, ParameterItem] = {}
        self.fetch = fetch
        self.fetch_home = fetch_home
        self.to_home = to_home
        self.dismiss = dismiss
        self._recorder = recorder
        self.compute_dtype = compute_dtype
        self.live = LiveValues()
        self.cast: set[int] = set()
        self._region: object = None
        self._marker: torch.Tensor | None = None
        self._mints: dict[int, Mint] = {}
        self._casts: list[tuple[str, torch.Tensor, int]] = []

    def look(self, is_open: bool) -> None:
        """Has item accesses be looked at, or not, where the compute type leaves that open."""
        self.is_open = is_open or self.compute_dtype is not None

    def value_for(self, home: torch.Tensor, is_looked_up: bool = False) -> torch.Tensor:
        """Returns what item access gives for a home: itself, or its fetched value.

        Args:
            home: what the module's dict holds.
            is_looked_up: the module only takes rows of it, which autocast does not cast.
        """
        item = self.items.get(id(home))
        if item is not None and item.tensor is not home:
            item = None
        if item is None and not self.casts(home):
            return home
        if item is None and self.depth and not isinstance(home, torch.nn.Parameter):
            return home.to(self.compute_dtype)  # it stands in for a parameter, for one call
        if self.depth == 0:
            if current_graph_task() == -1:
                return home
            # In backward: a recomputation runs with grad enabled; a hook that looks at the parameter wants the home.
            if not torch.is_grad_enabled() and (item is None or home.device == item.compute_device):
                return home
        if functorch_is_active():
            # Tensors made under a transform are its wrappers, which no home may lie on.
            with temporarily_clear_interpreter_stack():
                return self._fetched(item, home, is_looked_up)
        return self._fetched(item, home, is_looked_up)

    def _fetched(self, item: ParameterItem | None, home: torch.Tensor, is_looked_up: bool) -> torch.Tensor:
        if item is None or self.casts(home):
            return self._cast(item, home)
        lifts = self.lifts
        if not lifts and torch.is_autocast_enabled(item.compute_device.type):
            # Autocast keeps the casts of leaves only: a minted weight would be cast, and its gradient rounded, per use.
            lifts = home.device == item.compute_device
            if not lifts and not is_looked_up:
                self._note_cast(item, home)
        if not lifts:
            return self._minted(item, home)
        self.live.add(item, self.fetch_home(item))
        if item.lower is not None:
            # Of many that are read before they are used (a recurrent layer's), the first lie below again by then.
            self.live.add(item, item.lower)
        return home

    def _minted(self, item: ParameterItem, home: torch.Tensor) -> torch.Tensor:
        value = self.fetch(item)
        self.live.add(item, value)
        return self._on(value, home, item)

    def _on(self, value: torch.Tensor, home: torch.Tensor, item: ParameterItem | None) -> torch.Tensor:
        """Returns a tensor on the value's memory through which gradients, if any are wanted, reach the home."""
        if not (home.requires_grad and torch.is_grad_enabled()):
            return value
        mint = self._mints.get(id(home))
        if mint is None or mint.home is not home or mint.item is not item:
            mint = self._mints[id(home)] = Mint(home, value, item, self)
        return mint.on(value)

    # -- computing in another type: see [Note: computed in another type] -------------------------------------------

    def casts(self, home: torch.Tensor) -> bool:
        """True for a parameter that is computed with in another type than its own."""
        return self.compute_dtype is not None and home.is_floating_point() and home.dtype is not self.compute_dtype

    def _cast(self, item: ParameterItem | None, home: torch.Tensor) -> torch.Tensor:
        assert self.compute_dtype is not None
        kept: ParameterItem | Stays = item if item is not None else Stays(home, self.compute_dtype)
        if isinstance(kept, Stays):
            value = kept.cast()
        else:
            value = self.as_computed(kept, self.fetch_home(kept).detach() if self.lifts else self.fetch(kept))
        self.live.add(kept, value)
        if self.depth and not value.is_inference():
            probe = probe_of(value)
            self._casts.append((kept.name, probe, probe._version))
            if (recorder := self._recorder()) is not None:
                recorder.bind(value.untyped_storage(), ("cast", kept.name), is_new=True)
        return self._on(value, home, item)

    def as_computed(self, item: ParameterItem, value: torch.Tensor) -> torch.Tensor:
        """Returns a fetched value in the type that is computed with; the copy it was made from may leave."""
        if not self.casts(value):
            return value
        cast = value.to(self.compute_dtype)
        if not item.is_lifted:
            item.may_be_written = False  # nobody else has seen that copy
        self.dismiss(item)
        return cast

    def check_casts(self) -> None:
        """Returns when nobody wrote to a cast that the running forward was given; in a recorded step, in whatever way.

        Raises:
            StateError: somebody did, and the parameter does not have what was written.
        """
        recorder = self._recorder() if self._casts else None
        written = recorder.written({("cast", name) for name, _, _ in self._casts}) if recorder is not None else set()
        for name, probe, version in self._casts:
            if probe._version != version or ("cast", name) in written:
                raise StateError(
                    f"expected that forward only reads parameters under compute_dtype, but {name} was written in place: what "
                    "was written is lost with the cast it was written to; write parameters outside of forward, or leave "
                    "compute_dtype out"
                )

    def forget_casts(self) -> None:
        """The forward that was given them is over."""
        if self._casts:
            self._casts.clear()
            self.live.sweep()

    def _note_cast(self, item: ParameterItem, home: torch.Tensor) -> None:
        if id(home) in self.cast and torch.is_autocast_cache_enabled() and home.dtype is torch.float32:
            raise StateError(
                f"parameter {item.name} is read twice in one autocast region, and its home lies on the host: torch would sum "
                'its gradients in another order than without tieroff. Leave "parameters" and "gradients" out of [plan] cover, '
                "or give autocast cache_enabled=False"
            )
        self.cast.add(id(home))

    def new_forward(self, device: torch.device) -> None:
        """Forgets which homes autocast has cast, unless the region they were cast in goes on."""
        region = self._autocast_region(device)
        if region is None or region is not self._region:
            self.cast.clear()
        self._region = region

    def _autocast_region(self, device: torch.device) -> object:
        """Returns what is the same object for as long as one autocast region lasts; None outside of one on CUDA.

        Autocast caches the cast of a leaf for a region: the node of that cast tells regions apart. It is held, or another
        could get its address.
        """
        kind = device.type
        if kind == "cpu" or not torch.is_autocast_enabled(kind) or not torch.is_autocast_cache_enabled():
            return None
        if self._marker is None:
            self._marker = torch.zeros(1, 1, device=device, requires_grad=True)
        with torch.enable_grad():
            node = torch.mm(self._marker, self._marker).grad_fn
        return node.next_functions[0][0] if node is not None else None

    def forget_strangers(self) -> None:
        """Drops the nodes of homes that are looked after no more, or anew: each would keep its home alive."""
        self._mints = {k: mint for k, mint in self._mints.items() if mint.item is not None and self.items.get(k) is mint.item}

    def home_of(self, value: object) -> object:
        """Returns the home of a minted tensor that somebody stores as a parameter, or the value itself."""
        return getattr(value, "_tieroff_home", value) if isinstance(value, torch.Tensor) else value


def functorch_is_active() -> bool:
    """True inside `torch.func` transforms, where nothing is hooked."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class _Identity(torch.autograd.Function):
    """The one node of a home: takes gradients on the device, gives them to the home."""

    @staticmethod
    def forward(ctx: Any, home: torch.Tensor, like: torch.Tensor, gate: Gate, item: ParameterItem | None) -> torch.Tensor:
        ctx.gate, ctx.item, ctx.home_device, ctx.home_dtype = gate, item, home.device, home.dtype
        ctx.set_materialize_grads(False)
        # Only shape, type and device matter: the minted tensors bring their own memory.
        return torch.empty((), dtype=like.dtype, device=like.device).expand(home.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        (grad,) = grads
        if grad is not None and grad.device != ctx.home_device:
            grad = ctx.gate.to_home(grad, ctx.item)
        if grad is not None and grad.dtype is not ctx.home_dtype:
            grad = grad.to(ctx.home_dtype)  # after it crossed the link: it is half as large before
        return grad, None, None, None


class _Keep(torch.autograd.Function):
    """A node that only keeps one saved tensor, so that autograd rebuilds it with its edge on any memory."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> None:
        raise AssertionError("nothing flows through a node that only keeps a tensor")


class Mint:
    """Makes tensors on any memory that all carry the one autograd edge of a home."""

    def __init__(self, home: torch.Tensor, like: torch.Tensor, item: ParameterItem | None, gate: Gate) -> None:
        self.home = home
        self.item = item
        # A list of its own: were the hook to hold this object, the two would keep each other alive through autograd's
        # memory, where Python's collector does not look.
        self._value: list[torch.Tensor] = []
        value = self._value
        with torch.enable_grad(), torch.inference_mode(False):
            source = _Identity.apply(home, like, gate, item)  # type: ignore[no-untyped-call]
            # As late in the graph as can be: backward runs it as soon as its gradients are summed, as it would the home's.
            source.grad_fn._set_sequence_nr(2**64 - 1)
            with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: value[0]):
                self._node = _Keep.apply(source).grad_fn  # type: ignore[no-untyped-call]

    def on(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a tensor on the value's memory through which gradients reach the home."""
        self._value.append(value)
        try:
            minted: torch.Tensor = self._node.saved_tensors[0]
        finally:
            self._value.clear()
        minted.__dict__.update(self.home.__dict__)
        minted._is_param = True  # isinstance(w, nn.Parameter) holds, as for the home
        minted._tieroff_home = self.home  # type: ignore[attr-defined]
        return minted


class FetchingDict(dict[str, Any]):
    """A module's `_parameters`; a copy or a pickle of it is a plain dict."""

    __slots__ = ("gate", "is_looked_up")
    gate: Gate
    is_looked_up: bool

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        gate = self.gate
        if gate.updated and id(value) in gate.updated and current_graph_task() != -1:
            raise StateError(
                f"{name} is read in backward (by a checkpoint's recomputation, or a hook) after it was updated there: set "
                "[plan] update_in_backward = false for this model, and go on from a checkpoint"
            )
        return value if value is None or not gate.is_open else gate.value_for(value, self.is_looked_up)

    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, self.gate.home_of(value))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}

    def __copy__(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.items()),)


class LiveValues:
    """Finds the parameter item whose device value lies on a given storage.

    The address alone is reused, so a weak reference to the storage decides.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, ParameterItem | Stays]] = {}

    def add(self, item: ParameterItem | Stays, value: torch.Tensor) -> None:
        """Remembers that `value` is a device value of the item."""
        key = value.untyped_storage()._cdata
        known = self._found.get(key)
        if known is None or known[1] is not item or known[0].expired():
            self._found[key] = (StorageWeakRef(value.untyped_storage()), item)

    def get(self, tensor: torch.Tensor) -> ParameterItem | Stays | None:
        """Returns the item whose value shares its storage with `tensor`, or None."""
        found = self._found.get(tensor.untyped_storage()._cdata)
        if found is None or found[0].expired():
            return None
        return found[1]

    def sweep(self) -> None:
        """Forgets values that died."""
        self._found = {key: entry for key, entry in self._found.items() if not entry[0].expired()}


def install(model: torch.nn.Module, gate: Gate) -> None:
    """Replaces every module's `_parameters`."""
    for module in model.modules():
        parameters = module._parameters
        if type(parameters) not in (dict, OrderedDict) and not isinstance(parameters, FetchingDict):
            continue  # a scripted module: its parameters are not Python's
        if isinstance(parameters, FetchingDict) and parameters.gate is gate:
            continue
        fetching = FetchingDict(parameters.items())
        fetching.gate = gate
        fetching.is_looked_up = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag))
        module.__dict__["_parameters"] = fetching


def uninstall(model: torch.nn.Module) -> None:
    """Gives every module a plain dict again."""
    for module in model.modules():
        parameters = module.__dict__["_parameters"]
        if isinstance(parameters, FetchingDict):
            module.__dict__["_parameters"] = dict(parameters.items())
