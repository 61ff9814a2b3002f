"""A dry run: the trace of a training step of a model that is never materialised.

The model is built on the meta device and stepped with fake tensors, which have shapes, types and storages but no memory.
The step goes through the same ticks as one of a wrapped model, and the same recorder follows its storages; only durations
are estimated. Fake tensors report the CPU as their device; `kernels` covers where torch runs other kernels elsewhere.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_iter, tree_map

from tieroff.core.buckets import ELEMENTWISE, UPDATED_ON_DEVICE, UPDATED_ON_HOST, fills_vectors, has_kernels
from tieroff.core.machine import Machine
from tieroff.core.seams import Subject
from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Trace
from tieroff.errors import CaptureError, TieroffError
from tieroff.tracing.buckets import Buckets, EarlyUpdates
from tieroff.tracing.clock.interval import interval
from tieroff.tracing.clock.model import Clock, Constants
from tieroff.tracing.fakes import FakeRecorder, Fakes, Prices
from tieroff.tracing.in_backward import DryHooks, Packed, Saved
from tieroff.tracing.kernels import DeviceKernels, run_backward, use_device_updates
from tieroff.tracing.roofline import Roofline

MIN_BYTES = 64 << 10
"""Smaller tensors are not listed: a run of its own with default settings does not move them."""


@dataclass(frozen=True)
class DryModel:
    """What a factory returns for `tieroff plan --model`.

    Attributes:
        model: the module to train.
        inputs: a tuple of its arguments, or a mapping of its keyword arguments.
        loss: from what the model returns to a scalar; None: the sum of all of it, in fp32.
        optimizer: from parameters to a `torch.optim.Optimizer`; None: `torch.optim.AdamW` with its defaults.
        autocast: the type that forward and loss run under `torch.autocast` with; None: without.
        rounds: forward and backward passes per update, whose gradients add up.
        update_in_backward: each bucket of the optimizer is stepped when its gradients are final, as `[plan]
            update_in_backward` has the engine do.
    """

    model: torch.nn.Module
    inputs: tuple[Any, ...] | Mapping[str, Any]
    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = None
    autocast: torch.dtype | None = None
    rounds: int = 1
    update_in_backward: bool = False


def dry_trace(
    factory: Callable[[], Any],
    machine: Machine,
    min_bytes: int = MIN_BYTES,
    name: str = "",
    kernels: str = "cpu",
    prices: Prices | None = None,
    option: str = "--model",
) -> Trace:
    """Returns the trace of one step (forward, backward, update, gradients cleared) without materialising anything.

    Args:
        factory: makes a `DryModel`, or a tuple (model, inputs); it is called with the meta device as torch's default.
        machine: whose arithmetic and memory give the op times, by the clock of an accelerator or, for kernels of the CPU,
            as a roofline; `meta["durations"]` names the estimate.
        min_bytes: smaller tensors are not listed; they count as transient bytes.
        name: what the trace is called; the model's class when empty.
        kernels: "cpu", or any other type of device: the kernels of an accelerator.
        prices: what ops take, in place of the machine's.
        option: of the command line that gave the model, for errors.

    Raises:
        ConfigError: the machine has no figures for a roofline.
        CaptureError: the factory returns something else, or the step cannot run on tensors without values.
    """
    is_accelerated = kernels != "cpu"
    prices = prices or (Clock.of(machine) if is_accelerated else Roofline.of(machine))
    try:
        with torch.device("meta"):
            made = checked(factory())
        with FakeTensorMode(allow_non_fake_inputs=True):
            fakes = Fakes()
            made = replace(made, model=fakes.take_over(made.model), inputs=tree_map(fakes.of, made.inputs))
            step = _DryStep(made, prices, min_bytes, fakes, is_accelerated=is_accelerated)
            trace = step.run(name or type(made.model).__name__)
    except TieroffError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{option}: the step needs the values of tensors: {type(error).__name__}: {error}. A step that depends on "
            "values (a branch, a shape, a print) has no dry trace: trace a real step instead"
        ) from error
    named = machine.name or "without a name"
    between = "{:.3f} {:.3f}".format(*interval(machine, Constants.shipped())) if is_accelerated else ""
    return replace(
        trace, origin="dry", meta={**trace.meta, "durations": f"estimated: roofline of machine {named}", "interval": between}
    )


def checked(made: Any) -> DryModel:
    if isinstance(made, tuple) and len(made) == 2:
        made = DryModel(*made)
    if not isinstance(made, DryModel) or not isinstance(made.model, torch.nn.Module):
        raise CaptureError(
            "expected the factory to return a tieroff.DryModel or a tuple (module, inputs), got "
            f"{type(made.model if isinstance(made, DryModel) else made).__name__}"
        )
    if not isinstance(made.inputs, (tuple, Mapping)):
        raise CaptureError(
            f"expected the inputs as a tuple of arguments or a mapping of keyword arguments, got {type(made.inputs).__name__}"
        )
    if made.rounds < 1:
        raise CaptureError(f"expected 1 round of forward and backward per update or more, got {made.rounds}")
    return made


class _Parameters(dict[str, Any]):
    """A module's `_parameters`; reports each read."""

    __slots__ = ("read",)
    read: Callable[[torch.Tensor], None]

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        if value is not None:
            self.read(value)
        return value


