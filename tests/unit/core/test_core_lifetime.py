"""Lifetimes and gaps."""

from __future__ import annotations

from tieroff.core.lifetime import Gap, merge_intervals
from tieroff.core.tensor import Tensor, TensorClass
from tieroff.core.trace import Op, Trace


def _trace(op_count: int, tensor: Tensor, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> Trace:
    ops = tuple(Op(f"op{i}", 10, (0,) if i in reads else (), (0,) if i in writes else ()) for i in range(op_count))
    return Trace(ops, (tensor,))


def test_merge_intervals_joins_what_overlaps_or_touches() -> None:
    assert merge_intervals([(5, 6), (0, 2), (2, 3), (1, 2)]) == ((0, 3), (5, 6))


def test_activation_has_a_gap_between_uses_and_counts_its_birth_as_a_write() -> None:
    life = _trace(10, Tensor("a", 1, TensorClass.ACTIVATION), reads=(1, 7, 9)).lifetimes[0]
    assert (life.birth, life.death, life.writes) == (1, 10, (1,))
    assert life.gaps == (Gap(0, 2, 7, False, 1), Gap(0, 8, 9, False, 1))


def test_hold_closes_a_gap() -> None:
    tensor = Tensor("a", 1, TensorClass.ACTIVATION, holds=((2, 6),))
    life = _trace(10, tensor, writes=(1,), reads=(7,)).lifetimes[0]
    assert life.required == ((1, 6), (7, 8))
    assert life.gaps == (Gap(0, 6, 7, False, 1),)


def test_parameter_has_a_gap_that_wraps() -> None:
    tensor = Tensor("w", 1, TensorClass.PARAMETER, is_persistent=True)
    life = _trace(10, tensor, reads=(2, 5), writes=(8,)).lifetimes[0]
    assert (life.birth, life.death) == (0, 10)
    assert life.gaps == (Gap(0, 3, 5, False, -1), Gap(0, 6, 8, False, -1), Gap(0, 9, 12, True, 8))


def test_parameter_used_at_both_ends_has_no_gap_that_wraps() -> None:
    tensor = Tensor("w", 1, TensorClass.PARAMETER, is_persistent=True)
    assert not any(gap.wraps for gap in _trace(10, tensor, reads=(0, 9)).lifetimes[0].gaps)


def test_lives_until_gives_a_last_gap_that_no_use_ends() -> None:
    tensor = Tensor("g", 1, TensorClass.GRADIENT, lives_until=9)
    life = _trace(10, tensor, writes=(3,)).lifetimes[0]
    assert life.death == 9
    assert life.gaps == (Gap(0, 4, 9, False, 3, is_last=True),)


def test_unused_tensor_lives_all_step_without_gaps() -> None:
    life = _trace(4, Tensor("a", 1, TensorClass.ACTIVATION)).lifetimes[0]
    assert (life.birth, life.death, life.gaps) == (0, 4, ())


def test_lifetimes_are_derived_once() -> None:
    trace = _trace(4, Tensor("a", 1, TensorClass.ACTIVATION), reads=(1,))
    assert trace.lifetimes is trace.lifetimes
