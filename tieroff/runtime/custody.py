"""Custody: which parameters have homes below, where they lie between steps, and how they are given back."""

from __future__ import annotations

import errno
import logging
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tieroff.core.seams import Foresight
from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StateError, StoreError
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.execution.executor import Executor
from tieroff.runtime.items.homes import HomeItem, ParameterItem, why_unmovable
from tieroff.runtime.items.item import Item, Traffic
from tieroff.runtime.items.place import HomePlace
from tieroff.runtime.optimizer.bucketed import BucketedStep
from tieroff.runtime.optimizer.clipping import add_owner
from tieroff.runtime.step.program import Mode, Phase, Program
from tieroff.storage.nvme.pages import MappedFiles
from tieroff.storage.store import Store

log = logging.getLogger("tieroff")


@dataclass(frozen=True)
class Settings:
    """What the engine is told; all of it comes from the config.

    Attributes:
        covers: tensor classes that may move.
        min_bytes: smaller tensors stay.
        spill: lower tiers in the order in which they are filled while nothing is planned.
        allocator_threshold_bytes: see `Backend.tune_allocator`; None leaves the allocator alone.
        compute_dtype: what parameters and inputs are cast to for computing; None leaves them as they are.
        recompute_layers: names or patterns of the modules that may run again in backward.
        update_in_backward: whether buckets are updated as soon as their gradients are final.
    """

    covers: frozenset[TensorClass]
    min_bytes: int
    spill: tuple[Tier, ...]
    allocator_threshold_bytes: int | None = None
    keep_timeline: bool = True
    chosen: dict[str, str] = field(default_factory=dict)
    config_toml: str = ""
    compute_dtype: torch.dtype | None = None
    recompute_layers: tuple[str, ...] = ()
    update_in_backward: bool = False


