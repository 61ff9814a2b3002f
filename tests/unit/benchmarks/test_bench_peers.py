"""The comparison with what people use today: the same losses, a row for everybody, and a reason where there are no figures."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import bench_peers
import train_gpt
from harness import peers
from shared.runs import RunFailed, wrapped
from tieroff.config import Config
from tieroff.device_budget import DeviceBudget
from train_gpt import Options, Result

TINY = Options(steps=3, layers=2, width=32, heads=2, batch=2, length=32, device="cpu")
TINY_ARGUMENTS = (
    *("--steps", "3", "--layers", "2", "--width", "32", "--heads", "2", "--batch", "2", "--length", "32"),
    *("--device", "cpu", "--repeat", "1"),
)

# A library of DeepSpeed's shape whose engine trains as the plain loop does, and writes down what it was given.
STAND_IN = {
    "__init__.py": """
import json, torch

class Engine(torch.nn.Module):
    def __init__(self, model, optimizer, config):
        super().__init__()
        self.inner, self.optimizer, self.clip_norm = model, optimizer, config["gradient_clipping"]
    def forward(self, x):
        return self.inner(x)
    def backward(self, loss):
        loss.backward()
    def step(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

class zero:
    class Init:
        def __init__(self, module, config_dict_or_path):
            assert not given
            partitioned.append(config_dict_or_path)

def initialize(model, optimizer, config):
    given.append(config)
    return Engine(model, optimizer, config), optimizer, None, None

given, loaded, partitioned = [], [], []
""",
    "ops/__init__.py": "",
    "ops/adam.py": """
import torch

class DeepSpeedCPUAdam(torch.optim.AdamW):
    def __init__(self, parameters, lr, weight_decay, betas, adamw_mode):
        assert adamw_mode
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, betas=betas)
""",
    "ops/op_builder.py": """
import deepspeed

class CPUAdamBuilder:
    def load(self):
        deepspeed.loaded.append(type(self).__name__)

class AsyncIOBuilder(CPUAdamBuilder):
    pass
""",
}


def ignore_step(step: int, loss: float, tokens_per_s: float) -> None:
    """Stands for a progress bar."""


@pytest.fixture(scope="module")
def plain() -> Result:
    return train_gpt.train(TINY, ignore_step)


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A library named deepspeed, and the environment as it was once it is gone."""
    for name, text in STAND_IN.items():
        path = tmp_path / "site" / "deepspeed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for variable in ("PATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR"):
        monkeypatch.setenv(variable, os.environ.get(variable, ""))
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.modules.update(before)


# One way of training.


@pytest.mark.parametrize("name", ["plain", "save_on_cpu", "checkpoint", "fsdp2"])
def test_peer_has_the_losses_of_the_demo_script(name: str, tmp_path: Path, plain: Result) -> None:
    result = peers.train(peers.PEERS[name](TINY, tmp_path), ignore_step)
    assert result.losses == plain.losses
    assert result.parameters == plain.parameters
    assert result.stats is None
    assert len(result.step_s) == TINY.steps


def test_tieroff_has_the_losses_of_the_demo_script_and_its_own_account(tmp_path: Path, plain: Result) -> None:
    config = Config.load({"device": "cpu", "budget": {"device": "80%", "host": "8MiB"}, "plan": {"min_bytes": 0}})
    options = wrapped(replace(TINY, out=tmp_path / "run"), config)
    result = peers.train(peers.PEERS["tieroff"](options, tmp_path), ignore_step)
    assert result.losses == plain.losses
    assert result.stats is not None
    assert sum(result.stats["moved_bytes"].values()) > 0


def test_tieroff_in_backward_has_the_losses_of_a_loop_that_does_not_clip(tmp_path: Path) -> None:
    loop = replace(TINY, steps=4, clip=0.0)
    clipped, expected = (train_gpt.train(options, ignore_step) for options in (replace(loop, clip=TINY.clip), loop))
    config = Config.load(
        {"device": "cpu", "budget": {"device": "80%", "host": "8MiB"}, "plan": {"min_bytes": 0, "update_in_backward": True}}
    )
    result = peers.train(peers.PEERS[peers.IN_BACKWARD](wrapped(replace(loop, out=tmp_path), config), tmp_path), ignore_step)
    assert result.losses == expected.losses != clipped.losses
    assert result.stats is not None
    assert sum(result.stats["moved_bytes"].values()) > 0


