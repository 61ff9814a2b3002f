"""The command line: what it prints, its exit status, and that it stays light."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tieroff
from tieroff.cli import app
from tieroff.core.io.json_files import save_trace
from tieroff.core.machine import load_machine
from tieroff.report.terminal import progress
from tieroff.study.profiles.files import load_trace
from tieroff.tracing.clock.interval import DEVIATIONS

GIB = 2**30
ROW_KEYS = [
    "policy",
    "status",
    "step_s",
    "ideal_s",
    "bound_s",
    "stall_s",
    "peak_device_bytes",
    "peak_host_bytes",
    "peak_nvme_bytes",
    "d2h_bytes",
    "h2d_bytes",
    "nvme_write_bytes",
    "nvme_read_bytes",
    "recompute_s",
    "plan_s",
    "kind",
    "options",
    "faithful_step_s",
    "reason",
]


def run(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def run_json(*arguments: str | Path) -> tuple[int, Any]:
    status, text = run(*arguments, "--json")
    return status, json.loads(text)


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_version_is_the_package_version() -> None:
    assert run("--version") == (0, f"{tieroff.__version__}\n")


def test_version_loads_neither_torch_nor_the_native_module() -> None:
    code = """
import sys
from tieroff.cli import app
app(["--version"], standalone_mode=False)
print([name for name in ("torch", "numpy", "tieroff._native") if name in sys.modules])
"""
    assert python(code).splitlines() == [tieroff.__version__, "[]"]


def test_python_m_tieroff_is_the_command_line() -> None:
    done = subprocess.run([sys.executable, "-m", "tieroff", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"{tieroff.__version__}\n"


def test_unknown_option_is_a_usage_error() -> None:
    assert run("probe", "--nonsense")[0] == 2
    assert run("probe")[0] == 2


def test_every_command_has_help_and_json() -> None:
    commands = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    assert {"probe", "doctor", "plan", "compare"} <= set(commands)
    for command in commands:
        status, text = run(command, "--help")
        assert status == 0
        assert "--json" in re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_probe_json_has_its_fixed_form_and_writes_no_file(tmp_path: Path) -> None:
    status, document = run_json("probe", "--dir", tmp_path, "--seconds", "0.5")
    assert status == 0
    assert document["machine"] is None
    assert {row["dir"] for row in document["dirs"]} == {str(tmp_path)}
    for row in document["dirs"]:
        assert isinstance(row["engine"], str)
        assert isinstance(row["is_direct"], bool)
        assert row["gds"] is False
        for key in ("write_bytes_per_s", "read_bytes_per_s", "both_write_bytes_per_s", "both_read_bytes_per_s"):
            assert row[key] > 0
        assert row["cells"]
    assert len({row["engine"] for row in document["dirs"]}) == len(document["dirs"])
    assert sum(row["is_best"] for row in document["dirs"]) == 1
    assert document["refused"] == []
    assert document["checksum_bytes_per_s"] > 0
    assert document["links"]["d2h_bytes_per_s"] > 0
    assert document["links"]["h2d_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_probe_out_writes_a_machine_file(tmp_path: Path) -> None:
    out = tmp_path / "machine.toml"
    status, text = run("probe", "--dir", tmp_path, "--seconds", "0.5", "--out", out)
    assert status == 0
    assert str(out) in text.replace("\n", "")
    machine = load_machine(out)
    assert machine.nvme_write_bytes_per_s > 0
    assert machine.best_engine([tmp_path]) in text
    assert machine.checksum_bytes_per_s > 0
    assert machine.dirs[str(tmp_path)]["file_system"] in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.openpty() if is_terminal else os.pipe()
    with open(reader, "rb") as shown, open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with progress() as report:
            report("first writes", 0.5)
        terminal.flush()
        os.set_blocking(shown.fileno(), False)
        text = (shown.read(65536) if is_terminal else b"") or b""
        if not is_terminal:
            terminal.close()
            text = shown.read()
    assert (b"first writes" in text) == (b"50%" in text) == is_terminal
    assert bool(text) == is_terminal


def test_script_takes_the_options_of_the_command(tmp_path: Path, project: Path) -> None:
    command = [sys.executable, str(project / "scripts/nvme_probe.py"), "--dir", str(tmp_path / "nowhere"), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(project)}  # also where the library is not installed
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["type"] == "ConfigError"


def test_probe_says_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tieroff.probe.survey.is_in_memory", lambda fd: True)
    status, document = run_json("probe", "--dir", tmp_path, "--out", tmp_path / "machine.toml")
    assert status == 1
    assert "file system in memory" in document["error"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_error_is_a_document_under_json_and_a_message_without(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    status, document = run_json("probe", "--dir", missing)
    assert status == 1
    assert document["error"]["type"] == "ConfigError"
    assert "nowhere" in document["error"]["message"]
    result = CliRunner().invoke(app, ["probe", "--dir", str(missing)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"ConfigError: [nvme] dirs: {missing} is not a writable directory" in result.stderr


def test_error_that_nobody_expected_is_a_document_under_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(dirs: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("tieroff.probe.doctor.diagnose", fail)
    assert run_json("doctor") == (1, {"error": {"type": "ZeroDivisionError", "message": "by zero"}})
    with pytest.raises(ZeroDivisionError):
        run("doctor")


def test_doctor_looks_at_the_folders_of_a_config(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'[nvme]\ndirs = ["{tmp_path}"]\n')
    status, document = run_json("doctor", "--config", config)
    assert status == 0
    assert [row["dir"] for row in document["dirs"]] == [str(tmp_path)]
    assert document["dirs"][0]["path"] in ("direct", "buffered")
    assert {row["engine"] for row in document["dirs"][0]["engines"]} == {"gds", "uring", "threads", "aiofiles"}
    assert {
        "torch",
        "cuda",
        "native module",
        "memory",
        "io_uring",
        "locked memory",
        "kvikio",
        "cuFile",
        "nvidia-fs",
        "P2PDMA",
        "cuFile compatibility mode",
    } <= {fact["name"] for fact in document["facts"]}
    status, text = run("doctor", "--config", config)
    assert status == 0
    assert str(tmp_path) in text


def test_doctor_refuses_a_config_with_an_unknown_key(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[budget]\ndevcie = 3\n")
    status, document = run_json("doctor", "--config", config)
    assert status == 1
    assert "did you mean [budget].device?" in document["error"]["message"]


@pytest.fixture
def problem(tmp_path: Path) -> list[str | Path]:
    """Options: a trace folder of 6 activations of a GiB, written forwards and read backwards, and a machine."""
    count = 6
    folder = tmp_path / "chain"
    folder.mkdir()
    with (folder / "tensors.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["tensor", "bytes", "kind"])
        rows.writerows([[f"t{index}", GIB, "local"] for index in range(count)])
    with (folder / "kernels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["kernel", "name", "ms", "reads", "writes"])
        for index in range(count):
            rows.writerow([index, f"forward{index}", 200, f"t{index - 1}" if index else "", f"t{index}"])
        for index in reversed(range(count)):
            rows.writerow([2 * count - 1 - index, f"backward{index}", 200, f"t{index}", ""])
    (tmp_path / "machine.toml").write_text(
        'name = "test"\ndevice_bytes = "80GiB"\nhost_bytes = "64GiB"\nd2h_bytes_per_s = "16GiB"\nh2d_bytes_per_s = "16GiB"\n'
    )
    return ["--trace", folder, "--machine", tmp_path / "machine.toml"]


def test_plan_json_is_one_row_with_an_explanation(problem: list[str | Path]) -> None:
    status, row = run_json("plan", *problem, "--device-budget", "4GiB")
    assert status == 0
    assert list(row) == [*ROW_KEYS, "interval_s", "explain"]
    assert row["status"] == "ok"
    assert row["peak_device_bytes"] <= 4 * GIB
    assert row["d2h_bytes"] >= 2 * GIB
    assert row["d2h_bytes"] == row["h2d_bytes"]
    assert row["nvme_write_bytes"] == 0
    assert row["ideal_s"] == pytest.approx(2.4)
    assert row["step_s"] == pytest.approx(row["ideal_s"] + row["stall_s"] + row["recompute_s"])
    assert row["ideal_s"] <= row["bound_s"] <= row["step_s"]
    assert row["explain"]


def test_plan_takes_a_share_of_the_peak_as_budget(problem: list[str | Path]) -> None:
    _, row = run_json("plan", *problem, "--device-budget", "50%")
    assert 0 < row["peak_device_bytes"] <= 3 * GIB
    _, row = run_json("plan", *problem, "--device-budget", "100%")
    assert row["peak_device_bytes"] == 6 * GIB
    assert row["d2h_bytes"] == 0


def test_plan_that_is_infeasible_prints_its_row_and_ends_with_3(problem: list[str | Path], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    status, row = run_json("plan", *problem, "--device-budget", "1GiB", "--out", out)
    assert status == 3
    assert row["status"] == "infeasible"
    assert row["step_s"] is None
    assert "forward1" in row["explain"] or "2.00 GiB" in row["explain"]
    assert not out.exists()
    assert run("plan", *problem, "--device-budget", "1GiB")[0] == 3


def test_plan_without_a_lower_tier_moves_nothing_and_can_only_recompute(problem: list[str | Path]) -> None:
    budget = ("--device-budget", "4GiB", "--host-budget", "0")
    assert run_json("plan", *problem, *budget, "--policy", "greedy")[0] == 3
    status, row = run_json("plan", *problem, *budget)
    assert status == 0
    assert row["recompute_s"] > 0
    assert row["d2h_bytes"] == row["h2d_bytes"] == 0


def test_plan_out_writes_the_plan(problem: list[str | Path], tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    status, text = run("plan", *problem, "--device-budget", "4GiB", "--policy", "floor", "--out", out)
    assert status == 0
    assert "floor" in text
    assert json.loads(out.read_text())["policy"] == "floor"


def test_plan_errors_name_what_is_wrong(problem: list[str | Path], tmp_path: Path) -> None:
    assert run_json("plan", *problem, "--device-budget", "4 parsecs")[1]["error"]["type"] == "ConfigError"
    status, document = run_json("plan", *problem, "--device-budget", "4GiB", "--policy", "gredy")
    assert status == 1
    assert "greedy" in document["error"]["message"]
    _, _, *machine = problem
    status, document = run_json("plan", "--trace", tmp_path / "none.json", *machine, "--device-budget", "4GiB")
    assert status == 1
    assert document["error"]["type"] == "CaptureError"
    assert run("plan", *problem)[0] == 2


MODEL = """
import torch
from tieroff import DryModel