class Custody:
    """The tensors of one model that the engine looks after.

    Attributes:
        executor, traffic: what moves them.
        stepper: the optimizer's stand-in, once one is attached.
        unmoved: name of a parameter that stays where it is -> why.
        may_be_hollow: some parameter or buffer lay on the meta device when last seen.
        is_open: False once everything was given back.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        backend: Backend,
        stores: dict[Tier, Store],
        settings: Settings,
        foresight: Foresight | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.stores = stores
        self.settings = settings
        self.traffic = Traffic(backend, stores, self.demote)
        self.traffic.keep_spans = settings.keep_timeline
        told = settings.min_bytes, settings.covers, foresight, settings.compute_dtype
        self.executor = Executor(self.traffic, self.tier_for, *told)
        self.stepper: BucketedStep | None = None
        self.unmoved: dict[str, str] = {}
        self.may_be_hollow = False
        self.is_open = True
        self._hooks: dict[int, Any] = {}
        self._demoted: set[Hashable] = set()
        self._identity: tuple[Any, ...] = ()
        add_owner(self)

    @property
    def names(self) -> dict[int, str]:
        """By id of the parameter."""
        return self.executor.names_by_id

    @property
    def device(self) -> torch.device:
        """Where the step computes."""
        return self.backend.device

    def move_to_device(self) -> None:
        """Puts buffers, and parameters that will have no home below, on the device; the others go there as they are used."""
        device = self.backend.device
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
        for parameter in self.model.parameters():
            if parameter.device != device and not parameter.is_meta and self._why_kept(parameter):
                parameter.data = parameter.data.to(device)

    def register(self) -> None:
        """Makes an item of every parameter that can have a home below."""
        gate = self.executor.gate
        known = {id(item.tensor): item for item in gate.items.values() if item.tensor is not None}
        gate.items, self.unmoved = {}, {}
        mapped = MappedFiles()
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
                item.detach(self.traffic)
                self._unhook({id(parameter)} & self._hooks.keys())  # with other memory comes another node that accumulates
                self._hook_gradient(parameter)
            self._take(position, name, parameter, mapped)
        self.may_be_hollow = any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers()))
        for gone in known.values():
            gone.detach(self.traffic)
        self._unhook({key for key in self._hooks if key not in self.executor.names_by_id})
        gate.forget_strangers()
        gate.look(bool(gate.items))
        self._identity = self._look()

    def _take(self, position: int, name: str, parameter: torch.nn.Parameter, mapped: MappedFiles) -> None:
        reason = self._why_kept(parameter)
        if reason:
            self.unmoved[name] = reason
            return
        if parameter.device != self.backend.device:
            parameter.data = parameter.data.to(self.backend.device)  # one at a time: it goes below right after
        size_bytes = parameter.numel() * parameter.element_size()
        item = ParameterItem(position, name, parameter, self.tier_for(size_bytes), self.backend.device)
        item.adopt(self.traffic)
        self.executor.gate.items[id(parameter)] = item
        item.settle_below(self.traffic, mapped)

    def take_filled(self, parameter: torch.nn.Parameter) -> None:
        """Looks after a parameter that lay on the meta device and has its value now; it goes below right away."""
        name = self.executor.names_by_id[id(parameter)]
        position = list(self.executor.names_by_id).index(id(parameter))
        self._hook_gradient(parameter)
        self.unmoved.pop(name, None)
        self._take(position, name, parameter, MappedFiles.none())
        if name in self.unmoved and parameter.device != self.backend.device:
            parameter.data = parameter.data.to(self.backend.device)
        self.executor.gate.look(bool(self.executor.gate.items))

    def check_filled(self) -> None:
        """Returns if every parameter and buffer has a value.

        Raises:
            StateError: some lie on the meta device.
        """
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        hollow = [name for name, tensor in named if tensor.is_meta]
        self.may_be_hollow = bool(hollow)
        if hollow:
            shown = ", ".join(hollow[:5]) + (f" and {len(hollow) - 5} more" if len(hollow) > 5 else "")
            raise StateError(
                f"expected parameters and buffers with values, got {len(hollow)} on the meta device: {shown}; give them some "
                "with tieroff.load_weights, or by hand what no checkpoint holds (buffers that are not persistent)"
            )

    def trim(self, parameter: torch.Tensor) -> None:
        """Drops the pages of a parameter's home from memory and page cache; its value stays."""
        item = self.executor.gate.items.get(id(parameter))
        if item is not None and item.tensor is parameter and isinstance(item.place, HomePlace):
            item.place.home.trim()

    def _why_kept(self, parameter: torch.Tensor) -> str:
        if TensorClass.PARAMETER not in self.settings.covers:
            return "parameters are not covered"
        if parameter.numel() * parameter.element_size() < max(self.settings.min_bytes, 1):
            return "smaller than min_bytes"
        return why_unmovable(parameter)

    def _hook_gradient(self, parameter: torch.Tensor) -> None:
        if id(parameter) in self._hooks or not (parameter.requires_grad and parameter.is_leaf):
            return
        if parameter.is_meta:
            return  # hooked when it has its value, which comes with another node
        if parameter.layout is not torch.strided:
            return  # never moved, and a sparse one has no view through which to find its node

        def gradient_arrived(home: torch.Tensor) -> None:
            if not self.is_open:
                return
            if self.stepper is not None:
                with self.executor.lock:
                    self.stepper.early.run()  # before the tick of this gradient
            item = self.executor.gate.items.get(id(home))
            if item is not None and item.tensor is home:
                self.executor.gradients.arrived(item)
            if self.stepper is not None and self.executor.mode is not Mode.IDLE:
                with self.executor.lock:
                    self.stepper.gradient_arrived(home)

        def about_to_accumulate(grads: Any) -> None:
            item = self.executor.gate.items.get(id(parameter))
            if item is not None and item.tensor is parameter and self.is_open:
                self.executor.gradients.about_to_accumulate(item)

        node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._hooks[id(parameter)] = (
            parameter.register_post_accumulate_grad_hook(gradient_arrived),
            node.register_prehook(about_to_accumulate),
            node,  # the parameter itself holds its node only weakly
            parameter,
        )

    def _look(self) -> tuple[Any, ...]:
        """Returns what tells whether somebody changed the model's parameters from outside."""
        return tuple(
            (id(p), p.requires_grad, p.dtype)
            for module in self.model.modules()
            for p in module._parameters.values()
            if p is not None
        )

    def has_substitutes(self) -> bool:
        """True while other tensors stand in for parameters, for one call only (torch.func.functional_call)."""
        return any(
            p is not None and type(p) is not torch.nn.Parameter and not isinstance(p, torch.nn.Parameter)
            for module in self.model.modules()
            for p in module._parameters.values()
        )

    def place_for(self, program: Program) -> None:
        """Puts parameters and optimizer state where this program's plan has them between steps.

        Those that go to files move first and those that go to host memory last, so that host memory is free by then.
        """
        items: list[HomeItem] = [*self.executor.gate.items.values()]
        items += self.stepper.items.values() if self.stepper is not None else ()
        targets = [(item, self._tier_between_steps(item, program)) for item in items]
        order: tuple[Tier | None, ...] = (Tier.NVME, None, Tier.HOST)
        for item, tier in sorted(targets, key=lambda target: order.index(target[1])):
            if tier is not None:
                self._send_below(item, tier)
            elif item.tensor is not None:
                item.refresh(self.traffic)
                item.lift(self.traffic)
                item.leave_place(self.traffic)
        self.executor.gate.look(not program.moves_nothing)
        # Memory that need not leave the process when it is freed need not be zeroed when it is wanted again.
        self.backend.tune_allocator(None if program.moves_nothing else self.settings.allocator_threshold_bytes)

    def keep_freed(self, program: Program) -> None:
        """Has the backend keep freed memory for reuse in the step that begins, as far as its peak or the budget goes."""
        limit_bytes = self.executor.on_demand.room_bytes
        if program.phase is Phase.RECORD:
            limit_bytes = 0  # an op's scratch memory shows in what the process takes from the system
        elif program.phase is Phase.PLANNED and program.plan is not None:
            copies = [item for item in self.home_items() if item.device is not None and not self.backend.gave(item.device)]
            elsewhere_bytes = sum(item.size_bytes for item in copies) + program.scratch_bytes
            limit_bytes = program.plan.peak_bytes[Tier.DEVICE] - elsewhere_bytes
        self.backend.keep_freed(max(limit_bytes, 0))

    def _tier_between_steps(self, item: HomeItem, program: Program) -> Tier | None:
        """Returns the lower tier of an item at the start of a step, or None for the device."""
        if program.phase is not Phase.PLANNED:
            return item.tier
        index = program.index.get(item.key, -1)
        if program.moves_nothing or (index >= 0 and index not in program.tiers):
            return None
        return program.tiers.get(index, item.tier)

    def _send_below(self, item: HomeItem, tier: Tier) -> None:
        if item.tensor is None:
            return
        if item.tier is not tier:
            item.refresh(self.traffic)
            item.lift(self.traffic)
            item.leave_place(self.traffic)
            item.tier = tier
        item.leave(self.traffic)

    def home_items(self) -> Iterator[HomeItem]:
        yield from self.executor.gate.items.values()
        yield from self.executor.gradients.values()
        if self.stepper is not None:
            yield from self.stepper.items.values()

    def device_storages(self) -> set[int]:
        return {
            p.untyped_storage()._cdata
            for p in self.model.parameters()
            if p.layout is torch.strided and type(p) in (torch.Tensor, torch.nn.Parameter)
        }

    def tier_for(self, size_bytes: int) -> Tier:
        """Returns the first lower tier with room, while nothing is planned."""
        for tier in self.settings.spill:
            store = self.stores[tier]
            if store.capacity_bytes - store.used_bytes >= size_bytes:
                return tier
        return self.settings.spill[-1]

    def demote(self, item: Item, error: StoreError) -> bool:
        """After a failed copy out: True when the item may try another tier. Its source is intact."""
        others = [t for t in self.settings.spill if t is not item.tier]
        for tier in others:
            if self.stores[tier].capacity_bytes - self.stores[tier].used_bytes >= item.size_bytes:
                is_usual = error.errno == errno.ENOSPC and self._fills_in_order()
                level = logging.DEBUG if is_usual or item.key in self._demoted else logging.WARNING
                self._demoted.add(item.key)
                # Its text: the error itself holds frames, and with them tensors, for as long as a handler keeps the record.
                log.log(level, "%s: %s goes to %s instead", str(error), item.name, tier.value)
                item.tier = tier
                return True
        return False

    def _unhook(self, keys: set[int]) -> None:
        for key in keys:
            arrived, before, _, _ = self._hooks.pop(key)
            arrived.remove()
            before.remove()

    def has_changed(self) -> bool:
        """True when somebody replaced, converted, assigned or froze parameters from outside."""
        return self._look() != self._identity or any(not item.is_current() for item in self.executor.gate.items.values())

    def give_back(self) -> None:
        """Makes every parameter, gradient and living activation ordinary memory again."""
        self.is_open = False
        self._unhook(set(self._hooks))
        items = self.executor.gate.items
        for home in (*self.executor.gradients.values(), *items.values()):
            home.bring_home(self.traffic)
        items.clear()
        self.executor.gate.forget_strangers()
        self.executor.gate.is_open = False
        self.executor.bring_activations_home()

    def _fills_in_order(self) -> bool:
        """True while nothing is planned: tiers are filled in order, and one of them being full is nothing special.

        In inference, between steps, what the plan has on the device for all of its step leaves too.
        """
        program = self.executor.program
        return self.executor.is_inferring or program is None or program.phase is not Phase.PLANNED
