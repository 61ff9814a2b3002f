"""Stand-ins for quantized weights and state, built as bitsandbytes and torchao build theirs; every op of them is torch's own.

What counts of the structure: a packed parameter whose scales are in an object beside it, a Function that keeps a view of it as
an attribute of its ctx, an int8 parameter with an alias that its module's state keeps, a wrapper subclass of several parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import tieroff

BLOCK = 64


class Seen:
    """Counts, apart from the engine, the bytes of tensors that Functions or optimizers got and that are alive.

    On the host a tensor that is up has memory of its own, which dies when it leaves; what lies below is memory of a file.
    """

    def __init__(self) -> None:
        self.most_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def clear(self) -> None:
        self.most_bytes = 0

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.is_cpu and _is_of_file(storage.data_ptr()):
            return
        self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.most_bytes = max(self.most_bytes, sum(size for _, size in self._alive.values()))


SEEN, INPUTS, PROJECTORS = Seen(), Seen(), Seen()  # of packed weights; of inputs that Functions keep; of optimizer state


def _is_of_file(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, inode, *_ = line.split()
        first, end = (int(one, 16) for one in span.split("-"))
        if first <= address < end:
            return inode != "0"
    return False


class QuantState:
    """What the packed bytes mean: scales per block, themselves described by an object of the kind."""

    def __init__(self, absmax: Tensor, shape: tuple[int, ...], state2: QuantState | None = None) -> None:
        self.absmax, self.shape, self.state2 = absmax, shape, state2


class Params4bit(nn.Parameter):
    """Two values in a byte."""

    def __new__(cls, data: Tensor, quant_state: QuantState) -> Params4bit:
        self: Params4bit = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        return self

    quant_state: QuantState


class Int8Params(nn.Parameter):
    """A byte each; `CB` is an alias until the first forward, which gives it to the state of the module."""

    def __new__(cls, data: Tensor, scale: Tensor) -> Int8Params:
        self: Int8Params = torch.Tensor._make_subclass(cls, data, False)
        self.CB, self.SCB = data, scale
        return self

    CB: Tensor | None
    SCB: Tensor | None


class MatmulState:
    """What the int8 matmul keeps."""

    CB: Tensor | None = None
    SCB: Tensor | None = None


# The engine knows these classes by package and name alone.
for _kind in (QuantState, Params4bit, Int8Params, MatmulState):
    _kind.__module__ = "bitsandbytes.stand_ins"


def packed(weight: Tensor) -> tuple[Tensor, QuantState]:
    """Returns a weight in four bits each, and what they mean."""
    blocks = weight.reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    low = ((blocks / absmax[:, None] + 1) * 7.5).round().to(torch.uint8).flatten()
    return (low[::2] << 4 | low[1::2]).view(-1, 1).contiguous(), QuantState(
        absmax / absmax.max(), tuple(weight.shape), QuantState(absmax.max().reshape(1), (1,))
    )


def unpacked(data: Tensor, state: QuantState) -> Tensor:
    assert state.state2 is not None
    low = torch.stack((data >> 4, data & 15), -1).reshape(-1, BLOCK)
    absmax = state.absmax * state.state2.absmax
    return ((low.float() / 7.5 - 1) * absmax[:, None]).reshape(state.shape)


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: QuantState) -> Tensor:
        data = weight.view(-1, 1)
        SEEN.note(data)
        ctx.tensors, ctx.state = (None, data), state
        return x @ unpacked(data, state).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        _, data = ctx.tensors
        SEEN.note(data)
        return grads[0] @ unpacked(data, ctx.state), None, None


class MatMulInt8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: MatmulState) -> Tensor:
        assert state.CB is not None and state.SCB is not None
        SEEN.note(state.CB)
        ctx.state, ctx.A = state, x
        return x @ (state.CB.float() * state.SCB[:, None]).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        SEEN.note(ctx.state.CB)
        return grads[0] @ (ctx.state.CB.float() * ctx.state.SCB[:, None]), None, None


class Keeping(torch.autograd.Function):
    """Another library's: it takes weight and state from a module of others, and keeps the parameter itself on its ctx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, state: QuantState) -> Tensor:
        SEEN.note(weight)
        ctx.custom_saved_tensors = weight, state, 1.0
        return x @ unpacked(weight, state).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight, state, _ = ctx.custom_saved_tensors
        SEEN.note(weight)
        return grads[0] @ unpacked(weight, state), None, None


