"""Stages of a kind of step, and what the runtime makes of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieroff.core.plan import Plan, Residency, Transfer
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import StateError
from tieroff.runtime.step.executable import Executable, make_executable
from tieroff.runtime.step.kinds import Measuring, Recording, Stage, StepKind, Unplanned
from tieroff.runtime.step.known_kinds import KnownKinds
from tieroff.runtime.step.likeness import Turns, is_like, likeness_of, suits
from tieroff.runtime.step.program import Actions
from tieroff.runtime.step.quiet import Quiet, Residents, make_quiet
from tieroff.runtime.step.recorded import Recorded

KEYS = (("forward",), ("param", 0), ("grad", 0), ("bucket", 0), ("end",))
PARAMETER, GRADIENT = 0, 1
DEVICE, HOST = Tier.DEVICE, Tier.HOST


def trace() -> Trace:
    ops = tuple(Op(str(key), 1) for key in KEYS)
    tensors = (
        Tensor("w", 64, TensorClass.PARAMETER, is_persistent=True),
        Tensor("gradient of w", 64, TensorClass.GRADIENT, holds=((2, 3),)),
    )
    return Trace(ops, tensors)


def recorded(written_by_hooks: frozenset[int] = frozenset(), **fields: Any) -> Recorded:
    plain = Recorded(KEYS, tuple(map(str, KEYS)), trace(), {}, frozenset(), written_by_hooks, {}, False, 0)
    return replace(plain, **fields)


def plan(residencies: tuple[Residency, ...], transfers: tuple[Transfer, ...]) -> Plan:
    return Plan("test", "", len(KEYS), {}, {}, residencies, transfers)


GRADIENT_LEAVES_AND_RETURNS = plan(
    (Residency(GRADIENT, DEVICE, 2, 3), Residency(GRADIENT, HOST, 2, 5), Residency(GRADIENT, DEVICE, 3, 5)),
    (Transfer(GRADIENT, DEVICE, HOST, 3, 3, 0), Transfer(GRADIENT, HOST, DEVICE, 3, 3, 0)),
)


@pytest.mark.parametrize("stage", [Measuring(recorded()), Unplanned(), Recording()], ids=lambda s: type(s).__name__)
def test_a_kind_begins_with_a_recording_and_only_measured_ones_are_planned(stage: Stage) -> None:
    kind = StepKind()
    kind.advance(stage)
    if isinstance(stage, Measuring):
        kind.adopt(recorded(), trace(), plan((), ()))
        assert kind.planned is not None and kind.moves_nothing
        kind.advance(Recording())
        assert kind.planned is not None, "the last plan is known while the kind is traced again"
        assert not kind.moves_nothing
    else:
        with pytest.raises(StateError, match=f"from {type(stage).__name__} to Planned"):
            kind.adopt(recorded(), trace(), plan((), ()))


def test_a_stage_that_cannot_follow_is_refused() -> None:
    kind = StepKind()
    kind.advance(Unplanned())
    with pytest.raises(StateError, match="from Unplanned to Measuring"):
        kind.advance(Measuring(recorded()))


def first_copies(executable: Executable) -> dict[int, int]:
    return {tensor: copies[0][0] for tensor, copies in executable.copied.items()}


def test_transfers_of_gradients_that_hooks_write_wait_for_the_update() -> None:
    executable = make_executable(GRADIENT_LEAVES_AND_RETURNS, trace(), recorded())
    assert first_copies(executable) == {GRADIENT: 3}
    executable = make_executable(GRADIENT_LEAVES_AND_RETURNS, trace(), recorded(frozenset({GRADIENT})))
    assert first_copies(executable) == {}
    actions = [found for found in executable.program if found is not None]
    assert [way for found in actions for way, _ in found.issues] == [True] and not any(found.outs_first for found in actions)


def test_what_stays_through_user_code_is_copied_out_after_it() -> None:
    early = (Transfer(GRADIENT, DEVICE, HOST, 2, 4, 0), Transfer(PARAMETER, DEVICE, HOST, 2, 2, 1))
    everything = plan(
        (
            Residency(PARAMETER, DEVICE, 0, 2),  # gone before user code runs: its copy is none of it
            Residency(PARAMETER, HOST, 2, 5),
            Residency(GRADIENT, DEVICE, 2, 4),
            Residency(GRADIENT, HOST, 2, 5),
        ),
        early,
    )
    executable = make_executable(everything, trace(), recorded())
    assert executable.stays_after_backward == {GRADIENT}
    assert first_copies(executable) == {PARAMETER: 2, GRADIENT: executable.update_at}


@pytest.mark.parametrize(
    ("fields", "is_late"),
    [
        ({}, False),
        ({"used_below": {GRADIENT: False}}, False),
        ({"used_below": {GRADIENT: True}}, True),
        ({"index": {("gradient", 0): GRADIENT}, "norms": {("gradient", 0): frozenset()}}, True),
    ],
)
def test_what_user_code_writes_before_it_leaves_is_copied_out_as_the_update_begins(fields: Any, is_late: bool) -> None:
    """A copy that goes on meanwhile is void, and reads what is written."""
    leaves = plan(
        (Residency(GRADIENT, DEVICE, 2, 3), Residency(GRADIENT, HOST, 2, 5)), (Transfer(GRADIENT, DEVICE, HOST, 2, 3, 0),)
    )
    executable = make_executable(leaves, trace(), recorded(**fields))
    assert executable.update_at == 3
    assert first_copies(executable) == {GRADIENT: 3 if is_late else 2}
    at_update = executable.program[3]
    assert at_update is not None
    assert at_update.outs_first == ((GRADIENT,) if is_late else ()) and at_update.waits == at_update.leaves == (GRADIENT,)


@pytest.mark.parametrize("is_used", [False, True])
def test_a_gradient_that_comes_back_for_the_update_comes_after_user_code(is_used: bool) -> None:
    """There meanwhile, it would count as written, and be copied out once more."""
    keys = (("forward",), ("param", 0), ("grad", 0), ("grad", 1), ("unpack", 0), ("bucket", 0), ("end",))
    ops = [Op(str(key), 1) for key in keys]
    ops[2], ops[5] = replace(ops[2], writes=(GRADIENT,)), replace(ops[5], reads=(GRADIENT,))
    longer = Trace(tuple(ops), trace().tensors)
    residencies = (Residency(GRADIENT, DEVICE, 2, 3), Residency(GRADIENT, HOST, 3, 7), Residency(GRADIENT, DEVICE, 4, 7))
    transfers = (Transfer(GRADIENT, DEVICE, HOST, 3, 3, 0), Transfer(GRADIENT, HOST, DEVICE, 4, 5, 0))
    leaves = Plan("test", "", len(keys), {}, {}, residencies, transfers)
    used: dict[str, Any] = {"used_below": {GRADIENT: False}} if is_used else {}
    found = make_executable(leaves, longer, recorded(keys=keys, names=tuple(map(str, keys)), trace=longer, **used))
    assert found.update_at == 5
    assert found.stays_after_backward == ({GRADIENT} if is_used else set())
    issued = [at for at, actions in enumerate(found.program) if actions is not None and (True, GRADIENT) in actions.issues]
    assert issued[0] == (4 if is_used else 5)


def test_what_is_there_for_the_update_stays_and_is_fetched_again_if_it_had_to_leave() -> None:
    everything = plan(
        (
            Residency(PARAMETER, HOST, 0, 5),
            Residency(PARAMETER, DEVICE, 1, 4),
            Residency(GRADIENT, DEVICE, 2, 3),
            Residency(GRADIENT, HOST, 2, 5),
        ),
        (Transfer(PARAMETER, HOST, DEVICE, 1, 1, 7),),
    )
    executable = make_executable(everything, trace(), recorded())
    assert executable.stays_after_backward == {PARAMETER, GRADIENT}
    at_update = executable.program[executable.update_at]
    assert at_update is not None and at_update.issues == ((True, PARAMETER),)
    assert not at_update.arrivals, "it is awaited where it is used"


def test_events_suit_those_of_a_step_with_larger_tensors() -> None:
    small = ((torch.float32, (3, 4), False), "int", True)
    large = ((torch.float32, (5, 4), False), "int", True)
    narrow = ((torch.float32, (5, 2), False), "int", True)
    assert suits(("forward", small), ("forward", large)) and not suits(("forward", large), ("forward", small))
    assert not suits(("forward", narrow), ("forward", small))
    assert not suits(("forward", ((torch.float64, (3, 4), False), "int", True)), ("forward", large))
    assert suits(("pack", 8), ("pack", 9)) and not suits(("pack", 10), ("pack", 9))
    assert suits(("grad", 1), ("grad", 1)) and not suits(("grad", 1), ("grad", 2))
    assert is_like([("pack", 8), ("end",)], [("pack", 9), ("end",)])
    assert not is_like([("pack", 8)], [("pack", 9), ("end",)])


EVENTS = (("forward",), ("param", 0), ("pack", 64), ("param", 1), ("pack", 64), ("unpack", 1), ("saved", 0), ("unpack", 0),
          ("grad", 0), ("bucket", 0), ("bucket", 1), ("bucket", 2), ("end",))  # fmt: skip
DUE = Actions((), (), (), ((True, 9),), ())
STAYING = Residents(frozenset({0}), frozenset({0, 1}), frozenset({0}), frozenset({0, 1, 2}))


def quiet(*due: int, free_bytes: int = 100, transients: tuple[int, ...] = (8,) * len(EVENTS)) -> Quiet:
    """Returns the quiet events of a plan that has something to do at these ticks."""
    program = tuple(DUE if at in due else None for at in range(len(EVENTS) + 1))
    return make_quiet(EVENTS, program, STAYING, (1,) * len(EVENTS), transients, (free_bytes,) * len(EVENTS))


def test_events_of_what_stays_are_quiet_where_nothing_is_due() -> None:
    made = quiet()
    assert (set(made.reads), set(made.saved), set(made.gradients)) == ({0}, {0}, {0})
    assert set(made.packs) == set(made.unpacks) == {0, 1}
    assert made.following == (0, 3, 3, 3, 12, 12, 12, 12, 12, 12, 12, 12, 12, 13), "parameter 1 moves"
    made = quiet(4, 7, 8)
    assert (set(made.packs), set(made.unpacks), set(made.gradients)) == ({0}, {1}, set()), (
        "a tensor is packed by its number, not its size"
    )
    assert made.following == (0, 3, 3, 3, 4, 7, 7, 7, 8, 12, 12, 12, 12, 13)


def test_an_event_that_comes_twice_is_quiet_where_neither_has_anything_due() -> None:
    keys = (("param", 0), ("grad", 0), ("param", 0), ("end",))
    made = make_quiet(keys, (None, None, DUE, None, None), STAYING, (0,) * 4, (0,) * 4, (0,) * 4)
    assert made.reads == frozenset() and made.following == (0, 2, 2, 3, 4)


def test_neighbouring_buckets_are_updated_together_as_far_as_there_is_room() -> None:
    assert quiet().buckets == dict.fromkeys((0, 1, 2), (0, 1, 2))
    assert quiet(10).buckets == {0: (0,), 2: (2,)}, "one between them is none of them"
    assert quiet(free_bytes=8).buckets == {0: (0, 1), 1: (0, 1), 2: (2,)}, "8 free bytes and 8 that one takes are for two"
    assert quiet(free_bytes=-8).buckets == {0: (0,), 1: (1,), 2: (2,)}


@given(data=st.data())
def test_a_quiet_walk_counts_the_memory_of_a_whole_one(data: st.DataObject) -> None:
    size = st.integers(0, 50)
    births, transients = (tuple(data.draw(st.lists(size, min_size=13, max_size=13))) for _ in range(2))
    born_early = data.draw(st.integers(-40, 40))  # more or less is held by the engine than the trace has by now
    program = tuple(DUE if data.draw(st.booleans()) else None for _ in range(len(EVENTS) + 1))
    made = make_quiet(EVENTS, program, STAYING, births, transients, (0,) * len(EVENTS))
    whole, unborn = [], born_early
    for op in range(len(EVENTS)):
        unborn += births[op]
        whole.append(transients[op] + max(unborn, 0))
    walked, unborn, at = [], born_early, made.following[0]
    while at < len(EVENTS):
        walked.append(max(made.transients[at], unborn + made.peaks[at]))
        unborn += made.births[at]
        at = made.following[at + 1]
    assert max(walked) == max(whole)
    assert unborn == born_early + sum(births)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=16), st.lists(st.integers(0, 3), max_size=20))
def test_steps_that_come_by_turns_are_foreseen_once_two_rounds_have_passed(turn: list[int], before: list[int]) -> None:
    turns = Turns()
    for one in before:
        turns.note(one)
    for one in turn * 6:
        turns.note(one)
    for one in turn:
        expected = turns.next()
        assert expected == one or (expected is None and len(set(turn)) == 1)
        turns.note(one)


def test_what_is_no_turn_is_not_foreseen() -> None:
    turns = Turns()
    assert turns.next() is None
    for one in (1, 1, 1, 1, 2):
        turns.note(one)
        assert turns.next() is None
    turns.note(1)
    turns.note(2)
    assert turns.next() == 1, "two of each"


def test_a_recorded_step_waits_for_its_like_no_longer_than_it_has_taken_before() -> None:
    turns = Turns()
    for one in (1, 2, 3, 1):
        turns.note(one)
    assert not turns.awaits(1), "the last one was such, and is not what was recorded for another reason"
    waits = []
    for one in (2, 3, 3, 3):
        turns.note(one)
        waits.append(turns.awaits(1))
    assert waits == [True, True, False, False]
    turns = Turns()
    turns.note(1)
    turns.note(1)
    turns.note(2)
    assert not turns.awaits(1), "it never came back after another"
    assert not turns.awaits(9)


def test_steps_in_turn_are_kinds_of_their_own_and_share_what_came() -> None:
    kinds, signature = KnownKinds(), ("float32", "held")

    def enter() -> StepKind:
        return kinds.enter(signature, is_covered=False, is_passed_through=False)

    first = enter()
    for one in (1, 2, 1, 2):
        first.came(one)
    other = enter()
    assert other is not first and other.turn == 1 and other.turns is first.turns
    assert not other.came(2), "a known one, out of turn"
    assert enter() is first, "no turns any more"
    for one in (1, 2, 1, 2):
        first.came(one)
    assert enter() is other
    assert other.came(3) and other.turn == 3, "what was seen of it, while it left a plan, was not all"
    kinds.rename(other, ("float32", "more"))
    assert kinds["float32", "more", 3] is other


def test_likeness_is_of_events_and_not_of_sizes() -> None:
    large, small = ((torch.float32, (8, 4), False), "int", True), ((torch.float32, (3, 4), False), "int", True)
    keys = (("forward", large), ("pack", 9), ("grad", 0), ("end",))
    assert likeness_of(keys) == likeness_of((("forward", small), ("pack", 8), ("grad", 0), ("end",)))
    assert likeness_of(keys) == likeness_of((("forward", large), ("pass",), ("param", 3), ("passed",), *keys[1:]))
    assert likeness_of(keys) != likeness_of((*keys[:2], ("grad", 1), ("end",)))


def test_a_kind_that_others_foretell_is_traced_in_its_time_though_one_like_it_was_traced_before() -> None:
    """Inputs of two shapes in turn, of which the second made more state: the first is another kind from then on."""
    kinds = KnownKinds()
    wide, long = (torch.float32, (16, 1, 64), False), (torch.float32, (8, 2, 64), False)

    def enter(*signature: Any) -> StepKind:
        return kinds.enter(signature, is_covered=True, is_passed_through=False)

    for signature in ((wide, "some state"), (long, "all state")):
        kind = enter(*signature)
        kind.retraces = 1
        kind.advance(Measuring(recorded()))
    stages = [type(enter(wide, "all state").stage) for _ in range(6)]
    assert stages[-1] is Recording and stages[0] is Unplanned
