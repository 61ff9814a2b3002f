"""The native local search on windows."""

from __future__ import annotations

import numpy as np
import pytest

from tieroff import _native
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.extended.improve import improve
from tieroff.planner.problem.pieces import KEPT, Piece, make_windows
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.planner.problem.runs import draft

_MACHINE = Machine(d2h_bytes_per_s=10**9, h2d_bytes_per_s=10**9, nvme_write_bytes_per_s=10**8, nvme_read_bytes_per_s=10**8)


def _problem(nvme_bytes: int = 1000, host_bytes: int = 1000) -> Problem:
    """Two activations of 50 bytes: 0 idles over ops 1 to 8, 1 over ops 4 and 5. There is room for one at ops 4 and 5."""
    tensors = tuple(Tensor(name, size, TensorClass.ACTIVATION) for name, size in (("long", 50), ("short", 50), ("big", 100)))
    uses = {0: ((), (0,)), 3: ((), (1,)), 4: ((), (2,)), 5: ((2,), ()), 6: ((1,), ()), 9: ((0,), ())}
    trace = Trace(tuple(Op(f"op{i}", 50, *uses.get(i, ((), ()))) for i in range(10)), tensors)
    budget = {Tier.DEVICE: 150, Tier.HOST: host_bytes, Tier.NVME: nvme_bytes}
    return make_problem(trace, _MACHINE, budget, IDEAL_EXECUTOR)


def test_a_short_gap_is_kept_and_a_long_one_covers_for_it() -> None:
    problem = _problem(nvme_bytes=0)
    slow = make_windows(problem, [(Piece(0, 0, 50), [KEPT]), (Piece(1, 0, 50), [(4, 6, 0)])])
    before = draft(problem, slow)
    assert before is not None
    found = improve(problem, slow, seed=1, work=10_000_000)
    after = draft(problem, found)
    assert after is not None
    assert before.estimate_ns > problem.trace.ideal_ns == after.estimate_ns
    assert found.is_away.tolist() == [True, False]


def test_a_late_copy_changes_its_tier() -> None:
    problem = _problem()
    slow = make_windows(problem, [(Piece(0, 0, 50), [(4, 6, 1)]), (Piece(1, 0, 50), [KEPT])])
    found = improve(problem, slow, seed=3, work=10_000_000)
    after = draft(problem, found)
    assert after is not None
    assert after.estimate_ns == problem.trace.ideal_ns


def test_nothing_changes_without_work_or_where_the_windows_do_not_fit() -> None:
    problem = _problem()
    windows = make_windows(problem, [(Piece(0, 0, 50), [KEPT]), (Piece(1, 0, 50), [(4, 6, 1)])])
    still = improve(problem, windows, seed=1, work=0)
    over = improve(problem, make_windows(problem, [(Piece(0, 0, 50), [KEPT]), (Piece(1, 0, 50), [KEPT])]), seed=1, work=10**6)
    assert still.away_start.tolist() == windows.away_start.tolist()
    assert not over.is_away.any()


def _call(**changed: object) -> None:
    line = np.array([1], np.int64)
    arguments = {
        "usage": np.zeros(4, np.int64),
        "duration_ns": np.ones(4, np.int64),
        "bytes_per_ns": [1.0] * 4,
        "latency_ns": [0.0] * 4,
        "nvme_shares_host_link": False,
        "duplex_share": 1.0,
        "device_bytes": 5,
        "lower_bytes": [9, 9],
        "granule_bytes": 1,
        "piece": 0 * line,
        "start": line,
        "stop": 3 * line,
        "size_bytes": line,
        "is_last": 0 * line,
        "copy_from": line,
        "is_persistent": 0 * line,
        "away_start": line.copy(),
        "away_stop": 2 * line,
        "tier": 0 * line,
        "seed": 1,
        "work": 1,
    }
    _native.improve(**{**arguments, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"stop": np.array([9], np.int64)}, "on the ring"),
        ({"tier": np.array([2], np.int64)}, "on the ring"),
        ({"size_bytes": np.array([1, 2], np.int64)}, "one length"),
        ({"granule_bytes": 0}, "granule"),
    ],
)
def test_arrays_that_make_no_sense_are_refused(changed: dict[str, object], message: str) -> None:
    _call()
    with pytest.raises(ValueError, match=message):
        _call(**changed)