def test_row_in_backward_has_a_config_that_says_so(tmp_path: Path) -> None:
    plain_row = bench_peers.Row("plain", "plain")
    for peer, is_early in (("tieroff", False), (peers.IN_BACKWARD, True)):
        row = bench_peers.Row(peer, peer, DeviceBudget(size_bytes=2**26))
        options = bench_peers.options_for(row, plain_row, replace(TINY, out=tmp_path / peer), Config(), tmp_path)
        assert options.config is not None
        assert Config.load(options.config).plan.update_in_backward == is_early


def test_checkpoint_computes_every_block_again(tmp_path: Path) -> None:
    peer = peers.PEERS["checkpoint"](replace(TINY, steps=1), tmp_path)
    calls: list[str] = []
    prepare = peer.prepare

    def counted(model: train_gpt.GPT) -> None:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *rest: calls.append("block"))  # the second one stops early
        prepare(model)

    peer.prepare = counted  # type: ignore[method-assign]
    peers.train(peer, ignore_step)
    assert len(calls) == 2 * TINY.layers


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", ["deepspeed-cpu", "deepspeed-nvme"])
def test_deepspeed_is_asked_for_its_engine_and_its_offload(name: str, tmp_path: Path, plain: Result) -> None:
    result = peers.train(peers.PEERS[name](TINY, tmp_path), ignore_step)
    assert result.losses == plain.losses
    library: Any = sys.modules["deepspeed"]
    [config] = library.given
    assert library.partitioned == [config], "or the whole model would be brought to the device"
    assert config["train_micro_batch_size_per_gpu"] == TINY.batch
    zero = config["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_param"]["device"] == "cpu"
    if name == "deepspeed-nvme":
        assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False}
        assert library.loaded == ["CPUAdamBuilder", "AsyncIOBuilder"]
    else:
        assert zero["offload_optimizer"]["device"] == "cpu"
        assert library.loaded == ["CPUAdamBuilder"]


def test_library_that_is_not_installed_is_said_in_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--peer", "deepspeed-cpu", "--out", str(tmp_path)])
    assert peers.main() == 1
    error = json.loads((tmp_path / "metrics.json").read_text())["error"]
    assert error["type"] == "PeerAbsent"
    assert "pip install deepspeed" in error["message"]


# Rows.


def result_of(tokens_per_s: float, peak_bytes: int, losses: tuple[float, ...] = (2.0, 1.5), **stats: Any) -> Result:
    return Result(
        losses=[loss.hex() for loss in losses],
        step_s=[0.1, 0.1],
        tokens_per_s=tokens_per_s,
        peak_bytes=peak_bytes,
        parameters=10,
        stats=stats or None,
        options={key: str(value) for key, value in asdict(TINY).items()},
    )


