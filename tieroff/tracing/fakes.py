"""Fake tensors: stand-ins for those of a model that is never materialised, and a recorder that follows them."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import _push_mode
from torch.utils._pytree import tree_map

from tieroff.tracing.memo import Memo
from tieroff.tracing.recorder import StepRecorder
from tieroff.tracing.recording.arguments import tensors_in
from tieroff.tracing.recording.life import Life

_DEVICE = torch.ops.prim.device.default
_LIFT_FRESH = torch.ops.aten.lift_fresh.default
_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


class Prices(Protocol):
    """Knows what an aten op takes.

    Attributes:
        is_repeatable: equal calls take equal times, so one answer serves them all.
    """

    is_repeatable: ClassVar[bool]

    def duration_ns(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        """Returns the estimated time of one call, in ns."""


class Fakes:
    """The fake tensors that stand for those of the factory, one each."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, value: Any) -> Any:
        """Returns the stand-in of a tensor; anything else as it is."""
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor) or value.layout is not torch.strided:
            return value
        known = self._made.get(id(value))
        if known is None:
            fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
            if isinstance(value, torch.nn.Parameter):
                fake = torch.nn.Parameter(fake, requires_grad=value.requires_grad)
            else:
                fake.requires_grad_(value.requires_grad)
            known = self._made[id(value)] = (value, fake)  # with the tensor itself, whose identity must not be reused
        return known[1]

    def take_over(self, model: torch.nn.Module) -> torch.nn.Module:
        """Returns the module with stand-ins for all its parameters and buffers."""
        for module in model.modules():
            for name, value in (*module._parameters.items(), *module._buffers.items()):
                if value is not None:
                    setattr(module, name, self.of(value))
        return model


class FakeRecorder(StepRecorder):
    """Follows fake storages, and estimates what each op takes.

    Parameters, gradients and optimizer state are held by people, not by the step: they are required from each access to
    the last op before the next one that used them, and not for as long as their storage lives.

    Attributes:
        spent_ns: per op, its estimated duration.
        accesses: of what people hold: key -> ops at which the program asked for it.
        is_updating: the optimizer runs, whose counts of steps may be read as numbers although they have no value.
    """

    def __init__(self, prices: Prices, fakes: Fakes) -> None:
        super().__init__(torch.device("cpu"))
        self._counter = None  # fake kernels take no scratch
        self._fakes = fakes
        self._prices = prices
        self._memo = Memo()
        self.spent_ns: list[int] = []
        self.accesses: dict[Hashable, list[int]] = {}
        self.is_updating = False
        self._arrivals: dict[Hashable, int] = {}

    def start(self) -> None:
        """Pushes the mode, over the one that makes tensors fake."""
        _push_mode(self)
        self.is_on = True

    def event(self, name: str, phase: str) -> None:
        super().event(name, phase)
        self.spent_ns.append(0)

    @property
    def op(self) -> int:
        """The op that runs now."""
        return max(self._op, 0)

    def access(self, key: Hashable) -> None:
        """The program asks for what people hold."""
        self.accesses.setdefault(key, []).append(self.op)

    def arrived(self, key: Hashable) -> None:
        """Backward hands over a tensor that it held since it made it."""
        self.accesses[key] = []
        self._arrivals[key] = self.op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:  # asked more often than it is computed with
            return args[0].fake_device
        if func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if any(_is_meta(leaf) for leaf in tensors_in((args, kwargs))):  # one that the factory made: a loss's targets, say
            args, kwargs = tree_map(self._fakes.of, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _use(self, tensor: torch.Tensor, is_written: bool, is_output: bool = False) -> None:
        if self._makers.running is _LIFT_FRESH:
            # A number in code: a real step has one tensor, made before any op; here a fake one takes the place of it.
            if not is_output:
                return
            is_written = is_output = False
        if type(tensor) is FakeTensor and tensor.layout is torch.strided and tensor.fake_device.type == self._device_type:
            self._use_storage(tensor, tensor.untyped_storage(), is_written, is_output)  # asked for its device, it dispatches
        else:
            super()._use(tensor, is_written, is_output)

    def _followed(self, storages: Iterable[object]) -> Iterator[torch.UntypedStorage]:
        """All of them: fake ones say that their device is meta."""
        for storage in storages:
            assert isinstance(storage, torch.UntypedStorage)
            yield storage

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[tuple[torch.Tensor, bool]]) -> Any:
        call = self._memo.call_of(func, args, kwargs)
        known = self._memo.find(call) if call is not None else None
        if known is not None:
            out, duration_ns = known
            if not self._prices.is_repeatable:
                duration_ns = self._prices.duration_ns(func, args, kwargs, out)
        else:
            out = self._run_new(func, args, kwargs)
            duration_ns = self._prices.duration_ns(func, args, kwargs, out)
            if call is not None:
                self._memo.note(call, func, args, kwargs, out, duration_ns)
        self._now += 1
        if self.spent_ns:
            self.spent_ns[self.op] += duration_ns
        return out

    def _run_new(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _GROUPED_PRODUCT and args[0].dtype is not torch.bfloat16:
            # What torch has for fake tensors refuses all types but this one, which its kernels do not.
            dtype, (args, kwargs) = args[0].dtype, tree_map(_as_bfloat16, (args, kwargs))
            return func(*args, **kwargs).to(dtype)
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default or not self.is_updating:
                raise
            return 1.0 if args[0].is_floating_point() else 1

    def _held(self, life: Life, count: int) -> list[tuple[int, int]]:
        key = next((key for key in life.keys if key in self.accesses), None)
        if key is None:
            return super()._held(life, count)
        accesses, uses = self.accesses[key], life.reads | life.writes
        held = [(life.birth_op, self._arrivals[key] + 1)] if key in self._arrivals else []
        for start, following in itertools.pairwise([*accesses, count]):
            last = max((op for op in uses if start <= op < following), default=start)
            held.append((start, last + 1))
        return held


def _as_bfloat16(leaf: Any) -> Any:
    is_floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    return leaf.to(torch.bfloat16) if is_floating else leaf


def _is_meta(leaf: Any) -> bool:
    return type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.is_meta
