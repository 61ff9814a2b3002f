"""The recorder of one step: what lives beside what while an op runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch

from tests.support.injector import Injector
from tieroff.core.seams import Subject
from tieroff.core.tensor import TensorClass
from tieroff.tracing.recorder import StepRecorder
from tieroff.tracing.recording.between import Between
from tieroff.tracing.recording.scratch import PeakCounter

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeakCounter, "reset", lambda self: False)


def mib() -> torch.Tensor:
    return torch.ones(MIB // 4)


def transients(
    *steps: Callable[[], object],
    recorder: StepRecorder | None = None,
    subjects: Sequence[Subject] = (),
    backward_at: int | None = None,
) -> list[int]:
    """Returns the transient MiB of ops that run one function each, of which one may begin a backward."""
    recorder = recorder or StepRecorder(torch.device("cpu"))
    recorder.start()
    try:
        for index, step in enumerate(steps):
            recorder.event("op", "backward" if index == backward_at else "")
            step()
        recorder.event("end", "")
    finally:
        recorder.stop()
    trace = recorder.finish([*subjects], [0] * (len(steps) + 1), "test")
    return [op.transient_bytes // MIB for op in trace.ops[:-1]]


def test_result_lies_beside_the_argument_that_ends_with_its_op() -> None:
    def last_of_its_op() -> None:
        tensor = mib()
        tensor = tensor + 1

    def in_mid_op() -> None:
        tensor = mib()
        tensor = tensor + 1
        tensor.sum()

    assert transients(last_of_its_op, in_mid_op) == [2, 2]


def subject(key: str, kind: TensorClass, *, is_persistent: bool = True) -> Subject:
    return Subject(key, key, MIB, kind, is_persistent=is_persistent)


def test_state_made_anew_lies_beside_what_it_replaces() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    state = {"m": mib()}
    replaced: list[torch.Tensor] = []

    def find() -> None:
        recorder.bind(state["m"].untyped_storage(), "m", is_new=True)

    def in_place() -> None:
        state["m"].add_(1)

    def anew() -> None:
        replaced.append(state["m"])
        state["m"] = state["m"] + 1
        recorder.bind(state["m"].untyped_storage(), "m")
        replaced.clear()
        state["m"].sum()

    found = transients(find, in_place, anew, in_place, recorder=recorder, subjects=[subject("m", TensorClass.OPTIMIZER)])
    assert found == [0, 0, 1, 0]


def test_memory_given_to_a_parameter_counts_once_until_then_and_as_the_parameter_from_then_on() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    held = [mib()]

    def find() -> None:
        recorder.bind(held[0].untyped_storage(), "p", is_new=True)

    def give() -> None:
        made = held[0] + 1
        made.sum()
        recorder.bind(made.untyped_storage(), "p", is_set=True)
        held[0] = made

    found = transients(find, give, lambda: held[0].sum(), recorder=recorder, subjects=[subject("p", TensorClass.PARAMETER)])
    assert found == [0, 1, 0]


def test_what_died_before_an_op_does_not_lie_beside_its_result() -> None:
    def one_after_the_other() -> None:
        for _ in range(3):
            mib()

    assert transients(one_after_the_other) == [1]


def test_a_tensor_is_there_in_the_op_in_which_it_dies() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    recorder.start()
    recorder.event("made", "")
    gradient = mib()
    recorder.bind(gradient.untyped_storage(), "gradient")
    recorder.event("idle", "")
    recorder.event("cleared", "")
    recorder.died("gradient")  # and what user code made before that lay beside it
    recorder.event("end", "")
    trace = recorder.finish([Subject("gradient", "gradient", MIB, TensorClass.GRADIENT)], [0] * 4, "test")
    assert trace.tensors[0].lives_until == 3
    assert gradient.sum() > 0


def test_what_outlives_its_op_counts_in_the_next_ones() -> None:
    kept: list[torch.Tensor] = []
    assert transients(lambda: kept.append(mib()), lambda: kept.append(mib()), kept.clear, lambda: None) == [1, 2, 2, 0]


def test_a_tensor_made_of_values_is_there_from_the_op_that_makes_it() -> None:
    """`torch.tensor` shows as an op on memory that nobody was seen to make, as what was there before the step would."""
    values = [0.0] * (MIB // 4)
    kept: list[torch.Tensor] = []
    assert transients(lambda: None, lambda: kept.append(torch.tensor(values)), kept.clear, lambda: None) == [0, 1, 1, 0]


def test_the_birth_of_another_tensor_at_the_same_address_is_forgotten_with_it() -> None:
    class Storage:  # an allocator gives an address again when it likes
        _cdata = 4096

    between, storage, other = Between({}), cast(Any, Storage()), cast(Any, Storage())
    between.note(storage, (3, 2), ())
    assert between.birth_of(storage) == (3, 2) and between.birth_of(other) is None
    del storage
    assert between.birth_of(other) is None


def test_what_user_code_made_a_tensor_of_is_beside_it_where_the_step_uses_that() -> None:
    scratch: dict[int, int] = {}
    between = Between(scratch)
    before, first, second, third = torch.ones(8), torch.ones(64), torch.ones(32), torch.ones(16)
    between.note(first.untyped_storage(), (3, 1), [(before, False)])
    between.note(second.untyped_storage(), (4, 1), [(first, False), (first[:2], False), (before, False)])
    between.note(third.untyped_storage(), (5, 1), [(second, False)])
    assert scratch == {}  # nothing of it is the step's
    assert between.birth_of(second.untyped_storage()) == (4, 1) and scratch == {}  # later, as a batch is
    between.begin((), 6)
    assert between.birth_of(first.untyped_storage()) == (3, 1) and scratch == {}
    assert between.birth_of(second.untyped_storage()) == (4, 1) and scratch == {4: 256}


def calls_of(run: Callable[[], object]) -> int:
    """Returns how many Python functions run."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_what_an_op_costs_does_not_depend_on_what_is_alive() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    recorder.start()
    try:
        recorder.event("op", "forward")
        one = torch.ones(4)
        one + one  # what is done once per kind of op
        few = calls_of(lambda: one + one)
        alive = [one * i for i in range(3000)]
        many = calls_of(lambda: one + one)
    finally:
        recorder.stop()
    assert len(alive) == 3000 and many <= few + 2