class _DryStep:
    """One step of a model on fake tensors, tick by tick as the executor would see it."""

    def __init__(self, made: DryModel, prices: Prices, min_bytes: int, fakes: Fakes, *, is_accelerated: bool) -> None:
        self._made, self._min_bytes, self._is_accelerated = made, max(min_bytes, 1), is_accelerated
        self._names = {id(p): name for name, p in made.model.named_parameters()}
        self._parameters = list(made.model.parameters())
        self._positions = {id(p): i for i, p in enumerate(self._parameters) if self._is_listed(p)}
        self._by_storage = {
            p.untyped_storage()._cdata: self._positions[id(p)] for p in self._parameters if id(p) in self._positions
        }
        self._recorder = FakeRecorder(prices, fakes)
        self._fixed: set[int] = set()
        self._known: dict[int, tuple[StorageWeakRef, tuple[str, int], int]] = {}
        self._living: dict[tuple[str, int], int] = {}
        self._dead: deque[tuple[str, int]] = deque()
        self._recorded: list[Subject] = []
        self._states: dict[Hashable, Subject] = {}
        self._is_forward = False
        self._hooks = DryHooks(self._pack, self._unpack, _is_moved)
        self._optimizer: torch.optim.Optimizer | None = None
        self._buckets: Buckets | None = None
        self._early: EarlyUpdates | None = None

    def run(self, name: str) -> Trace:
        """Returns the trace of the step."""
        made, recorder = self._made, self._recorder
        make = made.optimizer if made.optimizer is not None else torch.optim.AdamW
        optimizer = make(made.model.parameters())
        if self._is_accelerated:
            use_device_updates(optimizer)
        self._optimizer, self._buckets = optimizer, Buckets(optimizer)
        if has_kernels(type(optimizer)) and not made.update_in_backward:
            recorder.meta[ELEMENTWISE] = type(optimizer).__name__
        if self._is_accelerated and has_kernels(type(optimizer)) and not made.update_in_backward:
            recorder.meta[UPDATED_ON_HOST] = type(optimizer).__name__
            odd = [name for name, parameter in made.model.named_parameters() if not fills_vectors(parameter.numel())]
            recorder.meta[UPDATED_ON_DEVICE] = "\n".join(odd)
        self._watch()
        recorder.watch_gradients(lambda: [p.grad for p in self._parameters if p.grad is not None])
        recorder.start()
        try:
            for position in self._positions.values():
                recorder.accesses["param", position] = []
                recorder.bind(self._parameters[position].untyped_storage(), ("param", position))
            with DeviceKernels() if self._is_accelerated else contextlib.nullcontext():
                for number in range(made.rounds):
                    loss = self._forward()
                    if made.update_in_backward and number == made.rounds - 1:
                        self._early = EarlyUpdates(self._buckets.params, self._update)
                    run_backward(loss)
                    recorder.backward_ended()
                self._finish_updates()
        finally:
            recorder.stop()
        recorder.stands(tensor.untyped_storage() for tensor in self._standing())
        subjects = [*self._homes(), *self._states.values(), *self._recorded]
        return recorder.finish(subjects, recorder.spent_ns, name)

    def _forward(self) -> torch.Tensor:
        made = self._made
        args, kwargs = ((), made.inputs) if isinstance(made.inputs, Mapping) else (made.inputs, {})
        held = (*tree_iter((args, dict(kwargs))), *made.model.buffers())
        held = (*held, *(p for p in self._parameters if id(p) not in self._positions))
        self._fixed = {t.untyped_storage()._cdata for t in held if isinstance(t, torch.Tensor) and t.layout is torch.strided}
        self._tick("forward", "forward")
        self._is_forward = True
        casts = torch.autocast("cpu", made.autocast) if made.autocast is not None else contextlib.nullcontext()
        with casts:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                out = made.model(*args, **kwargs)
            self._is_forward = False
            loss: Any = made.loss(out) if made.loss is not None else _sum(out)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise CaptureError(
                f"expected the loss to be a tensor of one number that depends on a parameter, got {found}: see the factory's "
                "model and loss"
            )
        return loss

    def _update(self, number: int) -> None:
        """Steps one bucket of the optimizer; one that is stepped in backward takes its gradients along."""
        assert self._buckets is not None and self._optimizer is not None
        chosen = self._buckets.params[number]
        self._recorder.is_updating = True
        self._tick(f"bucket:{number}", "optimizer")
        for param in chosen:
            self._ask_for_update(param)
        self._buckets.step(number)
        for param in chosen:
            self._adopt_state(param, self._optimizer.state.get(param, {}))
            if self._early is not None:
                param.grad = None
                self._recorder.died(("gradient", self._positions.get(id(param), -1)))
        self._recorder.is_updating = False
        if self._early is not None:
            self._tick(f"after bucket:{number}", "backward")  # what backward does next is no part of the update

    def _finish_updates(self) -> None:
        """Steps what was not stepped in backward, and clears the gradients."""
        assert self._buckets is not None and self._optimizer is not None
        if self._early is not None:
            self._early.finish()
        else:
            for number in range(len(self._buckets.params)):
                self._update(number)
        self._recorder.is_updating = True
        self._tick("end", "")
        self._optimizer.zero_grad()
        self._settle_gradients()

    # -- ticks ---------------------------------------------------------------------------------------------------

    def _tick(self, name: str, phase: str = "") -> None:
        while self._dead:
            key = self._dead.popleft()
            self._living[key] -= 1
            if not self._living[key]:
                self._recorder.died(key)
        self._recorder.event(name, phase)

    def _phase(self) -> str:
        return "forward" if _graph_task() == -1 else "backward"

    def _watch(self) -> None:
        """Has every access to a listed parameter, and every gradient of one, open an op."""
        for module in self._made.model.modules():
            if type(module._parameters) in (dict, OrderedDict):
                watched = _Parameters(module._parameters)
                watched.read = self._read
                module.__dict__["_parameters"] = watched
            if isinstance(module, torch.nn.RNNBase):  # reads its weights from a list of its own
                module.register_forward_pre_hook(_read_weights)
        for param in self._parameters:
            if id(param) in self._positions and param.requires_grad:
                param.register_post_accumulate_grad_hook(self._take_gradient)

    def _read(self, param: torch.Tensor) -> None:
        is_recomputing = _graph_task() != -1 and torch.is_grad_enabled()
        if is_recomputing:
            self._hooks.put_in_force()
        if id(param) in self._positions and (self._is_forward or is_recomputing):
            self._tick(f"param:{self._names[id(param)]}", self._phase())
            self._recorder.access(("param", self._positions[id(param)]))

    # -- saved tensors -------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return Saved(tensor.detach())
        storage = tensor.untyped_storage()
        position = self._by_storage.get(storage._cdata)
        if position is not None:
            return Saved(tensor.detach(), position)
        base = tensor._base if tensor._is_view() else tensor
        is_parameter = base is not None and base.is_leaf and base.requires_grad
        key = self._known_key(tensor, storage)
        if key is None:
            if is_parameter or storage._cdata in self._fixed or storage.nbytes() < self._min_bytes:
                return Saved(tensor.detach())
            key = self._new_key(tensor, storage)
        packed = Packed(tensor, key)
        self._living[packed.key] += 1
        weakref.finalize(packed, self._dead.append, packed.key).atexit = False
        return packed

    def _known_key(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[str, int] | None:
        """Returns the key of a storage that is saved, or that backward got for one; None if it was written since."""
        known = self._known.get(storage._cdata)
        if known is not None and not known[0].expired() and self._living[known[1]] and known[2] == tensor._version:
            return known[1]
        return None

    def _new_key(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[str, int]:
        """Returns the key of a storage that is saved for the first time, or anew after a write: it opens an op."""
        ordinal = len(self._living)
        key = ("activation", ordinal)
        self._tick(f"pack:{ordinal}", self._phase())
        self._known[storage._cdata] = (StorageWeakRef(storage), key, tensor._version)
        self._living[key] = 0
        self._recorder.bind(storage, key)
        self._recorded.append(Subject(key, f"activation:{ordinal}", storage.nbytes(), TensorClass.ACTIVATION))
        return key

    def _unpack(self, packed: Any) -> torch.Tensor:
        may_be_saved = _graph_task() != -1 and self._hooks.unpacked(sys._getframe().f_back)
        if isinstance(packed, Saved):
            if packed.position >= 0:
                self._tick(f"saved:{self._names[id(self._parameters[packed.position])]}", "backward")
                self._recorder.access(("param", packed.position))
            return packed.tensor
        self._tick(f"unpack:{packed.key[1]}", "backward")
        tensor: torch.Tensor = packed.tensor()
        storage = tensor.untyped_storage()
        self._recorder.bind(storage, packed.key, is_new=True)
        if may_be_saved:  # and is then the activation that it was
            self._known[storage._cdata] = (StorageWeakRef(storage), packed.key, tensor._version)
        return tensor

    # -- gradients and state -------------------------------------------------------------------------------------

    def _take_gradient(self, param: torch.Tensor) -> None:
        name, position = self._names[id(param)], self._positions[id(param)]
        self._tick(f"grad:{name}", "backward")
        grad = param.grad
        if grad is None or not _is_whole(grad):
            return
        key = ("gradient", position)
        if key not in self._recorder.accesses:  # else one of an earlier round, to which the new one was added
            self._recorder.bind(grad.untyped_storage(), key)
            self._recorder.arrived(key)
            self._recorded.append(
                Subject(key, f"gradient of {name}", _size(grad), TensorClass.GRADIENT, owner=("param", position))
            )
        if self._early is not None:
            self._early.arrived(param)

    def _settle_gradients(self) -> None:
        """Gradients that were cleared end here; the others wrap round the step."""
        for i, subject in enumerate(self._recorded):
            if subject.kind is TensorClass.GRADIENT:
                assert isinstance(subject.owner, tuple)
                if self._early is not None:
                    continue  # they died with their buckets
                if self._parameters[subject.owner[1]].grad is None:
                    self._recorder.died(subject.key)
                else:
                    self._recorded[i] = replace(subject, is_persistent=True)

    def _ask_for_update(self, param: torch.Tensor) -> None:
        position = self._positions.get(id(param))
        if position is None or param.grad is None:
            return
        self._recorder.access(("param", position))
        if ("gradient", position) in self._recorder.accesses:
            self._recorder.access(("gradient", position))

    def _adopt_state(self, param: torch.Tensor, state: dict[str, Any]) -> None:
        owner = self._names.get(id(param), "a parameter outside the model")
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and _size(tensor) >= self._min_bytes and _is_whole(tensor):
                name = f"{key} of {owner}"
                self._recorder.bind(tensor.untyped_storage(), ("state", name))
                self._recorder.access(("state", name))
                self._states["state", name] = Subject(
                    ("state", name), name, _size(tensor), TensorClass.OPTIMIZER, is_persistent=True
                )

    def _standing(self) -> Iterator[torch.Tensor]:
        """Yields what lies on the device whatever a plan says: small parameters, buffers, and state that is not listed."""
        assert self._optimizer is not None
        small = (param for param in self._parameters if id(param) not in self._positions)
        states = (tensor for state in self._optimizer.state.values() for tensor in tree_iter(state))
        for tensor in (*small, *self._made.model.buffers(), *states):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                yield tensor

    def _homes(self) -> Iterator[Subject]:
        for position in self._positions.values():
            param = self._parameters[position]
            yield Subject(("param", position), self._names[id(param)], _size(param), TensorClass.PARAMETER, is_persistent=True)

    def _is_listed(self, param: torch.Tensor) -> bool:
        return param.layout is torch.strided and _size(param) >= self._min_bytes and _is_whole(param)


def _is_moved(packed: Any) -> bool:
    return isinstance(packed, Packed) or packed.position >= 0


def _read_weights(layer: torch.nn.Module, _: Any) -> None:
    assert isinstance(layer, torch.nn.RNNBase)
    for name in layer._flat_weights_names:
        getattr(layer, name)


def _graph_task() -> int:
    """Returns the number of the backward that runs, or -1."""
    return int(torch._C._current_graph_task_id())


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_whole(tensor: torch.Tensor) -> bool:
    """True if no other tensor shares the storage."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == _size(tensor)


def _sum(out: Any) -> torch.Tensor:
    """Returns the sum, in fp32, of all floating-point tensors that a model returned."""
    parts = [leaf.float().sum() for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    if not parts:
        raise CaptureError("expected the model to return a floating-point tensor, or the factory to give a loss")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
