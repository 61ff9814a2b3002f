"""Quiet events: those of a planned step at which nothing is due, of tensors that the plan leaves where they are.

[Note: quiet events]
What an event costs is Python, and of most plans most events ask for nothing: they end one op and begin another. That is of use
while durations are wanted, so the steps that `Feedback` looks at have all their events. In the steps between those, hooks let
the quiet ones go by: two ops round a quiet event are one there, whose memory is the larger one's, so that counts stay what they
were. Quiet are only events of tensors that stay for the whole step: reads of a parameter, saved tensors, gradients, updates of
buckets, of which neighbours are updated in one call then, as far as that takes no more memory than the plan has anyway. What
comes at the others tells a step that leaves its plan, somewhat later than every event would; copies are right in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tieroff.runtime.step.program import Program


@dataclass(frozen=True, slots=True)
class Residents:
    """What a plan has on the device for the whole step: resident tensors.

    Attributes:
        parameters, gradients: by position.
        activations: by ordinal.
        buckets: those of which the update uses nothing else.
    """

    parameters: frozenset[int]
    activations: frozenset[int]
    gradients: frozenset[int]
    buckets: frozenset[int]


@dataclass(frozen=True, slots=True)
class Quiet:
    """The quiet events of a plan.

    Attributes:
        reads: of these parameters (by position), as modules use them.
        saved: of these parameters, as backward uses what was saved of them.
        packs, unpacks: of these activations, by ordinal.
        gradients: of these parameters, as their gradients arrive.
        buckets: number of a bucket -> those that are updated with it, itself among them, in order.
        following: per tick, the first one from there on whose event is not quiet; the number of ticks, where there is none.
        births: per tick, bytes that come to life from its op up to the next event that is not quiet; see `Executable`.
        transients: the most that one of those ops takes for itself.
        peaks: the same with what came to life before it.
    """

    reads: frozenset[int] = frozenset()
    saved: frozenset[int] = frozenset()
    packs: frozenset[int] = frozenset()
    unpacks: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()
    buckets: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    following: tuple[int, ...] = ()
    births: tuple[int, ...] = ()
    transients: tuple[int, ...] = ()
    peaks: tuple[int, ...] = ()


NOTHING = Quiet()


def make_quiet(
    keys: Sequence[Hashable],
    program: Program,
    residents: Residents,
    births: Sequence[int],
    transients: Sequence[int],
    free_bytes: Sequence[int],
) -> Quiet:
    """Returns the quiet events of a plan.

    Args:
        keys: its events.
        program: what is due at each.
        residents: what it leaves where it is.
        births, transients: per op, as `Executable` has them.
        free_bytes: per op, what the plan's peak leaves besides all that there is.
    """
    names = _names_of(keys)
    due = {name for name, actions in zip(names, program, strict=False) if actions is not None}  # one tick more: the end
    may_be = {
        "param": residents.parameters,
        "saved": residents.parameters,
        "pack": residents.activations,
        "unpack": residents.activations,
        "grad": residents.gradients,
        "bucket": residents.buckets,
    }
    quiet = {name for name in set(names) - due if name is not None and name[1] in may_be[name[0]]}
    following = list(range(len(keys) + 1))
    for at in range(len(keys) - 1, -1, -1):
        if names[at] in quiet:
            following[at] = following[at + 1]
    spans = [range(at, following[at + 1]) for at in range(len(keys))]

    def of(kind: str) -> frozenset[int]:
        return frozenset(number for name, number in quiet if name == kind)

    return Quiet(
        reads=of("param"),
        saved=of("saved"),
        packs=of("pack"),
        unpacks=of("unpack"),
        gradients=of("grad"),
        buckets=_updated_together(names, of("bucket"), transients, free_bytes),
        following=tuple(following),
        births=tuple(sum(births[op] for op in span) for span in spans),
        transients=tuple(max(transients[op] for op in span) for span in spans),
        peaks=tuple(_peak(span, births, transients) for span in spans),
    )


def _updated_together(
    names: Sequence[tuple[str, int] | None], quiet: Collection[int], transients: Sequence[int], free_bytes: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Returns for each quiet bucket those that are updated with it: neighbours, which take what they need all at once."""
    groups: list[list[int]] = []
    before, needed, free = -1, 0, 0
    for at, name in enumerate(names):
        if name is None or name[0] != "bucket" or name[1] not in quiet:
            continue
        needed, free = needed + transients[at], min(free, free_bytes[at] + transients[at])
        if at != before + 1 or needed > free:
            groups.append([])
            needed, free = transients[at], free_bytes[at] + transients[at]
        groups[-1].append(name[1])
        before = at
    return {number: tuple(group) for group in groups for number in group}


def _peak(span: Collection[int], births: Sequence[int], transients: Sequence[int]) -> int:
    born = accumulate(births[op] for op in span)
    return max(transients[op] + born_bytes for op, born_bytes in zip(span, born, strict=True))


def _names_of(keys: Sequence[Hashable]) -> list[tuple[str, int] | None]:
    """Returns what each event is about: (kind, position or ordinal); None where it is never quiet.

    A tensor is saved for the first time in the order of ordinals, by which its event does not name it.
    """
    names: list[tuple[str, int] | None] = []
    packed = 0
    for key in keys:
        name = None
        if isinstance(key, tuple) and len(key) == 2:
            kind, number = key
            if kind == "pack":
                name, packed = (kind, packed), packed + 1
            elif kind in ("param", "saved", "unpack", "grad", "bucket"):
                name = (kind, number)
        names.append(name)
    return names
