"""`tieroff plan --hf`: where a configuration comes from, what is printed, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: nothing is downloaded

import pytest
from typer.testing import CliRunner

from tests.unit.recipes.recipe_models import wide
from tieroff.cli import app
from tieroff.errors import ConfigError
from tieroff.tracing.recipes.configuration import load_configuration
from tieroff.tracing.recipes.kinds import Recipe

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
ROW_KEYS = {
    *("policy", "status", "step_s", "ideal_s", "bound_s", "stall_s", "peak_device_bytes", "peak_host_bytes", "peak_nvme_bytes"),
    *("d2h_bytes", "h2d_bytes", "nvme_write_bytes", "nvme_read_bytes", "recompute_s", "plan_s", "explain"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    wide().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def plan(project: Path, hf: Path | str, *options: str) -> tuple[int, str]:
    machine = project / "configs/machines/rtx4090_1xgen4.toml"
    arguments = ["plan", "--hf", str(hf), "--machine", str(machine), *options]
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def plan_json(project: Path, hf: Path | str, *options: str) -> tuple[int, dict[str, Any]]:
    status, text = plan(project, hf, *options, "--json")
    return status, json.loads(text)


SIZES = ("--tokens", "64", "--batch", "2")


@pytest.mark.parametrize("recipe", [Recipe.qlora, *(pytest.param(each, marks=pytest.mark.long) for each in list(Recipe)[:-1])])
def test_a_row_is_that_of_every_plan(project: Path, folder: Path, recipe: Recipe) -> None:
    status, row = plan_json(project, folder, "--recipe", recipe.value, *SIZES, "--device-budget", "min")
    assert status == 0
    assert set(row) >= ROW_KEYS
    assert row["status"] == "ok"
    assert row["h2d_bytes"] > 0
    assert row["peak_host_bytes"] > 0
    assert f"LlamaForCausalLM, {recipe.value}: " in row["explain"]


def test_people_read_what_is_needed_and_what_moves(project: Path, folder: Path) -> None:
    status, text = plan(project, folder / "config.json", "--recipe", "full-fp32", *SIZES, "--device-budget", "50%")
    assert status == 0
    for part in ("2 x 64 tokens per step; layers run again in backward", "with nothing moved", " at least (", "optimizer: "):
        assert part in text
    assert "host holds at most" in text


def test_long_sequences_are_said_to_be_longer_than_the_model_knows(project: Path, folder: Path) -> None:
    options = ("--recipe", "full-bf16", "--tokens", "1024", "--device-budget", "100%")
    assert "512 positions, fewer than 1024" in plan(project, folder, *options)[1]


def test_a_budget_below_the_need_is_infeasible(project: Path, folder: Path) -> None:
    status, row = plan_json(project, folder, "--recipe", "full-fp32", *SIZES, "--device-budget", "64KiB")
    assert status == 3
    assert row["status"] == "infeasible"
    assert row["step_s"] is None
    assert " at least (" in row["explain"]


def test_the_least_budget_that_is_told_is_enough(project: Path, folder: Path) -> None:
    _, text = plan(project, folder, "--recipe", "full-fp32", *SIZES, "--device-budget", "64KiB")
    least = text.split("with nothing moved, ")[1].split(" at least")[0].replace(" ", "")
    status, row = plan_json(project, folder, "--recipe", "full-fp32", *SIZES, "--device-budget", "min")
    assert status == 0
    assert row["peak_device_bytes"] / 2**20 == pytest.approx(float(least.removesuffix("MiB")), abs=0.01)


@pytest.mark.parametrize("missing", ["--recipe", "--tokens"])
def test_a_recipe_and_its_tokens_are_needed(project: Path, folder: Path, missing: str) -> None:
    options = {"--recipe": "lora", "--tokens": "64", "--device-budget": "50%"}
    del options[missing]
    assert plan(project, folder, *[word for pair in options.items() for word in pair])[0] == 2


def test_one_source_of_a_step_is_needed(project: Path, folder: Path) -> None:
    options = ("--recipe", "lora", "--tokens", "64", "--device-budget", "50%", "--model", "models:gpt")
    assert plan(project, folder, *options)[0] == 2


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("./nowhere.json", "no file or folder"),
        ("nobody/such-a-model", "in the local cache, and this command does not use the network"),
    ],
)
def test_what_is_not_there_is_an_error(project: Path, place: str, told: str) -> None:
    status, document = plan_json(project, place, "--recipe", "lora", "--tokens", "64", "--device-budget", "50%")
    assert status == 1
    assert document["error"]["type"] == "ConfigError"
    assert told in document["error"]["message"]


def test_a_folder_without_a_configuration_and_unknown_ones_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a config\.json in the folder"):
        load_configuration(str(tmp_path))
    for text in ('{"model_type": "no_such_model"}', "{}", "not json"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="--hf: "):
            load_configuration(str(tmp_path))


@pytest.mark.long
def test_an_id_in_the_local_cache_needs_no_network(project: Path, tmp_path: Path) -> None:
    commit = "0" * 40
    stored = tmp_path / "hub/models--someone--small"
    wide().save_pretrained(stored / "snapshots" / commit)
    (stored / "refs").mkdir()
    (stored / "refs/main").write_text(commit)
    code = (
        "import socket, sys\n"
        "def refuse(*arguments): raise AssertionError('the network was asked')\n"
        "socket.socket.connect = refuse\n"
        "from tieroff.cli import main\n"
        "main()\n"
    )
    options = ["--recipe", "qlora", *SIZES, "--device-budget", "min", "--json"]
    machine = str(project / "configs/machines/rtx4090_1xgen4.toml")
    environment = {**os.environ, "HF_HOME": str(tmp_path), "PYTHONPATH": str(project)}
    environment.pop("HF_HUB_OFFLINE")
    for place, status in (("someone/small", 0), ("someone/other", 1)):
        done = subprocess.run(
            [sys.executable, "-c", code, "plan", "--hf", place, "--machine", machine, *options],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert done.returncode == status, done.stderr[-3000:]
        assert ("error" in json.loads(done.stdout)) == (status == 1)
