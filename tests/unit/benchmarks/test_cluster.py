"""Training on many nodes, on paper: the trace of a rank, its communication, its rows and the page."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import cluster
import node_steps
from cluster import START, STOP, plan_row, rank_machine, with_tables
from node_steps import MODELS, Job, Model, exchange_ns, step_trace
from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Queue, validate

_SMALL = Model("small", 4, 1_024, 4_096)


def test_models_have_the_parameters_of_their_names() -> None:
    assert [round(model.parameters / 1e9) for model in MODELS] == [71, 406, 999]


def test_step_gathers_one_layer_ahead_and_reduces_beside_the_next() -> None:
    trace = step_trace(Job(_SMALL, 2, 1), rank_machine())
    validate(trace)
    assert Counter(op.queue for op in trace.ops) == {Queue.COMMUNICATION: 18, Queue.COMPUTE: 18}
    names = [op.name for op in trace.ops]
    second, third = names.index("layer 1"), names.index("layer 2")
    assert names[second - 1 : third + 1] == ["gather layer 2", "layer 1", "gather layer 3", "layer 2"]
    assert trace.ops[third].awaits == second - 1
    reduced = names.index("reduce layer 2")
    assert trace.done_at[reduced] > reduced + 1  # the backward of layer 1 does not wait for it
    assert sum(trace.compute_ns) <= trace.ideal_ns < sum(op.duration_ns for op in trace.ops)


def test_shards_of_all_ranks_are_the_model_in_fp32() -> None:
    job = Job(_SMALL, 2, 1)
    sizes = Counter[TensorClass]()
    for tensor in step_trace(job, rank_machine()).tensors:
        sizes[tensor.kind] += tensor.size_bytes * job.ranks
    kinds = (TensorClass.PARAMETER, TensorClass.GRADIENT, TensorClass.OPTIMIZER)
    assert [sizes[kind] / _SMALL.parameters for kind in kinds] == pytest.approx([4, 4, 8], rel=1e-4)


def test_gathering_is_bound_by_the_slower_of_the_network_and_the_node() -> None:
    machine = rank_machine()
    outside, inside = machine.peer_rates(2)
    assert exchange_ns(8 * inside, 1, machine) == 7 * 10**9
    assert exchange_ns(128 * outside, 16, machine) == 15 * 10**9


def test_row_of_what_does_not_fit_has_no_times_and_a_larger_batch_is_nearer_to_compute() -> None:
    machine = rank_machine()
    huge = plan_row(Job(MODELS[2], 1, 16), machine, "greedy")
    assert not huge.is_feasible and huge.step_s == 0
    shares = [plan_row(Job(MODELS[0], 1, count), machine, "greedy").share for count in (1, 4)]
    assert 0 < shares[0] < shares[1] <= 1


def test_command_writes_its_tables_between_the_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "scale.md"
    page.write_text(f"before\n{START}\nstale figures\n{STOP}\nafter\n")
    monkeypatch.setattr(cluster, "NODES", (4,))
    monkeypatch.setattr(cluster, "SEQUENCES", (1,))
    cluster.main(["--policy", "greedy", "--page", str(page)])
    text = page.read_text()
    assert text.startswith(f"before\n{START}\n`python scripts/evidence/cluster.py") and text.endswith(f"{STOP}\nafter\n")
    assert "stale" not in text and text.count("| 4 = 32 | 1 |") == len(MODELS)
    assert with_tables(text, "new") == f"before\n{START}\nnew\n{STOP}\nafter\n"
    assert capsys.readouterr().out in text


def test_page_names_the_command_and_holds_its_marks(project: Path) -> None:
    text = (project / "docs/scale.md").read_text()
    assert "python scripts/evidence/cluster.py --page docs/scale.md" in text
    assert text.index(START) < text.index("| 64 = 512 |") < text.index(STOP)
    assert node_steps.GPUS_PER_NODE == 8