class Squares(torch.autograd.Function):
    """Keeps its input on its ctx, as no saved tensor, and its derivative needs that; its module says what else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, state: QuantState, module: Any) -> Tensor:
        INPUTS.note(x)
        ctx.tensors, ctx.state, ctx.hook, ctx.kept = [x, weight.view(-1, 1)], state, module.hook, module.kept
        return x.square() @ unpacked(weight, state).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        x, data = ctx.tensors
        INPUTS.note(x)
        SEEN.note(data)
        grad = 2 * x * (grads[0] @ unpacked(data, ctx.state))
        if ctx.hook is not None:
            ctx.hook(ctx, grads[0])
        return grad, None, None, None


class _Quantized(nn.Module):
    """A frozen matrix; `.to` moves what it holds, as these libraries see to."""

    weight: Any

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Quantized:
        self.weight = self._moved(fn)
        return self

    def _moved(self, fn: Callable[[Tensor], Tensor]) -> Any:
        raise NotImplementedError


class Linear4bit(_Quantized):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = Params4bit(*packed(torch.randn(width, width) / width**0.5))

    def _moved(self, fn: Callable[[Tensor], Tensor]) -> Params4bit:
        old: QuantState = self.weight.quant_state
        assert old.state2 is not None
        state = QuantState(fn(old.absmax), old.shape, QuantState(fn(old.state2.absmax), old.state2.shape))
        return Params4bit(fn(self.weight.data.as_subclass(Tensor)).clone(), state)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = MatMul4Bit.apply(x, self.weight, self.weight.quant_state)  # type: ignore[no-untyped-call]
        return out


class SquaresOf4bit(Linear4bit):
    """A Function that keeps its input and more; nobody else has that input."""

    hook: Callable[[Any, Tensor], None] | None = None  # what its backward does besides
    kept: Tensor | None = None  # what it keeps besides
    given: Tensor | None = None  # what its Function got last, where the program asks for it
    gives = False

    def forward(self, x: Tensor) -> Tensor:
        own = x * 1.5
        out: Tensor = Squares.apply(own, self.weight, self.weight.quant_state, self)  # type: ignore[no-untyped-call]
        self.given = own if self.gives else None
        return out


class Linear8bit(_Quantized):
    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width) / width**0.5
        scale = weight.abs().amax(1) / 127
        self.weight, self.state = Int8Params((weight / scale[:, None]).round().to(torch.int8), scale), MatmulState()

    def _moved(self, fn: Callable[[Tensor], Tensor]) -> Int8Params:
        return Int8Params(fn(self.weight.data.as_subclass(Tensor)).clone(), fn(self.weight.SCB).clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        out: Tensor = MatMulInt8.apply(x, self.weight, self.state)  # type: ignore[no-untyped-call]
        self.weight.data = self.state.CB
        return out


class Scaled(torch.Tensor):
    """A wrapper subclass of two parts: bytes, and a scale for each row."""

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor) -> Scaled:
        kwargs: dict[str, Any] = {"dtype": torch.float32, "device": data8.device}
        made: Scaled = torch.Tensor._make_wrapper_subclass(cls, data8.shape, **kwargs)
        return made

    def __init__(self, data8: Tensor, scale: Tensor) -> None:
        self.data8, self.scale = data8, scale

    @classmethod
    def of(cls, value: Tensor) -> Scaled:
        scale = value.abs().amax(1).clamp(min=1e-12) / 127
        return cls((value / scale[:, None]).round().to(torch.int8), scale)

    def dequantized(self) -> Tensor:
        return self.data8.float() * self.scale[:, None]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(parts["data8"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        if func is aten.detach.default:
            return cls(*(part.detach() for part in (args[0].data8, args[0].scale)))
        if func in (aten.clone.default, aten._to_copy.default):
            to = {key: value for key, value in (kwargs or {}).items() if key == "device"}
            return cls(*(part.to(**to, copy=True) for part in (args[0].data8, args[0].scale)))
        if func is aten.copy_.default and isinstance(args[0], cls):
            made = args[1] if isinstance(args[1], cls) else cls.of(args[1])
            args[0].data8.copy_(made.data8)
            args[0].scale.copy_(made.scale)
            return args[0]
        whole = [one.dequantized() if isinstance(one, cls) else one for one in args]
        return func(*whole, **(kwargs or {}))


class LinearScaled(torch.autograd.Function):
    """Saves the wrapper itself for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Scaled) -> Tensor:
        SEEN.note(weight.data8)
        ctx.save_for_backward(weight)
        return x @ weight.dequantized().t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        SEEN.note(weight.data8)
        return grads[0] @ weight.dequantized(), None


