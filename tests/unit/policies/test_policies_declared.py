"""What policies say of themselves, how they are found, how `compare` uses it, and that a policy is one file."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.outside import published_trace
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import ConfigError
from tieroff.planner.policies import all_policies, find_policy
from tieroff.planner.policy import Assumptions, Decides, ModelOptions, Policy, policy
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.planner.simulate.simulator import simulate
from tieroff.study import policies
from tieroff.study.compare.rows import Row, compare_rows
from tieroff.units import GIB

_MS = 10**6
_ONLINE = {"demand", "lms", "oc-dnn", "dragon", "deepum", "superneurons"}
_WITH_OPTIONS = {
    "autoswap": "clean bytes written",
    "autoswap-aoa": "clean bytes written",
    "autoswap-doa": "clean bytes written",
    "autoswap-swdoa": "clean bytes written",
    "autoswap-wdoa": "clean bytes written",
    "capuchin": "one way at a time",
    "deepum": "clean bytes written",
    "demand": "clean bytes written, evictions awaited, faults",
    "g10": "clean bytes written",
    "oc-dnn": "clean bytes written",
    "sentinel": "clean bytes written",
}

_TOY = """
from tieroff.core.plan import Plan
from tieroff.planner.policy import policy
from tieroff.planner.problem.assemble import Move, build_plan
from tieroff.planner.problem.problem import LowerRoom, Problem
from tieroff.planner.simulate.options import SimulationOptions


@policy("toy", options=SimulationOptions(has_exclusive_link=True))
def plan_toy(problem: Problem) -> Plan:
    room, moves = LowerRoom(problem), []
    longest = max(problem.units, key=lambda unit: max(slot.stop - slot.start for slot in unit.slots))
    if not problem.fits and room.place(longest.tensors, problem.tiers):
        moves = [Move(slot, slot.start, max(slot.stop - 1, slot.start + 1)) for slot in longest.slots]
    return build_plan(problem, "toy", moves, room.tier_of)
"""


@pytest.fixture
def _toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adds a policy as anybody would: a file among the policies, and nothing else."""
    (tmp_path / "toy.py").write_text(_TOY)
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    yield
    sys.modules.pop("tieroff.study.policies.toy", None)


def _trace() -> Trace:
    """Eight ops of 10 ms; a and b of 10 kB wait from ops 0 and 1 for ops 7 and 6, ops 2 to 5 work on c, of 10 kB too."""
    reads, writes = ((), (), (), (2,), (2,), (2,), (1,), (0,)), ((0,), (1,), (2,), (2,), (2,), (), (), ())
    ops = tuple(Op(f"op{i}", 10 * _MS, *uses) for i, uses in enumerate(zip(reads, writes, strict=True)))
    return Trace(ops, tuple(Tensor(name, 10_000, TensorClass.ACTIVATION) for name in "abc"), name="eight ops")


_MACHINE = Machine(name="small", d2h_bytes_per_s=10**6, h2d_bytes_per_s=10**6)
_BUDGET = {Tier.DEVICE: 20_000, Tier.HOST: 10**6}


def _published() -> dict[str, Policy]:
    return {name: one for name, one in all_policies().items() if one.is_published}


def test_published_policies_declare_when_they_decide_and_under_what_options() -> None:
    declared = _published()
    assert {name for name, one in declared.items() if one.decides is Decides.ONLINE} == _ONLINE
    assert {name: ", ".join(one.options.words()) for name, one in declared.items() if not one.is_common} == _WITH_OPTIONS
    assert {name: one.assumes.words() for name, one in declared.items() if one.assumes != Assumptions()} == {
        "deepum": ("faults", "pages"),
        "demand": ("faults", "pages"),
        "dragon": ("faults", "pages"),
        "flashneuron": ("compression",),
        "g10": ("faults", "pages"),
        "oc-dnn": ("faults", "pages"),
        "sentinel": ("pages",),
        "swapadvisor": ("reordering",),
    }


def test_policies_are_found_by_name_and_published_ones_name_a_paper_that_their_module_cites() -> None:
    assert len(_published()) >= 27
    for name, one in all_policies().items():
        assert find_policy(name) is one and one.name == name
    for one in _published().values():
        text = " ".join((sys.modules[one.make.__module__].__doc__ or "").split())
        assert [word for word in re.findall(r"[A-Z]\w+", one.paper) if word not in text] == [], one.name


@pytest.mark.parametrize(("name", "others"), [("auto", {"study", "capuchin"}), ("vdnn-all", {"capuchin", "portfolio"})])
def test_policy_is_found_without_loading_the_others(name: str, others: set[str]) -> None:
    program = f"import sys; from tieroff.planner.policies import find_policy; find_policy({name!r}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert others.isdisjoint(module.rpartition(".")[2] for module in loaded if module.startswith("tieroff."))


def test_policy_of_another_package_is_found_by_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_toys.py").write_text(_TOY)
    monkeypatch.syspath_prepend(tmp_path)
    [result] = compare_rows(_trace(), _MACHINE, _BUDGET, ["my_toys:plan_toy"])
    assert (result.row.policy, result.row.status, result.row.options) == ("my_toys:plan_toy", "ok", "one way at a time")
    for name, told in (
        ("my_toys:plan", "'plan' in a module 'my_toys'"),
        ("no_toys:plan", "No module"),
        ("my_toys:Move", "under @policy"),
        (":plan", "in a module ''"),
    ):
        with pytest.raises(ConfigError, match=told):
            find_policy(name)


