"""The shards of FSDP2 in the tiers: what it gathers is fetched, through its own extension for all-gathers.

[Note: what FSDP2 holds of a shard]
FSDP2 asks the local tensor of a sharded parameter, before it gathers it, whether it has an extension: two attributes, which a
plain tensor may have too. The first gives the bytes to gather, and so each all-gather is a fetch: an event of the step, in
forward and again in backward. FSDP2 also keeps a reference to the memory that a shard had when `fully_shard` made it. It takes
that memory anew as its first forward begins, just after it has looked for extensions, and never looks at it again where there
is one. At that moment every shard that moves lies on a stand-in: one element, stretched to the size that FSDP2 pads shards to
(of any other size, it would make a padded copy, and keep that). So they do when it takes the memory again, after
`load_state_dict`. After it the shards lie where they lay. So nobody but the
engine holds their memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tieroff.errors import StateError
from tieroff.runtime.execution.autograd import current_graph_task
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.hooks.parameters.fsdp2 import HeldByFsdp2, fsdp_roots, gathering_advice, held_by_fsdp2
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.items.offloaded import own_class, set_data, untouched
from tieroff.runtime.items.parameter import ParameterItem, ShardItem
from tieroff.runtime.movable import local_of


class Gathered:
    """What FSDP2 gathered: the memory of whole parameters, which it allocates and frees by itself."""

    def __init__(self, follow: Callable[[torch.UntypedStorage], None]) -> None:
        self._follow = follow
        self._leaves: dict[int, tuple[weakref.ref[torch.UntypedStorage], torch.Tensor]] = {}

    def add(self, whole: torch.Tensor, leaf: torch.Tensor) -> None:
        """This memory is the whole value of a parameter, until FSDP2 frees it."""
        storage = whole.untyped_storage()
        self._leaves[storage._cdata] = (weakref.ref(storage), leaf)
        self._follow(storage)

    def leaf_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the sharded parameter whose whole value a tensor has, or None."""
        if not self._leaves:
            return None
        storage = local_of(tensor).untyped_storage()
        found = self._leaves.get(storage._cdata)
        return found[1] if found is not None and found[0]() is storage else None