def mlp():
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))), (torch.randn(4096, 1024),)

def named():
    model, (x,) = mlp()
    return DryModel(model.to(torch.bfloat16), {"input": x.bfloat16()}, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
"""
DEVICE = "fp32_flops_per_s = 1e12\nbf16_flops_per_s = 4e12\ndevice_memory_bytes_per_s = '1TB'\n"


@pytest.fixture
def model(problem: list[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | Path]:
    """Options: a module in the working directory, and a machine with a roofline."""
    (tmp_path / "dry_models.py").write_text(MODEL)
    (tmp_path / "paper.toml").write_text((tmp_path / "machine.toml").read_text() + DEVICE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "dry_models", raising=False)
    return ["--model", "dry_models:mlp", "--machine", tmp_path / "paper.toml"]


def test_plan_takes_a_model_that_never_runs(model: list[str | Path]) -> None:
    status, row = run_json("plan", *model, "--device-budget", "50%")
    assert status == 0
    assert list(row) == [*ROW_KEYS, "interval_s", "explain"]
    parameters = 8 * 4 * (1024 * 1024 + 1024)
    assert 4 * parameters / 2 < row["peak_device_bytes"] < 4 * parameters
    forward_and_backward = 2 * 4096 * 1024 * 1024 * (8 + 8 + 7)  # the first layer's input needs no gradient
    assert row["ideal_s"] == pytest.approx(forward_and_backward / 1e12, rel=0.05)
    assert "Op times are not measured (estimated: roofline of machine test)" in row["explain"]
    assert row["interval_s"] is None
    assert "tightest resource" in row["explain"]


def test_plan_says_between_which_times_a_step_on_an_accelerator_lies(model: list[str | Path], tmp_path: Path) -> None:
    card = tmp_path / "card.toml"
    card.write_text(Path(model[3]).read_text() + 'device_type = "cuda"\n\n[clock]\nlog_error = 0.1\n')
    _, row = run_json("plan", *model[:3], card, "--device-budget", "50%")
    low, high = row["interval_s"]
    assert low == pytest.approx(row["step_s"] * math.exp(-DEVIATIONS * 0.1), rel=0.01)
    assert high == pytest.approx(row["step_s"] * math.exp(DEVIATIONS * 0.1), rel=0.01)
    assert "in nine cases of ten" in row["explain"]


def test_plan_takes_a_model_with_its_own_optimizer(model: list[str | Path]) -> None:
    model[1] = "dry_models:named"
    status, row = run_json("plan", *model, "--device-budget", "100%")
    assert status == 0
    assert row["d2h_bytes"] == 0
    assert row["ideal_s"] < 0.06  # four times as fast as in fp32


def test_plan_of_a_model_that_does_not_fit_ends_with_3(model: list[str | Path]) -> None:
    status, row = run_json("plan", *model, "--device-budget", "1MiB")
    assert status == 3
    assert "It does not fit" in row["explain"]
    assert re.search(r"device budget of \d+[KM]iB would do", row["explain"])


def test_plan_finds_the_least_that_runs(problem: list[str | Path]) -> None:
    status, row = run_json("plan", *problem, "--device-budget", "min")
    assert status == 0
    least = row["peak_device_bytes"]
    status, row = run_json("plan", *problem, "--device-budget", str(least - 1))
    assert status == 3
    named = re.search(r"device budget of (\S+?)(?: bytes)? would do", row["explain"])
    assert named is not None
    assert run_json("plan", *problem, "--device-budget", named[1])[0] == 0


@pytest.mark.parametrize("option", ["--device-budget", "--host-budget", "--nvme-budget"])
def test_a_wrong_budget_names_its_option(problem: list[str | Path], option: str) -> None:
    budgets = {"--device-budget": "50%", option: "4 bananas"}
    status, document = run_json("plan", *problem, *(word for pair in budgets.items() for word in pair))
    assert status == 1
    assert document["error"]["message"].startswith(f"{option}: expected bytes like")


def test_plan_wants_either_a_model_or_a_trace(model: list[str | Path], problem: list[str | Path]) -> None:
    assert run("plan", *model, *problem[:2], "--device-budget", "4GiB")[0] == 2
    assert run("plan", *model[2:], "--device-budget", "4GiB")[0] == 2


def test_plan_says_what_is_wrong_with_a_model(model: list[str | Path], problem: list[str | Path]) -> None:
    status, document = run_json("plan", *model[:2], *problem[2:], "--device-budget", "50%")
    assert status == 1
    assert "fp32_flops_per_s" in document["error"]["message"]
    status, document = run_json("plan", "--model", "dry_models:none", *model[2:], "--device-budget", "50%")
    assert status == 1
    assert document["error"]["type"] == "ConfigError"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("model.weight.grad = model.weight.detach().clone(); optimizer.step(); print('trained')", "importing scripted trains"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--no'])", r"importing scripted ended the program"),
    ],
)
def test_plan_of_a_script_says_that_it_imports_it_and_does_not_train(
    problem: list[str | Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, told: str
) -> None:
    text = "import torch\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters())\n"
    (tmp_path / "scripted.py").write_text(text + body + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    arguments = ["plan", "--model", "scripted:model", *problem[2:], "--device-budget", "50%"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1
    assert re.search(told, result.stderr)
    assert "__main__" in result.stderr
    assert "tieroff: importing scripted, which runs" in result.stderr
    assert "trained" not in result.stdout


def test_the_table_fits_80_columns_and_wide_has_all(problem: list[str | Path]) -> None:
    status, text = run("compare", *problem, "--device-budget", "4GiB")
    table = [line for line in text.splitlines() if line[:1] in "┏┡└│┃"]
    assert status == 0
    assert len(table) > 20
    assert max(map(len, table)) <= 80
    assert "…" not in "".join(table)
    assert "more columns with --wide" in text
    _, wide = run("plan", *problem, "--device-budget", "4GiB", "--wide")
    assert all(head in wide for head in ("nvme write", "recompute", "status"))


def test_plan_says_when_it_is_done_and_takes_the_folder_of_a_run(problem: list[str | Path], tmp_path: Path) -> None:
    status, text = run("plan", *problem, "--device-budget", "4GiB", "--out", tmp_path / "plan.json")
    assert status == 0
    assert re.search(rf"planned in .*; the plan is in {re.escape(str(tmp_path))}", text)
    (tmp_path / "run").mkdir()
    save_trace(load_trace(problem[1]), tmp_path / "run" / "trace.json")
    _, row = run_json("plan", "--trace", tmp_path / "run", *problem[2:], "--device-budget", "4GiB")
    assert row["status"] == "ok"
    status, document = run_json("plan", "--trace", tmp_path, *problem[2:], "--device-budget", "4GiB")
    assert status == 1
    assert "save_run" in document["error"]["message"]


def test_compare_prints_a_row_per_policy(problem: list[str | Path]) -> None:
    status, rows = run_json("compare", *problem, "--device-budget", "4GiB", "--policies", "floor, greedy")
    assert status == 0
    assert [row["policy"] for row in rows] == ["floor", "greedy"]
    assert all(list(row) == ROW_KEYS for row in rows)
    assert rows[1]["step_s"] <= rows[0]["step_s"]
    assert [(row["kind"], row["options"], row["reason"]) for row in rows] == [("static", "", "")] * 2
    assert all(row["faithful_step_s"] == row["step_s"] for row in rows)
    status, text = run("compare", *problem, "--device-budget", "4GiB")
    assert status == 0
    assert "zero-offload: expected a plan within 4.00 GiB" in text and "faithful step: under" in text
    assert all(policy in text for policy in ("auto", "floor", "greedy"))


def test_compare_with_infeasible_rows_ends_with_0(problem: list[str | Path]) -> None:
    status, rows = run_json("compare", *problem, "--device-budget", "1GiB", "--policies", "floor")
    assert status == 0
    assert [(row["status"], row["step_s"]) for row in rows] == [("infeasible", None)]
