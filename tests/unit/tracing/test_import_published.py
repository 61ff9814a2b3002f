"""Traces that others published, imported: ResNet-50 on an A100 beside a join by hand, DLRM on eight V100."""

from __future__ import annotations

import json
import re
import tarfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.outside import outside
from tieroff.cli import app
from tieroff.core.machine import load_machine
from tieroff.core.tensor import Tier
from tieroff.core.trace import Op, Trace
from tieroff.errors import CaptureError
from tieroff.planner.policies import all_policies
from tieroff.study.compare.rows import compare_rows
from tieroff.study.profiles.files import load_trace
from tieroff.study.profiles.join import load_profile

COLLECTIVE = "record_param_comms"
# Where the schema is right and the join by hand is not: `mul.out` writes `out` alone, not its first operand too, and a
# foreach update writes the whole list, not its first tensor alone.
WRITES_DIFFER = {"aten::mul": 161, "aten::_foreach_add_": 2, "aten::_foreach_mul_": 1}


@pytest.fixture(scope="module")
def files() -> tuple[Path, Path]:
    return outside("gpu/kineto/nccl_data.json.gz"), outside("gpu/kineto/resnet_1gpu_et.json.gz")


@pytest.fixture(scope="module")
def imported(files: tuple[Path, Path]) -> Trace:
    return load_profile(*files)


@pytest.fixture(scope="module")
def reference() -> Trace:
    return load_trace(outside("gpu/trace_resnet50_a100"))


def compute(trace: Trace) -> list[Op]:
    return [op for op in trace.ops if op.name != COLLECTIVE]


def sizes(trace: Trace, indices: tuple[int, ...]) -> list[int]:
    return sorted(trace.tensors[i].size_bytes for i in set(indices))


def reads_by_tensor(trace: Trace) -> Counter[tuple[int, bool, tuple[int, ...]]]:
    """How often each (size, persistent, ops that read it) is there: equal for two traces of one structure."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, op in enumerate(compute(trace)):
        for tensor in set(op.reads):
            found[tensor].append(number)
    tensors = trace.tensors
    return Counter((tensors[t].size_bytes, tensors[t].is_persistent, tuple(ops)) for t, ops in found.items())


def test_resnet_is_the_join_by_hand(imported: Trace, reference: Trace) -> None:
    assert len(imported.ops) == len(reference.ops) == 907
    assert Counter(t.size_bytes for t in imported.tensors) == Counter(t.size_bytes for t in reference.tensors)
    own, by_hand = compute(imported), compute(reference)
    assert [op.name for op in own] == [op.name for op in by_hand]
    assert [op.duration_ns for op in own] == [op.duration_ns for op in by_hand]
    assert reads_by_tensor(imported) == reads_by_tensor(reference)
    writes = zip(own, by_hand, strict=True)
    differ = Counter(a.name for a, b in writes if sizes(imported, a.writes) != sizes(reference, b.writes))
    assert differ == WRITES_DIFFER


def test_resnet_has_the_peak_of_the_join_by_hand(imported: Trace, reference: Trace) -> None:
    assert imported.peak_bytes == pytest.approx(reference.peak_bytes, rel=0.01)
    persistent = [sum(t.size_bytes for t in trace.tensors if t.is_persistent) for trace in (imported, reference)]
    assert persistent[0] == persistent[1]


def test_resnet_has_collectives_beside_the_row(imported: Trace, reference: Trace) -> None:
    beside_ns = sum(op.duration_ns for op in reference.ops if op.name == COLLECTIVE)
    assert int(imported.meta["beside_ns"]) == beside_ns
    collectives = [imported.ops[index] for index in imported.communication]
    assert {op.name for op in collectives} == {COLLECTIVE}
    assert sum(op.duration_ns for op in collectives) == beside_ns
    assert sum(imported.compute_ns) < imported.ideal_ns < sum(imported.compute_ns) + beside_ns


def test_every_step_of_the_profile_has_one_structure(files: tuple[Path, Path], imported: Trace) -> None:
    other = load_profile(*files, step=2)
    assert [op.name for op in compute(other)] == [op.name for op in compute(imported)]
    assert Counter(t.size_bytes for t in other.tensors) == Counter(t.size_bytes for t in imported.tensors)


def test_every_policy_takes_the_imported_trace(project: Path, imported: Trace) -> None:
    """Each gives a plan that its simulation accepts, or says which budget it would need."""
    machine = load_machine(project / "configs/machines/a100_40gb.toml")
    budget = {Tier.DEVICE: imported.peak_bytes * 19 // 20}
    found = compare_rows(imported, machine, budget, sorted(all_policies()))
    refused = {result.row.policy: result.row.reason for result in found if result.plan is None}
    assert all(re.search(r"would do( \(\d+% of the peak\))? for this one", reason) for reason in refused.values()), refused
    assert len(found) - len(refused) >= 25
    planned = [result.plan.peak_bytes[Tier.DEVICE] for result in found if result.plan is not None]
    assert max(planned) <= budget[Tier.DEVICE]


def test_plan_takes_both_files(project: Path, files: tuple[Path, Path]) -> None:
    machine = project / "configs/machines/a100_40gb.toml"
    args = ["plan", "--trace", str(files[0]), "--execution-trace", str(files[1]), "--machine", str(machine)]
    result = CliRunner().invoke(app, [*args, "--device-budget", "70%", "--policy", "greedy", "--json"])
    assert result.exit_code == 0, result.stdout
    row = json.loads(result.stdout)
    assert row["status"] == "ok" and row["ideal_s"] == pytest.approx(0.0401, rel=0.01)


def test_another_programs_execution_trace_is_refused(files: tuple[Path, Path]) -> None:
    other = outside("gpu/kineto/hf_GPT2_et.json.tar.gz")
    with pytest.raises(CaptureError, match=r"expected an execution trace of the program in .*nccl_data.json.gz, but record"):
        load_profile(files[0], other)


def test_archive_of_several_ranks_is_refused() -> None:
    archive = outside("gpu/kineto/dlrm_kineto.tar.gz")
    with pytest.raises(CaptureError, match="expected one file in the archive, got 8"):
        load_profile(archive, outside("gpu/kineto/dlrm_pytorch_et.tar.gz"))


@pytest.mark.parametrize("rank", range(8))
def test_dlrm_is_joined_by_order_of_calls(tmp_path: Path, rank: int) -> None:
    """Profilers of 2023 wrote no record-function numbers."""
    for name in ("dlrm_kineto.tar.gz", "dlrm_pytorch_et.tar.gz"):
        with tarfile.open(outside(f"gpu/kineto/{name}")) as archive:
            archive.extractall(tmp_path, filter="data")
    profile = next(tmp_path.glob(f"dlrm_kineto/worker{rank}_*"))
    trace = load_profile(profile, tmp_path / f"dlrm_pytorch_et/dlrm_eg_{rank}.json")
    assert len(trace.ops) in (226, 227)
    assert 0.9e6 < sum(trace.compute_ns) < 1.1e6 < int(trace.meta["beside_ns"])  # collectives wait for other ranks
    tables = [t for t in trace.tensors if t.size_bytes == max(t.size_bytes for t in trace.tensors)]
    assert all(table.is_persistent for table in tables)
