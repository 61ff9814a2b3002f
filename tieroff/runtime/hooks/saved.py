"""Saved tensors: what autograd keeps from forward for backward, packed, moved and brought back.

[Note: by order]
What a saved tensor is takes some twenty questions: whose storage it is, whether that is moved, is known, is small. Steps that
follow one plan save the same tensors in the same order, so each is asked once, and what needs nothing of the engine is kept by
its place in that order, if its storage has the size that it had. A tensor that comes in another's place is kept, at worst,
which is right whatever it is; an activation's event then says that the step has left its plan.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from tieroff.core.place import module_of
from tieroff.core.seams import Subject
from tieroff.core.tensor import TensorClass
from tieroff.runtime.execution.activations import ActivationStorage, ActivationStorages, LiveActivations, label_here
from tieroff.runtime.execution.autograd import current_graph_task, reader_may_write
from tieroff.runtime.execution.context import StepContext
from tieroff.runtime.execution.on_demand import TICKS_OF_ONE_OP
from tieroff.runtime.hooks.packed import Kept, Packed, PackedBefore, PackedParameter, PackedParts, ResidentView, is_plain
from tieroff.runtime.hooks.parameters.leaves import give, is_asked, leaf_saved_here
from tieroff.runtime.hooks.parameters.live import UnmovedParameter
from tieroff.runtime.hooks.parameters.reads import ParameterReads
from tieroff.runtime.hooks.parameters.sharded import Gathered
from tieroff.runtime.hooks.written import WrittenActivations
from tieroff.runtime.items.activation import ActivationItem
from tieroff.runtime.items.offloaded import PLAIN, guarded, is_offloaded
from tieroff.runtime.items.parameter import ParameterItem
from tieroff.runtime.items.residency import DEVICE, LOWER
from tieroff.runtime.settings import Settings
from tieroff.runtime.step.executable import Executable
from tieroff.runtime.step.kinds import Measuring
from tieroff.runtime.step.mode import DEMAND, IDLE, PLANNED
from tieroff.runtime.step.quiet import NOTHING
from tieroff.runtime.tensors import alias_of, bytes_of, count_together


class SavedTensors:
    """The pack and unpack hooks of one engine.

    Attributes:
        fixed: storages that are never moved, by identity (the step's inputs, module buffers, homes on the device).
        gathered: whole parameters, which FSDP2 frees and gathers again.
        is_closed: graphs that are left find what they saved on the device.
    """

    def __init__(self, context: StepContext, reads: ParameterReads, activations: LiveActivations, settings: Settings) -> None:
        self._context, self._reads, self._activations = context, reads, activations
        self._state, self._clock, self._live = context.state, context.clock, reads.live
        is_covered = TensorClass.ACTIVATION in settings.covers
        self._min_bytes = max(settings.min_bytes, 1) if is_covered else None
        self._storages = ActivationStorages()
        self._resident: dict[int, list[weakref.ref[ResidentView]]] = {}  # activations in this step, by storage
        self._resident_parameters: list[weakref.ref[ResidentView]] = []
        self._count = 0  # of storages that were packed in this step
        self._written = WrittenActivations()
        self._order: list[PackedBefore | None] = []  # of the steps that follow one plan; None: to be looked at
        self._place = 0  # in that order, of the tensor that is saved next
        self._places: tuple[int, ...] = ()  # of activations, in the recorded step
        self._ordered_for: Executable | None = None  # the plan
        self._quiet = NOTHING
        self.fixed: Mapping[int, object] = {}
        self.gathered: Gathered | None = None
        self.is_closed, self._is_cpu = False, context.traffic.backend.device.type == "cpu"
        context.clock.at_divergence.append(self)

    def begin(self) -> None:
        """A step begins."""
        self.left_plan()  # graphs that outlived the step before
        self._count = self._place = 0
        planned = self._context.runner.planned
        executable = planned.executable if planned is not None and self._context.state.mode is PLANNED else None
        if executable is None or executable is not self._ordered_for:
            self._order, self._ordered_for = [], executable
        self._places = planned.recorded.places if planned is not None and executable is not None else ()
        self._quiet = self._context.runner.quiet
        self._written.begin()
        recorder = self._context.state.record.recorder
        if recorder is not None:
            recorder.follow(self._used)
        self._storages.sweep()

    # -- hooks -----------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """The pack hook: does not modify its input."""
        state = self._state
        place, order = self._place, self._order
        self._place = place + 1
        if state.mode is not PLANNED:
            state.inside += 1  # not in a `finally`: see `StepState.inside`
            packed = self._pack_by_looks(tensor)
            state.inside -= 1
            return packed
        before = order[place] if place < len(order) else None
        if before is not None:
            packed = self._pack_as_before(tensor, before)
            if packed is not None:
                return packed
        state.inside += 1
        packed = self._pack_to_remember(tensor, place)
        state.inside -= 1
        return packed

    def _pack_to_remember(self, tensor: torch.Tensor, place: int) -> Any:
        """Packs a tensor in a step that follows its plan; later steps know what came in this place. See [Note: by order]."""
        order, count = self._order, self._count
        now = PackedBefore.of(packed := self._pack_by_looks(tensor), tensor, is_new=self._count > count)
        if place < len(order):
            order[place] = now
        else:
            order.append(now)
        return packed

    def _pack_as_before(self, tensor: torch.Tensor, before: PackedBefore) -> Any:
        """Keeps a tensor that comes where one was kept before; None, with nothing done, where it is another one.

        Whether its bytes say everything is asked where the engine takes them over.
        """
        kind, parameter = type(tensor), before.parameter
        if kind not in PLAIN:
            return None
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a wrapper of a functorch transform
            return None
        if storage.nbytes() != before.size_bytes or tensor.is_cpu != self._is_cpu:
            return None
        if parameter is not None:
            # It has to be that one: another may be moved, and the result of an op that saves it would keep itself alive.
            home = parameter.ref()
            return self._leave_parameter(tensor, parameter) if tensor is home or tensor._base is home else None
        if not before.is_resident:
            return Kept(alias_of(tensor), leaf_saved_here(tensor)) if is_plain(tensor) else None
        key, ordinal = storage._cdata, before.ordinal
        if kind is not torch.Tensor or key in self._live.found:
            return None  # a parameter may be moved, too
        if not before.is_new:
            return self._keep_resident(key, tensor, ordinal) if key in self._resident else None
        is_quiet = (
            ordinal in self._quiet.packs and self._context.traffic.tell_held is None
        )  # else others are told of its memory
        if ordinal != self._count or not (is_quiet or is_plain(tensor)):
            return None
        self._count = ordinal + 1
        if is_quiet:
            self._resident[key] = []
            return self._keep_resident(key, tensor, ordinal)
        self._state.inside += 1
        packed = self._pack_new(tensor, storage, ordinal)
        self._state.inside -= 1
        return packed

    def _pack_by_looks(self, tensor: torch.Tensor) -> Any:
        if not is_plain(tensor):
            if (parts := PackedParts.of(tensor, self._live, self._reads.fetch.again)) is not None:
                return parts
            if isinstance(lowered := guarded(tensor), ParameterItem) and lowered.guard is self._context.guard:  # below again
                return self._pack_parameter(tensor, lowered)
            return Kept.whole(tensor, leaf_saved_here(tensor))
        if tensor.is_cpu != self._is_cpu:
            return Kept(alias_of(tensor), leaf_saved_here(tensor))  # not of the device: its user finds it where it was
        key = (storage := tensor.untyped_storage())._cdata
        if self._resident and (saved := self._resident_on(key)) is not None:
            return self._keep_resident(key, tensor, saved.ordinal)
        if (known := self._storages.on(storage)) is not None:
            self._keep_up(known, tensor)
            return self._move(tensor, known.item, Packed(tensor, known.item))
        if (parameter := self._reads.live.on(storage)) is not None:
            return self._pack_parameter(tensor, parameter)
        base = tensor._base if tensor._is_view() else tensor
        if base is not None and base.is_leaf and base.requires_grad:
            home = self._context.homes.parameter(base)  # user code used it itself, wherever the plan has it
            if type(home) is ParameterItem and not home.is_unmanaged and base.storage_offset() == 0:
                return self._pack_parameter(tensor, home)
            return Kept(alias_of(tensor), leaf_saved_here(tensor))  # no home of ours: whoever owns it may free it
        is_small = self._min_bytes is None or storage.nbytes() < self._min_bytes
        if key in self.fixed or (is_small and not self._had_event_here()):
            return Kept(alias_of(tensor))
        if self.gathered is not None and self.gathered.leaf_of(tensor) is not None:
            return Kept(alias_of(tensor))  # also one that needs no gradient
        self._count += 1
        return self._pack_new(tensor, storage, self._count - 1, stays=is_small)

    def _had_event_here(self) -> bool:
        """True where the recorded step had a larger tensor: a small one in its place stays, and is an event like it."""
        places, count = self._places, self._count
        return count < len(places) and places[count] == self._place - 1

    def _pack_new(self, tensor: torch.Tensor, storage: torch.UntypedStorage, ordinal: int, *, stays: bool = False) -> Any:
        """Packs a tensor of whose storage nothing was saved before: an event of the step."""
        context, key = self._context, storage._cdata
        if ordinal not in self._quiet.packs:
            context.clock.tick(("pack", storage.nbytes()), lambda: f"pack:{ordinal}", None)
        if (stays or ordinal in context.runner.resident_activations) and context.state.mode is PLANNED:
            self._resident[key] = []
            if stays:
                context.runner.passed(("activation", ordinal))
            if context.traffic.tell_held is not None:
                context.traffic.register_memory(tensor)
            return self._keep_resident(key, tensor, ordinal)
        item = self._take(ordinal, bytes_of(tensor), None if tensor._is_view() else tensor.grad_fn)
        packed = Packed(tensor, item)
        self._storages.saved(storage, item)
        return self._move(tensor, item, packed)

    def _move(self, tensor: torch.Tensor, item: ActivationItem, packed: Packed) -> Packed:
        """Autograd gets a view of an item, whose bytes may leave from here on."""
        self._activations.watch(packed, item)  # an exception before this leaves an item that counts as unused, and is ended
        if self._context.state.record.recorder is not None:
            self._written.note(tensor, item, packed, is_complete=tensor.requires_grad)
        self._context.on_demand.saved(item)
        self._send_off(item, is_complete=tensor.requires_grad)
        return packed

    def _pack_parameter(self, tensor: torch.Tensor, parameter: ParameterItem | UnmovedParameter) -> Any:
        if not isinstance(parameter, ParameterItem):
            return PackedParameter(tensor, parameter, leaf_saved_here(tensor))
        context = self._context
        if type(parameter) is ParameterItem and self._reads.casts.dtype is None and context.runner.is_resident(parameter):
            return self._leave_parameter(tensor, parameter)
        context.on_demand.saved(parameter)
        return PackedParameter(tensor, parameter, leaf_saved_here(tensor))

    def _keep_up(self, known: ActivationStorage, tensor: torch.Tensor) -> None:
        """A view is about to be saved of a storage that has an item: what was written since it was copied counts.

        Views may count their versions apart (`unsafe_chunk`: the gates of LSTM and GRU cells, of which each is written and then
        saved). As in the plain run, all that were saved have what the storage holds when backward comes.
        """
        item, given = known.item, known.version
        if given >= 0:
            is_old = tensor._version != given
        else:
            is_old = item.state is not DEVICE and not any(count_together(view.probe, tensor) for view in item.views())
        if is_old:
            with self._context.state.lock:
                self._context.traffic.recall(item, bytes_of(tensor))

    def _resident_on(self, key: int) -> ResidentView | None:
        """Returns a view that was saved of this storage where that is resident, or None."""
        for ref in self._resident.get(key, ()):
            saved = ref()
            if saved is not None and saved.packed is None:  # what holds for it holds for all of them
                return saved
        return None

    def _keep_resident(self, key: int, tensor: torch.Tensor, ordinal: int) -> ResidentView:
        # One that needs a gradient may be the result of the op that saves it, which would keep itself alive through it.
        view = ResidentView(tensor.detach() if tensor.requires_grad else tensor, ordinal)
        self._resident[key].append(weakref.ref(view))
        return view

    def _leave_parameter(self, tensor: torch.Tensor, parameter: ParameterItem) -> ResidentView:
        view = ResidentView(tensor, -1, parameter, leaf_saved_here(tensor))
        self._resident_parameters.append(weakref.ref(view))
        return view

    def resident(self) -> list[torch.Tensor]:
        """Returns a tensor of each activation that is resident."""
        living = [saved for ref in chain.from_iterable(self._resident.values()) if (saved := ref()) is not None]
        alive = [saved.tensor for saved in living if saved.packed is None]
        return list({tensor.untyped_storage()._cdata: tensor for tensor in alive}.values())

    def left_plan(self) -> None:
        """The step goes on without its plan: the engine takes over what was resident and graphs still hold."""
        items = dict[int, ActivationItem]()
        self._quiet = NOTHING
        every = chain(self._resident_parameters, *self._resident.values())
        left = [ref for ref in every if ref() is not None]  # none, in most steps
        while left:
            view = left[-1]()  # it stays until it is dealt with
            if view is not None and view.packed is None and view.parameter is not None:
                self._hand_over(view, view.parameter)
            elif view is not None and view.packed is None and is_plain(view.tensor):
                storage = view.tensor.untyped_storage()
                item = items.get(storage._cdata)
                if item is None:
                    item = items[storage._cdata] = self._item_for(view.ordinal, bytes_of(view.tensor))
                packed = view.become(item)
                self._storages.saved(storage, item)
                self._activations.watch(packed, item)
            left.pop()
        self._resident, self._resident_parameters = {}, []

    def _hand_over(self, view: ResidentView, parameter: ParameterItem) -> None:
        """Takes over a view of a parameter. Of one that was given other memory since, the view alone has the value then."""
        value = parameter.value
        if value is not None and value.untyped_storage()._cdata == view.tensor.untyped_storage()._cdata:
            view.become_parameter(parameter)
            self._context.on_demand.saved(parameter)

    def pack_casts(self, tensor: torch.Tensor) -> Any:
        """The pack hook of a step in which nothing moves: casts of parameters are made again, all else stays."""
        if not is_plain(tensor):
            return Kept.whole(tensor, leaf_saved_here(tensor))
        parameter = self._reads.live.on(tensor.untyped_storage())
        leaf = leaf_saved_here(tensor)
        return PackedParameter(tensor, parameter, leaf) if parameter is not None else Kept(tensor.detach(), leaf)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The unpack hook: the same data each time it is asked."""
        may_be_saved = False
        if current_graph_task() != -1:
            may_be_saved = self._reads.in_backward.unpacked(sys._getframe().f_back)
        kind = type(packed)
        if kind is ResidentView:
            if packed.packed is None:
                tensor: torch.Tensor = packed.tensor
                parameter, quiet = packed.parameter, self._quiet
                if parameter is None:
                    is_quiet = packed.ordinal in quiet.unpacks
                else:
                    is_quiet = parameter.position in quiet.saved
                    if is_offloaded(tensor):
                        self._reads.fetch.up_again(parameter)
                if not is_quiet or not self._clock.is_backward_open or tensor._version != packed.version:
                    tensor = self._unpack_resident(packed, is_quiet=is_quiet)
                return tensor if packed.leaf is None else give(tensor, packed.leaf)
            packed = packed.packed
        elif kind is Kept or kind is PackedParts:
            return give(packed.get(), packed.leaf)
        packed.check()
        is_parameter = isinstance(packed, PackedParameter)
        self._context.state.inside += 1
        if is_parameter and packed.leaf is not None and isinstance(packed.item, ParameterItem) and is_asked():
            lifted = self._reads.fetch.saved_leaf(packed.item)
            self._context.state.inside -= 1
            if packed.item.value is not None:
                self._live.add(packed.item, packed.item.value)  # it may be saved again
            return give(lifted, packed.leaf)
        device = self._reads.saved_bytes(packed.item) if is_parameter else self._bring_back(packed.item)
        self._context.state.inside -= 1
        is_recorded = self._context.state.record.recorder is not None
        if not is_parameter and packed.lent is not None:
            lent: torch.Tensor = packed.lent
            return lent
        view: torch.Tensor = packed.over(device, is_recorded=is_recorded)
        if may_be_saved and not is_parameter:
            self._storages.given(view, packed.item)
        return packed.lend(view) if not is_parameter and packed.item.is_lent else view

    def _unpack_resident(self, packed: ResidentView, *, is_quiet: bool) -> torch.Tensor:
        tensor, context = packed.get(), self._context
        state, parameter = self._state, packed.parameter
        state.inside += 1
        state.saw_backward = True
        context.clock.watch_backward()
        if parameter is None and not is_quiet:
            context.clock.tick(("unpack", packed.ordinal), lambda: f"unpack:{packed.ordinal}", "backward")
        elif parameter is not None and not is_quiet:
            context.clock.tick(("saved", parameter.position), lambda: f"saved:{parameter.name}", "backward")
        state.inside -= 1
        return tensor

    def _used(self, tensor: torch.Tensor, is_written: bool) -> None:
        """An op of a recorded step is about to use memory that may have been saved; see the note in written.py."""
        item = self._written.found(tensor, is_written)
        if item is None:
            return
        with self._context.state.lock:
            item.is_kept = True
            self._context.traffic.recall(item, bytes_of(tensor))
            self._context.on_demand.claim(item)

    def _has_order(self) -> bool:
        """True in a step whose saved tensors come as in a recorded one of its kind, or that is recorded itself."""
        state = self._context.state
        if state.mode is PLANNED or state.record.recorder is not None:
            return True
        return state.mode is DEMAND and state.kind is not None and isinstance(state.kind.stage, Measuring)

    # -- activations -----------------------------------------------------------------------------------------------

    def _take(self, ordinal: int, storage_bytes: torch.Tensor, maker: torch.autograd.graph.Node | None) -> ActivationItem:
        """Takes a storage that autograd saves for the first time under the engine's care; `maker`: the op that made it."""
        item, context = self._item_for(ordinal, storage_bytes), self._context
        if context.state.mode is PLANNED:
            context.runner.born(item)
        context.state.record.bind_copy(storage_bytes, item.key, is_new=False)
        if context.state.record.recorder is not None:
            label = label_here(module_of(reversed(context.state.record.names)), maker)
            context.state.record.add(Subject(item.key, f"activation:{ordinal}", item.size_bytes, item.kind, label=label))
            context.state.record.places.append(self._place - 1)
        return item

    def _item_for(self, ordinal: int, storage_bytes: torch.Tensor) -> ActivationItem:
        """Returns the item of a storage, which the engine has from here on."""
        context, size_bytes, key = self._context, storage_bytes.numel(), ("activation", ordinal)
        spare = context.traffic.spare(key, size_bytes)
        if isinstance(spare, ActivationItem):
            item = spare
            item.begin_again()
        else:
            tier = context.runner.tier_of(key) or context.traffic.spill.tier_for(size_bytes)
            item = ActivationItem(ordinal, size_bytes, tier)
        context.traffic.hold(item, storage_bytes)
        item.is_kept = self._written.is_kept(item, is_ordered=self._has_order())
        self._activations.add(item)
        return item

    def _send_off(self, item: ActivationItem, is_complete: bool) -> None:
        """The item was packed; on demand its bytes leave at once, or as soon as they are complete.

        An op packs its inputs before its kernel runs, and `rrelu` then fills one of them without moving its version. Such
        a tensor needs no gradient itself; it waits until the ticks of its own op are over.
        """
        context = self._context
        context.runner.copy_if_due(item, 0 if is_complete else TICKS_OF_ONE_OP)
        if context.state.mode is not DEMAND or item.state is LOWER:
            return
        if is_complete:
            context.on_demand.release(item)
        else:
            context.on_demand.keep_until_complete(item)
        context.clock.resume()

    def _bring_back(self, item: ActivationItem) -> torch.Tensor:
        """Returns the item's device bytes for backward."""
        context = self._context
        context.state.saw_backward = True
        context.clock.watch_backward()
        if item.ordinal not in self._quiet.unpacks:
            context.clock.tick(("unpack", item.ordinal), lambda: f"unpack:{item.ordinal}", "backward")
        with context.state.lock:
            device = context.traffic.want(item)
            context.state.record.bind_copy(device, item.key, is_new=True)
            is_unplanned = context.state.mode in (DEMAND, IDLE) and not self.is_closed
            if reader_may_write():
                item.is_lent = True
                if is_unplanned:
                    item.refuse(context.traffic)  # until its reader lets go of it
            elif is_unplanned:
                context.on_demand.unpacked(item)
            context.on_demand.wanted(item)
            context.clock.resume()
            return device

    def bring_home(self) -> None:
        """Puts what living graphs saved back on the device, for good."""
        self.is_closed = True
        self._activations.bring_home()
