"""A managed model: which parameters have homes below, whether they are as the engine left them, how it is given back."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from tieroff.core.seams import Foresight
from tieroff.core.tensor import TensorClass, Tier
from tieroff.errors import StateError
from tieroff.runtime.backend.place import HomePlace
from tieroff.runtime.executor import Executor
from tieroff.runtime.hooks.forked import guard_forks_of
from tieroff.runtime.hooks.forward.recurrent import RecurrentLayers
from tieroff.runtime.hooks.forward.walk import Walk
from tieroff.runtime.hooks.forward.watch import Watch
from tieroff.runtime.hooks.gradient_hooks import GradientHooks
from tieroff.runtime.hooks.parameters.access import quieten
from tieroff.runtime.hooks.plain_state import PlainStates
from tieroff.runtime.hooks.unattached import Unattached
from tieroff.runtime.items.homes import HomeItem
from tieroff.runtime.items.joined.items import JoinedParameter
from tieroff.runtime.items.offloaded import untouched
from tieroff.runtime.items.parameter import ParameterItem, ShardItem, part_from_others
from tieroff.runtime.items.spill import Spill
from tieroff.runtime.items.table import bring_home, settle_below
from tieroff.runtime.items.traffic import Traffic
from tieroff.runtime.managed.placement import Placement
from tieroff.runtime.movable import is_alone, local_of, parts_of, refuse_lazy, why_kept, why_unmovable
from tieroff.runtime.optimizer.bucketed import BucketedStep
from tieroff.runtime.optimizer.state_dicts import GivenOut
from tieroff.runtime.resources import Resources
from tieroff.runtime.settings import Settings
from tieroff.runtime.step.kinds import StepKind
from tieroff.storage.nvme.pages import MappedFiles


class ManagedModel:
    """One model as the engine manages it: which of its tensors may move, from `wrap` to `unwrap`.

    Attributes:
        backend, stores: the device and the tiers below it.
        executor: what moves tensors in a step.
        stepper: the optimizer's stand-in, once one is attached.
        unattached: knows of optimizers that are not.
        covers: what stands in for methods of its modules, wherever they are in it.
        unmoved: name of a parameter that stays where it is -> why.
        may_be_on_meta: some parameter or buffer lay on the meta device when last checked.
        is_closed: everything was given back, or is about to be.
        is_asleep: everything that can move was sent below, and no step began since.
    """

    def __init__(
        self, model: torch.nn.Module, resources: Resources, settings: Settings, foresight: Foresight | None = None
    ) -> None:
        self.model = model
        self.backend, self.stores = resources.backend, resources.stores
        self.settings = settings
        traffic = Traffic(resources.backend, Spill(resources.stores, settings.spill))
        traffic.keeps_timeline = settings.keep_timeline
        self.executor = Executor(traffic, settings, foresight)
        self.stepper: BucketedStep | None = None
        self.unmoved, self.given_out, self.unattached = dict[str, str](), GivenOut(), Unattached(model)
        self.may_be_on_meta = self.is_closed = self.is_asleep = False
        self._pid = os.getpid()
        self.covers = PlainStates(model), RecurrentLayers(model, self.executor.reads)
        self._placement = Placement(self.executor, settings.allocator_threshold_bytes)
        self._gradient_hooks = GradientHooks(self.executor.context, self.executor.gradients)
        self._fingerprint: tuple[Any, ...] = ()
        self._trained, self._count = b"", 0  # whether each parameter gets a gradient; how many have a home
        self._walk: Walk | None = None
        self._known_as: Walk | None = None  # the last one over the parameters of the fingerprint
        guard_forks_of(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The attached one."""
        return self.stepper.optimizer if self.stepper is not None else None

    def below(self) -> list[HomeItem]:
        """Returns the items that user code can reach, unless everything was given back."""
        return [] if self.is_closed else list(self.executor.homes)

    @property
    def is_own_process(self) -> bool:
        """False in a forked child: nothing here is its own."""
        return os.getpid() == self._pid

    def can_read(self) -> bool:
        """True where this process has everything that lies below: not in a child, but for ordinary memory of the host."""
        if self.is_own_process or self.is_closed:
            return True
        if self.backend.device.type != "cpu":
            return False
        return all(item.is_lifted or item.place is None or item.place.tier is Tier.HOST for item in self.executor.homes)

    def check_alive(self) -> None:
        """Returns when steps may run, and what state dicts gave out is taken back.

        Raises:
            StateError: in a forked child, or after everything was given back.
        """
        if not self.is_own_process:
            raise StateError("this model was wrapped in the parent process; a forked child cannot run it: wrap it there")
        if self.is_closed:
            raise StateError("this engine is closed; wrap the model again")
        self.given_out.take_back()

    def attach(self, stepper: BucketedStep) -> None:
        """Takes the stand-in of the optimizer whose `step` ends a training step."""
        self.stepper = stepper
        self._gradient_hooks.follower = stepper if stepper.may_update_in_backward else None
        stepper.state.take_over()

    @functools.cached_property
    def _scripted(self) -> frozenset[int]:
        """Ids of parameters of scripted and traced modules, where they cannot be read below."""
        if self.backend.device.type == "cpu":
            return frozenset()
        scripted = (module for module in self.model.modules() if isinstance(module, torch.jit.ScriptModule))
        return frozenset(id(parameter) for module in scripted for parameter in module.parameters(recurse=False))

    def move_to_device(self) -> None:
        """Puts buffers, and parameters that will have no home below, on the device; the others go there as they are used."""
        device = self.backend.device
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
        for parameter in self.model.parameters():
            if local_of(parameter) is not parameter:
                continue  # whoever split it has put its parts where they belong
            if parameter.device != device and not parameter.is_meta and self._why_kept(parameter):
                self._bring(parameter)

    def register(self) -> None:
        """Makes an item of every parameter that can have a home below; what was taken out of the model is plain again."""
        homes, reads, traffic, shards = self.executor.homes, self.executor.reads, self.executor.traffic, self.executor.shards
        shards.look(self.model)
        known = {id(item.leaf): item for item in homes.parameters.values()}
        homes.parameters.clear()
        homes.names.clear()
        self.__dict__.pop("_scripted", None)  # there may be other modules now
        self.unmoved = {}
        self._placement.forget()
        mapped = MappedFiles()
        hooked = self._gradient_hooks.add(map(shards.leaf_of, self.model.parameters()))
        for position, (name, used) in enumerate(self.model.named_parameters()):
            parameter = shards.leaf_of(used)
            homes.names[id(parameter)] = name
            item = known.pop(id(parameter), None)
            if item is not None and item.is_current():
                item.position, item.key, item.name = position, ("param", position), name
                homes.parameters[id(parameter)] = item
                continue
            if item is not None:
                item.detach(traffic)
            if (item is not None or id(parameter) not in hooked) and self._gradient_hooks.hang_elsewhere([parameter]):
                self._gradient_hooks.hang_on(parameter)  # it was elsewhere, or of another type, meanwhile
            self._take(position, name, parameter, mapped)
        self.may_be_on_meta = any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers()))
        reads.live.keep_only(homes.parameters.values())
        self._gradient_hooks.keep_only(homes.names)
        if self.stepper is not None:
            self.stepper.keep_only(homes.names)
        while known:  # nobody here holds them any more: what the program dropped dies before the next one comes up
            known.popitem()[1].detach(traffic)
        shards.keep_only(homes.parameters.values())
        reads.cast_nodes.sweep()
        reads.rebound.watch(self.model, homes.parameters.values())
        reads.intercept(bool(homes.parameters))
        self._fingerprint, self._count = self._fingerprint_of(self.walk()), len(homes.parameters)
        self._known_as = None
        self.hook_gradients(self.walk())
        for cover in self.covers:
            cover.cover()

    def hook_gradients(self, walk: Walk) -> None:
        """Looks for gradients of parameters that were unfrozen since; frozen ones get none."""
        if walk.trained == self._trained:
            return
        refuse_lazy(self.model, "it once on real data, and give its parameters to the optimizer, before the model's next step")
        self._trained = walk.trained
        self._gradient_hooks.add(map(self.executor.shards.leaf_of, self.model.parameters()))

    def _take(self, position: int, name: str, parameter: torch.Tensor, mapped: MappedFiles) -> None:
        reason = self._why_kept(parameter)
        if reason:
            self.unmoved[name] = reason
            return
        if parameter.device != self.backend.device:
            self._bring(parameter)  # one at a time: it goes below right after
        executor = self.executor
        parts, is_shard = parts_of(parameter, self.model), parameter in executor.shards
        tier = executor.traffic.spill.tier_for(sum(part.numel() * part.element_size() for part in parts))
        if is_shard:
            part_from_others(local_of(parameter))
        item: ParameterItem
        if is_alone(parameter, parts):
            item = (ShardItem if is_shard else ParameterItem)(position, name, parameter, tier, executor.guard)
        else:
            item = JoinedParameter(position, name, parameter, parts, tier, executor.guard)
        item.adopt(executor.traffic)
        if isinstance(item, ShardItem):
            executor.shards.take(item)
        executor.homes.parameters[id(parameter)] = item
        settle_below(item, executor.traffic, mapped)

    def _bring(self, parameter: torch.Tensor) -> None:
        """Puts a parameter on the device that is on another one, or on the host."""
        parameter.data = parameter.data.to(self.backend.device)
        self._gradient_hooks.hang_on(parameter)

    def take_filled(self, parameter: torch.nn.Parameter) -> None:
        """Takes a parameter that was on the meta device and has its value now; it moves to its lower tier at once."""
        name = self.executor.homes.names[id(parameter)]
        position = list(self.executor.homes.names).index(id(parameter))
        self._gradient_hooks.add([parameter])
        self.unmoved.pop(name, None)
        self._take(position, name, parameter, MappedFiles.none())
        if name in self.unmoved and parameter.device != self.backend.device:
            self._bring(parameter)
        self.executor.reads.intercept(bool(self.executor.homes.parameters))
        self._count = len(self.executor.homes.parameters)

    def check_filled(self) -> None:
        """Returns if every parameter and buffer has a value.

        Raises:
            StateError: some lie on the meta device.
        """
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        on_meta = [name for name, tensor in named if tensor.is_meta]
        self.may_be_on_meta = bool(on_meta)
        if on_meta:
            shown = ", ".join(on_meta[:5]) + (f" and {len(on_meta) - 5} more" if len(on_meta) > 5 else "")
            raise StateError(
                f"expected parameters and buffers with values, got {len(on_meta)} on the meta device: {shown}; give them some "
                "with tieroff.load_weights, or by hand what no checkpoint holds (buffers that are not persistent)"
            )

    def unmoved_by_reason(self) -> dict[str, list[str]]:
        """Returns the names of parameters that stay where they are, by why."""
        reasons: dict[str, list[str]] = {}
        for name, reason in self.unmoved.items():
            reasons.setdefault(reason, []).append(name)
        return reasons

    def trim(self, parameter: torch.Tensor) -> None:
        """Drops the pages of a parameter's home from memory and page cache; its value stays."""
        item = self.executor.homes.parameter(parameter)
        if item is not None and isinstance(item.place, HomePlace):
            item.place.home.trim()

    def _why_kept(self, parameter: torch.Tensor) -> str:
        if TensorClass.PARAMETER not in self.settings.covers:
            return "parameters are not covered" if self.stores else "no tier below ([nvme] dirs or [budget] host makes one)"
        shards = self.executor.shards
        if id(parameter) in self._scripted:
            return "read by TorchScript, which asks nobody"
        parts = parts_of(parameter, self.model)
        if sum(part.numel() * part.element_size() for part in parts) < max(self.settings.min_bytes, 1):
            return "smaller than min_bytes"
        if parameter in shards:
            return shards.why_kept(parameter)
        if local_of(parameter) is not parameter:  # its own memory is none: only FSDP2's gathering asks for its part's
            return "a DTensor that FSDP2 does not gather"
        return why_kept(parameter, parts)

    def _fingerprint_of(self, walk: Walk) -> tuple[Any, ...]:
        """Returns a fingerprint of the parameters, used to detect changes made outside tieroff."""
        leaf_of = self.executor.shards.leaf_of
        with untouched():
            return tuple((id(p), p.dtype) for p in map(leaf_of, walk.used))

    def walk(self) -> Walk:
        """Returns what the model holds now."""
        if self._walk is None or not self._walk.is_same:
            self._walk = Walk(self.model)
        return self._walk

    def place_for(self, kind: StepKind, *, is_looked_at: bool = False) -> None:
        """Puts parameters and optimizer state where the plan of this kind of step has them; see `Placement.place_for`.

        Args:
            kind: of the step that begins.
            is_looked_at: `has_changed` was asked, and nobody but the engine ran since.
        """
        self._placement.place_for(kind, is_looked_at=is_looked_at)
        self.executor.reads.intercept(not kind.moves_nothing)

    def keep_freed(self, kind: StepKind) -> None:
        """Lets the backend keep freed memory for reuse in the step that begins."""
        self._placement.keep_freed(kind)

    def sleep(self) -> None:
        """Sends everything below that can move; what user code holds up just now stays."""
        executor = self.executor
        with executor.state.lock:  # other threads may read
            executor.on_demand.release_all()
            executor.clock.take_over()
            for item in (*executor.activations, *executor.homes):
                if item.device is not None:
                    item.leave(executor.traffic)
            # Also where the plan moves nothing: forwards fetch what they use, until the next step.
            executor.reads.intercept(bool(executor.homes.parameters))
        self.backend.keep_freed(0)
        self.is_asleep = True

    def may_be_bypassed(self) -> bool:
        """True where steps in which nothing moves need none of the engine's hooks."""
        needs_hooks = self.settings.compute_dtype or self.settings.update_in_backward or self.executor.shards
        return not needs_hooks and not (self.stepper and self.stepper.state.sliced) and self.walk().is_readable

    def bypass(self, kind: StepKind | None) -> Watch:
        """Takes the hooks off the model, all of which lies on the device for this kind of step, and watches it instead."""
        homes = {item.position: item.tensor for item in self.executor.homes.parameters.values()}
        keys = kind.recorded.keys if kind is not None and kind.recorded is not None else ()
        arrived = [key[1] for key in keys if isinstance(key, tuple) and key[0] == "grad"]
        if arrived:
            self._gradient_hooks.bypass(homes.get(arrived[-1]))  # else all stay: none is known to get a gradient
        quieten(self.model, is_quiet=True)
        return Watch(self.walk(), [tensor for tensor in homes.values() if tensor is not None])

    def come_back(self) -> None:
        """Puts the hooks on the model again."""
        self._trained = b""  # what is frozen just now gets no hook: it is looked for again
        self._gradient_hooks.come_back()
        quieten(self.model, is_quiet=False)

    def take_assigned(self, walk: Walk) -> bool:
        """Follows parameters that were given other memory of the same form (`p.data = t`), which nothing else lies on.

        Returns:
            True when that was all that changed: the model is the one that it was.
        """
        assigned = {item: item.tensor for item in self.executor.homes.parameters.values() if item.was_assigned()}
        elsewhere = self._gradient_hooks.hang_elsewhere(tensor for tensor in assigned.values() if tensor is not None)
        for item, tensor in assigned.items():
            if tensor is None or id(tensor) in elsewhere:
                continue  # swapped with another one, which gets its gradients in another order
            if item.may_take(tensor) and tuple(tensor.stride()) == item.stride and not why_unmovable(tensor):
                item.refresh(self.executor.traffic)
                self.executor.reads.live.follow(item)
        return not self.has_changed(walk)

    def has_changed(self, walk: Walk) -> bool:
        """True when somebody replaced, converted or assigned parameters from outside."""
        is_known = walk is self._known_as and not self.executor.shards  # of those, people hold other tensors than modules
        if not is_known and self._fingerprint_of(walk) != self._fingerprint:
            return True
        self._known_as = walk
        if len(self.executor.homes.parameters) != self._count:
            return True
        return not all(item.is_current() for item in self._placement.not_resident() if isinstance(item, ParameterItem))

    def give_back(self) -> None:
        """Makes every parameter, gradient and living activation ordinary memory again."""
        self._gradient_hooks.close()
        homes, traffic = self.executor.homes, self.executor.traffic
        for home in (*homes.gradients.values(), *homes.parameters.values()):
            bring_home(home, traffic)
        homes.parameters.clear()
        self._placement.forget()
        self.executor.shards.close()
        self.executor.communication.close(self.model)
        self.executor.reads.cast_nodes.sweep()
        self.executor.reads.rebound.close()
        self.executor.reads.is_open = False
        self.executor.saved_tensors.bring_home()