class LinearOfParts(_Quantized):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Scaled.of(torch.randn(width, width) / width**0.5), requires_grad=False)

    def _moved(self, fn: Callable[[Tensor], Tensor]) -> nn.Parameter:
        return nn.Parameter(Scaled(fn(self.weight.data8), fn(self.weight.scale)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = LinearScaled.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


class Foreign(Linear4bit):
    """A matrix of four bits that another library's Function reads past its module."""


class Block(nn.Module):
    """A frozen matrix of some kind with an adapter, as all that fine-tune quantized weights have."""

    def __init__(self, kind: Callable[[int], nn.Module], width: int) -> None:
        super().__init__()
        self.base = kind(width)
        self.a, self.b = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, Foreign):
            weight = self.base.weight
            y = Keeping.apply(x, weight, weight.quant_state)  # type: ignore[no-untyped-call]
        else:
            y = self.base(x)
        out: Tensor = x + torch.tanh(y + self.b(self.a(x)))
        return out


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "four bits": Linear4bit,
    "eight bits": Linear8bit,
    "parts": LinearOfParts,
    "foreign": Foreign,
    "with input": SquaresOf4bit,
}


class Scaling:
    """An object that an optimizer keeps in its state: it knows only itself, as a projector does."""

    def __init__(self, like: Tensor) -> None:
        self.factor = torch.full_like(like, 0.5)
        self.calls = 0

    def __call__(self, value: Tensor) -> Tensor:
        self.calls += 1
        return value * self.factor


class Projector:
    """Keeps the first right singular vectors of a gradient, a view of all of them, and makes them anew now and then."""

    def __init__(self) -> None:
        self.calls, self.vectors = 0, torch.empty(0)

    def __call__(self, grad: Tensor) -> Tensor:
        if self.calls % 3 == 0:
            wide = grad if grad.shape[0] <= grad.shape[1] else grad.t()
            self.vectors = torch.linalg.svd(wide, full_matrices=False).Vh[:2]
        self.calls += 1
        PROJECTORS.note(self.vectors)
        wide = grad if grad.shape[0] <= grad.shape[1] else grad.t()
        low = wide @ self.vectors.t() @ self.vectors
        return low if grad.shape[0] <= grad.shape[1] else low.t()


@tieroff.per_parameter  # it looks at storages, to count them
class Projecting(torch.optim.Optimizer):
    """Descends along a projection of the gradient; each parameter by itself."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    projector = self.state[p].setdefault("projector", Projector())
                    p.add_(projector(p.grad), alpha=-group["lr"])


class Momentum(torch.optim.Optimizer):
    """Momentum in a wrapper subclass of two parts, through an object in its state; each parameter by itself."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["scaling"] = Scaled.of(torch.zeros_like(p)), Scaling(p)
                value = state["momentum"].dequantized().mul_(0.9).add_(state["scaling"](p.grad))
                state["momentum"].copy_(value)
                p.add_(value, alpha=-group["lr"])