def test_deaths_are_seen_whoever_held_the_tensor_last() -> None:
    weight = torch.ones(MIB // 4, requires_grad=True)

    def saved_by_autograd() -> None:
        graph.append((weight * 2).exp().sum())

    graph: list[torch.Tensor] = []
    steps = (saved_by_autograd, lambda: None, lambda: graph.pop().backward(), lambda: None)
    # The weight, what is saved, and the gradient that the step before has left; the weight and its gradient.
    assert transients(*steps)[1:4:2] == [3, 2]


def test_data_loading_after_a_backward_is_not_the_steps_until_the_step_uses_it() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    recorder.start()
    try:
        recorder.event("backward", "backward")
        gradient = mib()
        recorder.backward_ended()
        raw = [mib() for _ in range(5)]
        batch = raw[0] + raw[1]
        gradient.mul_(2)
        recorder.event("forward", "forward")
        del raw
        batch.sum()
        recorder.event("end", "")
    finally:
        recorder.stop()
    trace = recorder.finish([], [0] * 3, "test")
    # The gradient and the batch; while the first is made anew, that of the step before is there too.
    assert [op.transient_bytes // MIB for op in trace.ops] == [3, 2, 2]


def test_what_is_left_at_the_end_is_there_as_the_next_step_begins_until_its_like_is_made() -> None:
    kept: list[torch.Tensor] = []
    assert transients(lambda: None, lambda: kept.append(mib()), lambda: None) == [1, 2, 1]


def test_what_a_forward_returns_has_its_like_beside_it_until_the_forward_ends() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    kept: list[torch.Tensor] = []

    def returns() -> None:
        mib()
        recorder.returned([kept[0].untyped_storage()])

    assert transients(lambda: kept.append(mib()), returns, lambda: None, recorder=recorder) == [2, 3, 1]


def test_what_a_backward_returns_has_its_like_beside_it_until_the_last_of_a_row_ends() -> None:
    """As in `a, b = (torch.autograd.grad(loss, parameters) for loss in losses)`; a parameter's gradient is no result."""
    recorder = StepRecorder(torch.device("cpu"))
    kept: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    recorder.watch_gradients(lambda: gradients)
    recorder.start()
    try:
        recorder.event("forward", "forward")
        for name in ("first", "second"):
            recorder.event(name, "backward")
            kept.append(mib())
            recorder.event(f"rest of {name}", "backward")
            gradients.append(mib())
            recorder.backward_ended()
        recorder.event("update", "optimizer")
        kept.append(mib())
        recorder.event("end", "")
    finally:
        recorder.stop()
    trace = recorder.finish([], [0] * 7, "test")
    # At first what the step before left: two results, two gradients, and what the update made; these go as their likes come.
    assert [op.transient_bytes // MIB for op in trace.ops] == [5, 6, 7, 7, 8, 6, 5]


def test_what_a_loss_holds_is_there_until_the_next_backward_begins() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    kept: list[torch.Tensor] = []

    def makes() -> None:
        kept.append(mib())
        recorder.returned([], [kept[0].untyped_storage()])

    assert transients(makes, mib, lambda: None, recorder=recorder, backward_at=2) == [2, 3, 1]


def test_an_activation_that_the_program_holds_is_there_until_its_like_is_made() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    kept: list[torch.Tensor] = []

    def saves() -> None:
        kept.append(mib())
        recorder.bind(kept[0].untyped_storage(), "saved")

    saved = Subject("saved", "saved", MIB, TensorClass.ACTIVATION)
    assert transients(lambda: None, saves, lambda: None, recorder=recorder, subjects=[saved]) == [1, 1, 0]
    state = Subject("saved", "saved", MIB, TensorClass.OPTIMIZER)
    kept.clear()
    recorder = StepRecorder(torch.device("cpu"))
    assert transients(lambda: None, saves, lambda: None, recorder=recorder, subjects=[state]) == [0, 0, 0]


def test_memory_that_user_code_gives_a_subject_was_nobodys_until_then() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    kept: list[torch.Tensor] = []

    def gives() -> None:
        recorder.bind(kept[0].untyped_storage(), "given", is_below=True, is_set=True)

    given = Subject("given", "given", MIB, TensorClass.PARAMETER)
    steps = (lambda: kept.append(mib()), gives, lambda: None)
    assert transients(*steps, recorder=recorder, subjects=[given]) == [1, 1, 0]


def test_what_stands_is_there_all_the_time() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    recorder.start()
    unused = mib()
    recorder.event("op", "forward")
    recorder.event("op", "optimizer")
    state = mib()
    recorder.stop()
    recorder.stands(tensor.untyped_storage() for tensor in (state, unused))
    assert [op.transient_bytes // MIB for op in recorder.finish([], [0] * 2, "test").ops] == [2, 2]


def test_inputs_of_the_next_step_count_in_the_last_op_beside_what_was_left() -> None:
    recorder = StepRecorder(torch.device("cpu"))
    recorder.start()
    recorder.event("op", "forward")
    left = mib()
    recorder.stop()
    del left
    batch = mib()
    recorder.made([batch.untyped_storage()])
    assert [op.transient_bytes // MIB for op in recorder.finish([], [0], "test").ops] == [2]


def test_a_signal_handler_that_computes_with_a_tensor_while_it_is_bound_meets_one_life() -> None:
    """A handler runs between two lines of the recorder, under its dispatch mode."""

    def bind(at: int) -> tuple[list[str], Injector]:
        shared = mib()

        def handler() -> None:
            shared.sum()

        recorder, injector = StepRecorder(torch.device("cpu")), Injector(handler)
        recorder.start()
        try:
            recorder.event("op", "")
            injector.run(lambda: recorder.bind(shared.untyped_storage(), "subject"), at)
            shared.sum()
        finally:
            recorder.stop()
        subject = Subject("subject", "shared", MIB, TensorClass.PARAMETER)
        names = [tensor.name for tensor in recorder.finish([subject], [0], "test").tensors]
        return names, injector

    found, counted = bind(-1)
    for at in range(counted.seen):
        assert bind(at)[0] == found == ["shared"], f"before line {counted.trail[at]}"