def run_with(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Result | RunFailed]) -> list[str]:
    """Has each peer end as said, without a process; returns the list to which the peers that are run are added."""
    ran: list[str] = []

    def run(options: Options, *, more: tuple[str, ...], **rest: Any) -> Result:
        ran.append(more[1])
        outcome = outcomes[more[1]]
        if isinstance(outcome, RunFailed):
            raise outcome
        return outcome

    monkeypatch.setattr(bench_peers, "run", run)
    return ran


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Runs the benchmark in a folder of its own and returns its JSON."""
    path = tmp_path / "found.json"
    assert bench_peers.main([*TINY_ARGUMENTS, "--nvme-dir", str(tmp_path), "--json", str(path), *arguments]) == 0
    assert [left.name for left in tmp_path.iterdir() if left.is_dir()] == [], "a folder was left behind"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_rows_have_medians_shares_of_plain_and_whether_losses_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = {"d2h": 3, "h2d": 4}
    outcomes: dict[str, Result | RunFailed] = {
        "plain": result_of(1000.0, 2**30),
        "checkpoint": result_of(800.0, 2**29, (2.0, 1.25)),
        "tieroff": result_of(900.0, 2**28, stall_s=0.25, moved_bytes=moved),
    }
    ran = run_with(monkeypatch, outcomes)
    found = bench(tmp_path, "--peers", "checkpoint", "tieroff", "--budget", "25%", "64MiB", "--repeat", "2")
    rows = {row["peer"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "checkpoint", "tieroff 25%", "tieroff 64.00 MiB"]
    assert len(ran) == 8
    assert ran[0] == "plain"
    assert ran[:4] != ran[4:], "the order has to change"
    assert rows["checkpoint"]["relative"] == 0.8
    assert rows["checkpoint"]["peak_relative"] == 0.5
    assert rows["checkpoint"]["losses_equal"] is False
    assert rows["checkpoint"]["loss_gap_max"] == 0.25
    assert rows["checkpoint"]["loss_last"] == 1.25
    assert rows["tieroff 25%"]["losses_equal"] is True
    assert rows["tieroff 25%"]["budget_bytes"] == 2**28
    assert rows["tieroff 64.00 MiB"]["budget_bytes"] == 2**26
    assert rows["tieroff 25%"]["moved_bytes"] == moved
    assert rows["plain"]["step_s"] == TINY.batch * TINY.length / 1000.0
    assert all(len(row["runs"]) == 2 for row in rows.values())
    assert found["machine"]["torch"]
    assert found["date"]
    assert found["command"].startswith("python benchmarks/bench_peers.py --steps 3")
    assert found["parameters"] == 10
    shown = capsys.readouterr().out
    assert "differ by 0.2" in shown
    assert "80.0%" in shown


def test_peer_that_fails_has_its_reason_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = "Traceback (most recent call last):\n  File ...\ntorch.OutOfMemoryError: CUDA out of memory\n"
    outcomes: dict[str, Result | RunFailed] = {
        "plain": result_of(1000.0, 2**30),
        "fsdp2": RunFailed(f"expected exit status 0, got 1:\n{trace}"),
        "deepspeed-cpu": RunFailed("deepspeed is not installed", "PeerAbsent"),
        "tieroff": RunFailed("op 7 needs 2 GiB", "InfeasiblePlanError"),
    }
    ran = run_with(monkeypatch, outcomes)
    chosen = ("fsdp2", "deepspeed-cpu", "tieroff")
    found = bench(tmp_path, "--peers", *chosen, "--budget", "10%", "--repeat", "3")
    assert sorted(ran) == sorted(("plain", "plain", "plain", *chosen))
    rows = {row["peer"]: row for row in found["rows"]}
    assert [row["status"] for row in found["rows"]] == ["ok", "failed", "absent", "infeasible"]
    assert trace in rows["fsdp2"]["reason"]
    assert rows["fsdp2"]["tokens_per_s"] is None
    assert {tuple(row) for row in found["rows"]} == {tuple(rows["plain"])}, "every row has every column"
    shown = capsys.readouterr().out
    assert "fsdp2: torch.OutOfMemoryError: CUDA out of memory" in shown
    assert "deepspeed-cpu: deepspeed is not installed" in shown
    assert "tieroff 10%: op 7 needs 2 GiB" in shown


def test_plain_run_that_fails_leaves_the_others_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: dict[str, Result | RunFailed] = {
        "plain": RunFailed("out of memory"),
        "checkpoint": result_of(800.0, 2**29),
        "tieroff": result_of(700.0, 2**28, stall_s=0.0, moved_bytes={}),
    }
    run_with(monkeypatch, outcomes)
    found = bench(tmp_path, "--peers", "checkpoint", "tieroff", "--budget", "50%", "256MiB")
    rows = {row["peer"]: row for row in found["rows"]}
    assert rows["plain"]["status"] == "failed"
    assert rows["checkpoint"]["tokens_per_s"] == 800.0
    assert rows["checkpoint"]["relative"] is None
    assert rows["checkpoint"]["losses_equal"] is None
    assert rows["tieroff 50%"]["status"] == "failed"
    assert "give the budget in bytes" in rows["tieroff 50%"]["reason"]
    assert rows["tieroff 256.00 MiB"]["status"] == "ok"


def test_interruption_leaves_what_was_found_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: Options, *, more: tuple[str, ...], **rest: Any) -> Result:
        if more[1] != "plain":
            raise KeyboardInterrupt
        return result_of(1000.0, 2**30)

    monkeypatch.setattr(bench_peers, "run", run)
    path = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        bench_peers.main([*TINY_ARGUMENTS, "--nvme-dir", str(tmp_path), "--json", str(path), "--peers", "checkpoint"])
    assert [row["status"] for row in json.loads(path.read_text())["rows"]] == ["ok", "not run"]
    assert list(tmp_path.iterdir()) == [path]


# The command line.


def test_model_sets_sizes_that_can_be_given_on_their_own() -> None:
    _, options = bench_peers.parse_arguments(["--model", "gpt2", "--length", "256"])
    assert (options.layers, options.width, options.heads, options.batch) == (12, 768, 12, 4)
    assert options.length == 256
    _, demo = bench_peers.parse_arguments([])
    assert (demo.layers, demo.width) == (Options.layers, Options.width)


def test_updates_in_backward_are_compared_where_nothing_is_clipped() -> None:
    clipped, _ = bench_peers.parse_arguments([])
    free, options = bench_peers.parse_arguments(["--clip", "0"])
    assert peers.IN_BACKWARD not in clipped.peers
    assert free.peers == [peer for peer in peers.PEERS if peer not in ("fsdp2-plain", "tieroff-fsdp2")]
    assert options.clip == 0.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--peers", "tieroff-in-backward"], "--clip 0"),
        (["--budget", "0%"], "above 0%"),
        (["--peers", "nobody"], "nobody"),
        (["--repeat", "0"], "at least one repetition"),
    ],
)
def test_wrong_argument_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        bench_peers.main(given)
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_folder_that_is_missing_ends_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_peers.main([*TINY_ARGUMENTS, "--nvme-dir", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


# Real processes.


def test_process_that_takes_too_long_is_ended_and_said(tmp_path: Path) -> None:
    found = bench(tmp_path, "--peers", "plain", "--limit", "0.05")
    [row] = found["rows"]
    assert row["status"] == "failed"
    assert "0.05 s" in row["reason"]


@pytest.mark.long
def test_processes_give_complete_rows_with_equal_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An import that fails: what is tested must not depend on what is installed here.
    (tmp_path / "site.d").mkdir()
    (tmp_path / "site.d" / "deepspeed.py").write_text('raise RuntimeError("built for another torch")\n')
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site.d'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    folder = tmp_path / "run"
    folder.mkdir()
    peers_asked = ("save_on_cpu", "checkpoint", "deepspeed-cpu", "tieroff")
    found = bench(folder, "--peers", *peers_asked, "--budget", "50%")
    rows = {row["peer"]: row for row in found["rows"]}
    assert list(rows) == ["plain", "save_on_cpu", "checkpoint", "deepspeed-cpu", "tieroff 50%"]
    failed = rows.pop("deepspeed-cpu")
    assert failed["status"] == "failed"
    assert "built for another torch" in failed["reason"]
    for row in rows.values():
        assert row["status"] == "ok", row["reason"]
        assert row["losses_equal"] is True
        assert row["tokens_per_s"] > 0
        assert row["peak_bytes"] > 0
    assert rows["tieroff 50%"]["budget_bytes"] < rows["plain"]["peak_bytes"]
    assert rows["plain"]["moved_bytes"] is None


def test_ranks_have_the_ways_of_shards_and_fsdp2_to_compare_with() -> None:
    arguments, _ = bench_peers.parse_arguments(["--ranks", "2", "--budget", "50%"])
    rows = bench_peers.make_rows(arguments.peers, arguments.budget, peers.SHARDED[0])
    names = ["fsdp2-plain", "fsdp2", "deepspeed-cpu", "deepspeed-nvme", "tieroff-fsdp2 50%"]
    assert [row.name for row in rows] == names
    alone, _ = bench_peers.parse_arguments([])
    assert {"fsdp2-plain", "tieroff-fsdp2"}.isdisjoint(alone.peers)


@pytest.mark.parametrize("given", [["--ranks", "0"], ["--ranks", "2", "--peers", "checkpoint"], ["--peers", "tieroff-fsdp2"]])
def test_ways_that_so_many_ranks_cannot_train_in_are_refused(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_peers.parse_arguments(given)
    assert "expected" in capsys.readouterr().err


@pytest.mark.long
def test_two_ranks_train_alike_with_shards_in_the_tiers(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    given = ["--ranks", "2", *TINY_ARGUMENTS, "--peers", "fsdp2-plain", "tieroff-fsdp2", "--budget", "4GiB"]
    assert bench_peers.main([*given, "--nvme-dir", str(tmp_path), "--json", str(found)]) == 0
    document = json.loads(found.read_text())
    assert document["ranks"] == 2
    assert [(row["peer"], row["status"], row["losses_equal"]) for row in document["rows"]] == [
        ("fsdp2-plain", "ok", True),
        ("tieroff-fsdp2 4.00 GiB", "ok", True),
    ]
