"""What policies say of themselves, how `compare` uses it, and that a policy is one file and one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

import tieroff
from tests.support.outside import published_trace
from tieroff.core.check.plan import check
from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import ConfigError
from tieroff.planner import policies
from tieroff.planner.compare.rows import Row, compare_rows
from tieroff.planner.policies import OWN, POLICIES, find_declaration, find_policy
from tieroff.planner.policies.declaration import Assumptions, Decides, Declaration, ModelOptions
from tieroff.planner.simulate.options import SimulationOptions
from tieroff.planner.simulate.simulator import simulate
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

_TOY = '''
"""`toy`: the tensors that are idle for longest leave as soon as they are, and come back an op ahead."""

from tieroff.core.plan import Plan
from tieroff.planner.problem.build import Move, build_plan
from tieroff.planner.policies.declaration import Declaration, ModelOptions
from tieroff.planner.problem.problem import LowerRoom, Problem
from tieroff.planner.simulate.options import SimulationOptions

DECLARATION = Declaration(options=ModelOptions(SimulationOptions(has_exclusive_link=True)))


def plan_toy(problem: Problem) -> Plan:
    room = LowerRoom(problem)
    usage, moves = problem.live.copy(), []
    for unit in sorted(problem.units, key=lambda u: -max(s.stop - s.start for s in u.slots)):
        if int(usage.max()) > problem.device_bytes and room.place(unit.tensors, problem.tiers):
            for slot in unit.slots:
                load = slot.stop if slot.is_boundary else max(slot.stop - 1, slot.start + 1)
                moves.append(Move(slot, slot.start, load))
                for start, stop in slot.pieces(problem.op_count):
                    usage[start:stop] -= problem.size_bytes(slot.tensor)
    return build_plan(problem, "toy", moves, room.tier_of)
'''


@pytest.fixture
def _toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adds a policy as anybody would: a file among the policies, and a line in their list."""
    (tmp_path / "toy.py").write_text(_TOY)
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    monkeypatch.setattr(policies, "POLICIES", MappingProxyType({**POLICIES, "toy": "tieroff.planner.policies.toy:plan_toy"}))
    yield
    sys.modules.pop("tieroff.planner.policies.toy", None)


def _trace() -> Trace:
    """Eight ops of 10 ms; a and b of 10 kB wait from ops 0 and 1 for ops 7 and 6, ops 2 to 5 work on c, of 10 kB too."""
    reads, writes = ((), (), (), (2,), (2,), (2,), (1,), (0,)), ((0,), (1,), (2,), (2,), (2,), (), (), ())
    ops = tuple(Op(f"op{i}", 10 * _MS, *uses) for i, uses in enumerate(zip(reads, writes, strict=True)))
    return Trace(ops, tuple(Tensor(name, 10_000, TensorClass.ACTIVATION) for name in "abc"), name="eight ops")


_MACHINE = Machine(name="small", d2h_bytes_per_s=10**6, h2d_bytes_per_s=10**6)
_BUDGET = {Tier.DEVICE: 20_000, Tier.HOST: 10**6}


def test_policies_declare_when_they_decide_and_under_what_options() -> None:
    declared = {name: find_declaration(name) for name in POLICIES}
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


@pytest.mark.parametrize("name", sorted(set(POLICIES) - OWN))
def test_module_of_a_published_policy_declares_itself(name: str) -> None:
    module = sys.modules[find_policy(name).__module__]
    assert isinstance(module.DECLARATION, Declaration)
    assert find_declaration(name) is module.DECLARATION


def test_declaration_of_an_unknown_policy_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="the nearest is 'capuchin'"):
        find_declaration("capuchim")


def test_own_policies_run_under_the_common_model() -> None:
    assert set(POLICIES) >= OWN
    assert all(find_declaration(name) == Declaration() for name in OWN)


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


@pytest.mark.usefixtures("_toy")
def test_toy_policy_trains_with_equal_losses() -> None:
    def losses(policy: str | None) -> list[float]:
        torch.manual_seed(0)
        model: torch.nn.Module = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6))
        )
        optimizer = torch.optim.AdamW(model.parameters())
        if policy is not None:
            budget = {"device": "60%", "host": "64MiB", "nvme": 0}
            model = tieroff.wrap(model, optimizer, config={"budget": budget, "plan": {"min_bytes": 0, "policy": policy}})
        try:
            found: list[float] = []
            for _ in range(5):
                loss = model(torch.ones(256, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            if policy is not None:
                stats = tieroff.engine(model).stats()
                assert (stats.phase, tieroff.engine(model).plan.policy) == ("planned", policy)
                assert sum(stats.moved_bytes.values()) > 0
        finally:
            if policy is not None:
                tieroff.unwrap(model)
        return found

    assert losses("toy") == losses(None)


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
        options = find_declaration(name).options
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
        "one way at a time", "evictions awaited", "faults",
    )  # fmt: skip