class Extension:
    """The extension of one shard for FSDP2's all-gather; it stays on the local tensor for good, since FSDP2 counts on it.

    Attributes:
        padded_size: what FSDP2 gathers of each rank.
        fetch: returns the bytes to gather, on the device; None: they lie where the tensor lies.
    """

    def __init__(self, local: torch.Tensor | None, padded_size: tuple[int, ...]) -> None:
        self._local: Callable[[], torch.Tensor | None] = weakref.ref(local) if local is not None else _nothing
        self._leaf: Callable[[], torch.Tensor | None] = _nothing
        self.padded_size = padded_size
        self._gathered: Gathered | None = None
        self.fetch: Callable[[], torch.Tensor] | None = None
        self._dismiss: Callable[[], None] = _nothing
        self.was_asked = False
        self._lent: torch.Tensor | None = None

    def attach(
        self, leaf: torch.Tensor, fetch: Callable[[], torch.Tensor], dismiss: Callable[[], None], gathered: Gathered
    ) -> None:
        """From now on the bytes come from an engine."""
        self.fetch, self._dismiss, self._gathered, self._leaf = fetch, dismiss, gathered, weakref.ref(leaf)

    def detach(self) -> None:
        """From now on the bytes are those of the tensor, wherever it lies."""
        self.fetch = self._gathered = self._lent = None
        self._dismiss = _nothing

    def before(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        """Gives this rank's part of the all-gather: padded, and in the type that is computed with, as FSDP2 makes them."""
        local = self.local
        self.was_asked = True
        value = self.fetch() if self.fetch is not None else local.detach()
        if not value.is_cpu:
            self._lent = value  # FSDP2's stream may read it later than the host lets go of it
        if tuple(value.shape) != self.padded_size:
            padded = value.new_zeros(self.padded_size)
            padded.narrow(0, 0, value.shape[0]).copy_(value)
            value = padded
        dtype = mp_policy.param_dtype
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        return (value,), None

    def after(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: torch.Tensor | None = None) -> Any:
        """Gives FSDP2 the whole parameter: what it gathered, as it is."""
        (whole,) = outputs
        leaf = self._leaf()
        if self._lent is not None:  # compute's stream is behind the all-gather from here on
            self._lent = None
            self._dismiss()
        if self._gathered is not None and leaf is not None:
            self._gathered.add(whole, leaf)
        return None if out is not None else (whole, ())

    def __deepcopy__(self, memo: dict[int, Any]) -> Extension:
        return Extension(None, self.padded_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return Extension, (None, self.padded_size)

    @property
    def local(self) -> torch.Tensor:
        """The tensor that it was made for.

        Raises:
            StateError: this is the extension of a copy of it.
        """
        local = self._local()
        if local is None:
            raise StateError(
                "expected FSDP2 to gather the shard that tieroff took over, but got a copy of it: give the module its own "
                "parameter back, and copy values into it"
            )
        return local

    def belongs_to(self, local: torch.Tensor) -> bool:
        """True for the tensor that it was made for, and for no copy of it."""
        return self._local() is local


def _nothing() -> None:
    """What a reference to nothing gives."""


def extension_of(local: torch.Tensor) -> Extension | None:
    """Returns the extension that a local tensor got here, or None."""
    owner = getattr(getattr(local, "fsdp_pre_all_gather", None), "__self__", None)
    return owner if isinstance(owner, Extension) and owner.belongs_to(local) else None


class Hidden:
    """Shards that lie on stand-ins for a moment; see [Note: what FSDP2 holds of a shard]."""

    def __init__(self) -> None:
        self._values: list[tuple[torch.Tensor, torch.Tensor, type]] = []

    def hide(self, extensions: Iterable[Extension]) -> None:
        """FSDP2 takes the memory of these next."""
        for extension in extensions:
            local: Any = extension.local
            kind = type(local)
            # A recorder would take memory that lies below for the step's own.
            with untouched(), _disable_current_modes():
                self._values.append((local, local.detach(), kind))
                set_data(local, local.new_zeros(()).expand(extension.padded_size))
            local.__class__ = own_class(local)  # nothing is below for a moment

    def show(self, *_: Any) -> None:
        """The shards lie where they lay."""
        local: Any
        while self._values:
            local, value, kind = self._values.pop()
            set_data(local, value)
            local.__class__ = kind


class FirstForward:
    """Has FSDP2 let go of the shards under one of its outermost modules, when that one runs for the first time."""

    def __init__(
        self,
        root: torch.nn.Module,
        hidden: Hidden,
        shards: Callable[[torch.nn.Module], Iterable[Extension]],
        return_freed: Callable[[], None],
    ) -> None:
        self._hidden, self._shards, self._return_freed = hidden, shards, return_freed
        self._handles = [
            root.register_forward_pre_hook(self._hide, prepend=True),  # FSDP2's own runs next
            root.register_forward_pre_hook(self._show),
            root.register_forward_hook(self._show, always_call=True),  # FSDP2's own raised
        ]

    def _hide(self, module: torch.nn.Module, args: Any) -> None:
        self._hidden.hide(self._shards(module))

    def _show(self, *_: Any) -> None:
        self._hidden.show()
        self._return_freed()  # where the shards lay
        self.remove()

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()


class Loading:
    """Has FSDP2 let go of a module's shards again, of which it takes the memory anew after `load_state_dict`."""

    def __init__(
        self, module: torch.nn.Module, hidden: Hidden, shards: Callable[[torch.nn.Module], Iterable[Extension]]
    ) -> None:
        first = module.register_load_state_dict_post_hook(lambda module, _: hidden.hide(shards(module)))
        # In front of FSDP2's, which is there since `fully_shard`: such hooks have no `prepend`.
        hooks: Any = module._load_state_dict_post_hooks
        hooks.move_to_end(first.id, last=False)
        self._handles = [first, module.register_load_state_dict_post_hook(hidden.show)]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()


class Shards:
    """The parameters of one model that FSDP2 shards, and that move.

    Attributes:
        gathered: their whole values, while FSDP2 has them.
        is_beginning: a step has begun, and the root's shards are gathered before its forward.
    """

    def __init__(self, context: StepContext, reads: ParameterReads) -> None:
        self._context, self._reads = context, reads
        self.gathered = Gathered(self._follow)
        self.is_beginning = False
        self._held: dict[int, HeldByFsdp2] = {}
        self._extensions: dict[int, Extension] = {}  # by id of the parameter
        self._hidden = Hidden()
        self._first: list[FirstForward] = []
        self._loading: list[Loading] = []

    def look(self, model: torch.nn.Module) -> None:
        """Finds the parameters that FSDP2 shards."""
        self._held = held_by_fsdp2(model)

    @property
    def advice(self) -> str:
        """What would lower the least that a step runs in; "" for a model that FSDP2 does not shard."""
        return gathering_advice(self._held.values())

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the parameter that people hold for one that a module has just now: FSDP2 puts the whole in its place."""
        leaf = self.gathered.leaf_of(parameter)
        return parameter if leaf is None else leaf

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._held

    def __bool__(self) -> bool:
        return bool(self._held)

    def why_kept(self, parameter: torch.Tensor) -> str:
        """Returns why this shard cannot have a home below, or "" when it can.

        Raises:
            StateError: FSDP2 was used before, and would not see the extension.
        """
        held, local = self._held[id(parameter)], local_of(parameter)
        if local.numel() == 0 or local.is_meta:
            return "it has no bytes"
        if held.why_kept:
            return held.why_kept
        if held.is_settled:
            raise StateError(
                "expected a model that FSDP2 has not run yet, since it looks for what tieroff adds to its all-gathers in its "
                "first forward (or unshard); call tieroff.wrap right after fully_shard and the optimizer, or leave "
                '"parameters" out of [plan] cover'
            )
        return ""

    def take(self, item: ShardItem) -> None:
        """Has FSDP2 gather an item's bytes from wherever they lie."""
        leaf, local = item.leaf, item.living
        assert leaf is not None
        extension = extension_of(local)
        if extension is None:
            extension = Extension(local, self._held[id(leaf)].padded_size)
            named: Any = local
            named.fsdp_pre_all_gather, named.fsdp_post_all_gather = extension.before, extension.after
        extension.attach(leaf, functools.partial(self._fetch, item), functools.partial(self._dismiss, item), self.gathered)
        self._extensions[id(leaf)] = extension

    def keep_only(self, items: Iterable[ParameterItem]) -> None:
        """Everything was taken: the extensions of other shards have no engine any more."""
        kept = {id(item.leaf) for item in items if isinstance(item, ShardItem)}
        for key in [key for key in self._extensions if key not in kept]:
            self._extensions.pop(key).detach()

    def await_first_forward(self, model: torch.nn.Module) -> None:
        """Has FSDP2 let go of the shards when it runs first; see [Note: what FSDP2 holds of a shard]."""
        for root in fsdp_roots(model):
            if any(True for _ in self._under(root)):
                return_freed = self._context.traffic.backend.return_freed
                self._first.append(FirstForward(root, self._hidden, self._under, return_freed))
            self._loading += [
                Loading(module, self._hidden, self._of) for module in root.modules() if any(True for _ in self._of(module))
            ]

    def _under(self, root: torch.nn.Module) -> Iterator[Extension]:
        """Yields the extensions under a root that FSDP2 has not run with; `load_state_dict` may have changed them."""
        for parameter in root.parameters():
            if id(parameter) in self._extensions and not self._held[id(parameter)].has_run:
                yield self._extensions[id(parameter)]

    def _of(self, module: torch.nn.Module) -> Iterator[Extension]:
        """Yields the extensions of a module's own shards."""
        for parameter in module.parameters(recurse=False):
            if id(parameter) in self._extensions:
                yield self._extensions[id(parameter)]

    def check_seam(self) -> None:
        """Called after a forward.

        Raises:
            StateError: FSDP2 gathered shards without asking for their bytes, so it computed with others.
        """
        if self._first and not any(extension.was_asked for extension in self._extensions.values()):
            raise StateError(
                f"expected FSDP2 of torch {torch.__version__} to gather shards through their fsdp_pre_all_gather, but its "
                'first forward did not ask for any: leave "parameters" out of [plan] cover'
            )
        self._first = []

    def is_in_step(self) -> bool:
        """Returns whether what FSDP2 gathers now is for a step."""
        return self._reads.depth > 0 or self.is_beginning or current_graph_task() != -1

    def show(self) -> None:
        """Every shard lies on its own memory again, also after an exception in FSDP2's first forward."""
        self._hidden.show()

    def close(self) -> None:
        """The engine ends: shards are gathered from where they lie then."""
        self._hidden.show()
        for first in self._first:
            first.remove()
        for loading in self._loading:
            loading.remove()
        self.keep_only(())

    def _fetch(self, item: ShardItem) -> torch.Tensor:
        self.show()  # FSDP2 has let go by now
        is_in_step = self.is_in_step()
        with self._context.state.lock:
            with self._context.traffic.backend.computing():
                value = self._reads.fetch.shard(item) if is_in_step else self._reads.fetch.outside(item)
            if item.arrival is not None:
                item.arrival.wait()  # FSDP2's stream for all-gathers
        return value

    def _dismiss(self, item: ShardItem) -> None:
        """FSDP2 is done with what it was given: the plan keeps it until here."""
        recorder = self._context.state.record.recorder
        if recorder is not None:
            recorder.read(item.key)

    def _follow(self, storage: torch.UntypedStorage) -> None:
        recorder = self._context.state.record.recorder
        if recorder is not None:
            recorder.resizes(storage)