@pytest.mark.usefixtures("_toy")
def test_two_policies_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "toy_too.py").write_text(_TOY)
    with pytest.raises(ConfigError, match=r"'toy' is declared twice, in tieroff.study.policies.toy and in .*toy_too"):
        all_policies()
    sys.modules.pop("tieroff.study.policies.toy_too", None)


@pytest.mark.parametrize(("name", "more", "told"), [("My Toy", {}, "lower-case"), ("toy", {"published": True}, "the paper")])
def test_declaration_that_cannot_be_is_refused(name: str, more: dict[str, bool], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        policy(name, **more)  # type: ignore[arg-type]


def test_own_policies_run_under_the_common_model() -> None:
    own = [all_policies()[name] for name in ("auto", "floor", "floor_mixed", "greedy", "relaxed")]
    assert all(one.is_common and not one.is_published and one.assumes == Assumptions() for one in own)


def test_faults_slow_links_down_to_their_bandwidth_and_no_further() -> None:
    machine = Machine(d2h_bytes_per_s=100, h2d_bytes_per_s=50, nvme_read_bytes_per_s=10)
    slowed = ModelOptions(fault_bytes_per_s=50).machine(machine)
    assert (slowed.d2h_bytes_per_s, slowed.h2d_bytes_per_s, slowed.nvme_read_bytes_per_s) == (50, 50, 10)
    assert ModelOptions().machine(machine) is machine


@pytest.mark.usefixtures("_toy")
def test_toy_policy_is_planned_compared_and_marked() -> None:
    """a leaves from op 1 on, for 10 ms, and is asked for at op 6, so everything is hidden; both ways never meet."""
    trace = _trace()
    results = {r.row.policy: r for r in compare_rows(trace, _MACHINE, _BUDGET, ("toy", "demand", "auto"))}
    plan = results["toy"].plan
    assert plan is not None
    assert [(t.tensor, t.issue_at, t.ready_by) for t in plan.transfers] == [(0, 1, 1), (0, 6, 7)]
    check(plan, trace, IDEAL_EXECUTOR)
    row = results["toy"].row
    assert (row.status, row.kind, row.options) == ("ok", "static", "one way at a time")
    assert row.faithful_step_s == row.step_s == 0.09  # op 1 waits for the copy out
    with pytest.raises(ConfigError, match="unknown policy 'toi'; the nearest is 'toy'"):
        find_policy("toi")


def _compared(cell: str, names: tuple[str, ...]) -> dict[str, tuple[Row, Plan | None]]:
    rate = round(15.754 * GIB)
    drive = round(3.2 * GIB)
    machine = Machine(
        name="g10",
        d2h_bytes_per_s=rate,
        h2d_bytes_per_s=rate,
        nvme_write_bytes_per_s=drive,
        nvme_read_bytes_per_s=drive,
        nvme_shares_host_link=True,
    )
    budget = {Tier.DEVICE: 40 * GIB, Tier.HOST: 128 * GIB, Tier.NVME: 2048 * GIB}
    trace = published_trace(cell)
    found = {r.row.policy: (r.row, r.plan) for r in compare_rows(trace, machine, budget, names)}
    for name, (row, plan) in found.items():
        if plan is None or name == "auto":
            continue
        options = find_policy(name).options
        own = simulate(plan, trace, options.machine(machine), options.simulation).step_ns / 1e9
        assert row.faithful_step_s == pytest.approx(own)
        assert row.step_s == pytest.approx(simulate(plan, trace, machine).step_ns / 1e9)
    return found


@pytest.mark.parametrize("cell", ["VIT-b1024", "BERT_Base-b256"])
def test_auto_is_at_most_the_common_time_of_every_row(cell: str) -> None:
    names = ("auto", "capuchin", "demand", "deepum", "flashneuron", "g10", "sentinel", "teraio", "zero-offload")
    rows = {name: row for name, (row, _) in _compared(cell, names).items()}
    best = rows["auto"].step_s
    assert best is not None and rows["auto"].options == "" and rows["auto"].faithful_step_s == best
    for name, row in rows.items():
        assert (row.status == "ok") == (row.step_s is not None) == (row.faithful_step_s is not None) == (row.reason == "")
        assert row.step_s is None or best <= row.step_s, name
    assert rows["zero-offload"].status == "infeasible"
    assert "what the rule of policy 'zero-offload' moves leaves" in rows["zero-offload"].reason
    demand = rows["demand"]
    assert demand.kind == "on-line" and (demand.faithful_step_s or 0) > 2 * (demand.step_s or 0)


def test_options_say_in_words_what_they_change() -> None:
    assert ModelOptions().words() == ()
    assert ModelOptions(SimulationOptions(has_exclusive_link=True, eviction_blocks=True), 5).words() == (
        "one way at a time",
        "evictions awaited",
        "faults",
    )
