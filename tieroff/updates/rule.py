"""What an update computes: a rule with the scalars of one step, as PyTorch's own expressions give them.

A scalar is computed in fp64 by the expression that the optimizer's Python code has, in its order, and rounded to fp32 where
that hands it to an op; fused kernels on devices take some in fp64 and round corrections to fp32 first.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tieroff.updates.native import _native

DAMPENED = "dampened"
"""In a kind, which has it as a flag beside those of the rule: SGD's gradient is multiplied before it is added."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One step of one optimizer for one parameter; see `UpdatePart` in native/include/tieroff/update/job.hpp.

    Attributes:
        name: adam (AdamW too), sgd, adagrad or lion.
        decay: none, gradient (added to it) or parameter (taken off it).
        flags: of amsgrad, maximize, momentum, first, nesterov.
        scalars: by name.
    """

    name: str
    decay: str = "none"
    flags: tuple[str, ...] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def kind(self) -> tuple[str, str, tuple[str, ...]]:
        """What decides how it is rounded, beside the type; the first step of SGD is rounded as the others.

        Without dampening SGD's gradient is multiplied by 1, and nothing of that product shows in how it is rounded.
        """
        is_dampened = "momentum" in self.flags and self.scalars["first_rest"] != 1
        return self.name, self.decay, (*(flag for flag in self.flags if flag != "first"), *([DAMPENED] if is_dampened else ()))

    @property
    def tensor_count(self) -> int:
        """How many tensors it takes: the parameter, the gradient, then state."""
        if self.name == "adam":
            return 5 if "amsgrad" in self.flags else 4
        return 2 if self.name == "sgd" and "momentum" not in self.flags else 3

    def part(
        self,
        arithmetic: str,
        type_name: str,
        count: int,
        inputs: Sequence[int],
        outputs: Sequence[int],
        factors: Sequence[float] = (),
    ) -> _native.UpdatePart:
        """Returns the update of `count` elements at these addresses, in order of `tensor_count`.

        Args:
            arithmetic: how it is rounded; see `arithmetic.py`.
            type_name: float32 or bfloat16, of all tensors.
            count: of elements.
            inputs: where tensors are read.
            outputs: where they are written: there, or in memory of their own. That of the gradient is not used.
            factors: what the gradient is multiplied by first, one after the other, each product rounded to its type.
        """
        scalars = list(self.scalars.items())
        return _native.UpdatePart(
            self.name, arithmetic, type_name, self.decay, list(self.flags), count, inputs, outputs, scalars, factors
        )


def _single(value: float) -> float:
    """Returns the nearest fp32 number."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def adam(
    step: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decouples: bool,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Rule:
    """Returns a step of Adam, or of AdamW where decay is decoupled; `step` counts from 1."""
    beta1, beta2 = betas
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    return Rule(
        "adam",
        _decay(weight_decay, decouples=decouples),
        tuple(name for name, is_set in (("amsgrad", amsgrad), ("maximize", maximize)) if is_set),
        {
            "decay": 1 - lr * weight_decay if decouples else weight_decay,
            "rate_decay": lr * weight_decay,
            "step": (lr / correction1) * -1,
            "first": beta1,
            "first_rest": 1 - beta1,
            "second": beta2,
            "second_rest": 1 - beta2,
            "root_correction": correction2**0.5,
            "epsilon": eps,
            "float_step": lr / _single(correction1),
            "float_root_correction": math.sqrt(_single(correction2)),
        },
    )


def sgd(
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    is_first: bool = False,
) -> Rule:
    """Returns a step of SGD; `is_first` where there is no momentum yet."""
    flags = (("maximize", maximize), ("momentum", momentum != 0), ("first", is_first), ("nesterov", nesterov))
    return Rule(
        "sgd",
        _decay(weight_decay, decouples=False),
        tuple(name for name, is_set in flags if is_set),
        {"decay": weight_decay, "step": -lr, "first": momentum, "first_rest": 1 - dampening},
    )


def adagrad(
    step: float, *, lr: float, lr_decay: float = 0.0, eps: float = 1e-10, weight_decay: float = 0.0, maximize: bool = False
) -> Rule:
    """Returns a step of Adagrad; `step` counts from 1."""
    return Rule(
        "adagrad",
        _decay(weight_decay, decouples=False),
        ("maximize",) if maximize else (),
        {"decay": weight_decay, "step": -lr / (1 + (step - 1) * lr_decay), "epsilon": eps},
    )


def lion(*, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> Rule:
    """Returns a step of Lion."""
    scalars = {"decay": 1 - lr * weight_decay, "step": -lr}
    for name, beta in zip(("first", "second"), betas, strict=True):
        scalars |= {name: beta, f"{name}_rest": 1 - beta}
    return Rule("lion", _decay(weight_decay, decouples=True), (), scalars)


def typical(name: str, decay: str, flags: tuple[str, ...]) -> Rule:
    """Returns a rule of this kind (see `Rule.kind`) whose scalars are nothing special: products with them are rounded."""
    lr, weight_decay, is_maximized = 0.0173, 0.013 if decay != "none" else 0.0, "maximize" in flags
    if name == "adam":
        return adam(
            7,
            lr=lr,
            betas=(0.87, 0.991),
            eps=1e-8,
            weight_decay=weight_decay,
            decouples=decay == "parameter",
            amsgrad="amsgrad" in flags,
            maximize=is_maximized,
        )
    if name == "adagrad":
        return adagrad(7, lr=lr, weight_decay=weight_decay, maximize=is_maximized)
    if name == "lion":
        return lion(lr=lr, betas=(0.87, 0.991), weight_decay=weight_decay)
    return sgd(
        lr=lr,
        momentum=0.87 if "momentum" in flags else 0.0,
        dampening=0.13 if DAMPENED in flags else 0.0,
        weight_decay=weight_decay,
        nesterov="nesterov" in flags,
        maximize=is_maximized,
    )


def _decay(weight_decay: float, *, decouples: bool) -> str:
    if not weight_decay:
        return "none"
    return "parameter" if decouples else "gradient"
