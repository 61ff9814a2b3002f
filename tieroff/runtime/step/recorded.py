"""What one recorded step showed of its kind."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tieroff.core.trace import Trace
from tieroff.runtime.step.likeness import likeness_of


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm of one tensor that user code asks for.

    Attributes:
        is_listed: by the function that takes a list of tensors; its sums may be other ones.
        order: of the norm.
    """

    is_listed: bool
    order: float

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns it, of shape []."""
        if self.is_listed:
            norms: Sequence[torch.Tensor] = torch._foreach_norm([tensor], self.order)
            return norms[0]
        value: torch.Tensor = torch.linalg.vector_norm(tensor, self.order)
        return value


@dataclass(frozen=True)
class Recorded:
    """The events and tensors of a recorded step.

    Attributes:
        keys: the events in order; an op begins with each.
        names: the same for people.
        trace: durations in it are 0.
        index: key of a tensor -> its number in the trace.
        written: keys of parameters that forward or backward itself writes, in ways that a version may not show.
        written_by_hooks: gradients that user code wrote in backward after they had arrived.
        used_below: gradients that user code used after backward, and whether it wrote them.
        leaves_gradients: the update took all gradients as one backward made them: user code used none.
        scratch_bytes: the most memory that an op took for itself.
        norms: gradients that user code measured or scaled where they lay below -> the norms that it took.
        places: per activation, how many tensors autograd had saved before it: a smaller step may have one that is too small to
            move in such a place.
        beside: op in which tensors came up for user code alone -> the most bytes that such a call had beside them, of what is
            no tensor of the trace, or was made in that op.
        foreign_bytes: of parameters that the step read, of a model that is not wrapped.
    """

    keys: tuple[Hashable, ...]
    names: tuple[str, ...]
    trace: Trace
    index: Mapping[Hashable, int]
    written: frozenset[Hashable]
    written_by_hooks: frozenset[int]
    used_below: Mapping[int, bool]
    leaves_gradients: bool
    scratch_bytes: int
    norms: Mapping[Hashable, frozenset[Norm]] = field(default_factory=dict)
    places: tuple[int, ...] = ()
    beside: Mapping[int, int] = field(default_factory=dict)
    foreign_bytes: int = 0

    @functools.cached_property  # asked in every step
    def update_at(self) -> int:
        """The tick at which the update begins; the number of ticks when there is none."""
        return update_of(self.keys)

    @functools.cached_property
    def likeness(self) -> int:
        """What steps with these events share; see [Note: turns] in step/likeness.py."""
        return likeness_of(self.keys)

    @functools.cached_property
    def is_updated(self) -> bool:
        """False for a step that another model's update ends; optimizer state is no part of it."""
        return is_updated(self.keys)


def is_updated(keys: tuple[Hashable, ...]) -> bool:
    """True when some bucket is updated in the step, after backward or, "early", in the midst of it."""
    return any(isinstance(key, tuple) and key[0] in ("bucket", "early") for key in keys)


def update_of(keys: tuple[Hashable, ...]) -> int:
    """Returns the tick at which the update begins; the number of ticks when there is none."""
    return next((i for i, key in enumerate(keys) if isinstance(key, tuple) and key[0] == "bucket"), len(keys))
