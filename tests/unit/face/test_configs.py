"""The configs that are shipped: each loads, and is what its name says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from shared.runs import fit_budget
from tieroff.config import Config
from tieroff.core.machine import load_machine, save_machine
from tieroff.core.tensor import Tier
from tieroff.device_budget import DeviceBudget
from tieroff.tracing.roofline import Roofline

RUN_CONFIGS = ("quarter.toml", "two_tier.toml", "nvme_only.toml", "two_ranks.toml", "in_backward.toml")
MACHINES = (
    "a100_40gb.toml",
    "a100_80gb.toml",
    "h100_80gb.toml",
    "h200_4xgen5.toml",
    "h200_8xgen5.toml",
    "rtx4090_1xgen4.toml",
    "a100_80gb_pcie.toml",
    "l4.toml",
    "mi210.toml",
    "p100_16gb.toml",
    "t4.toml",
    "v100_32gb.toml",  # scripts/evidence/fit_machines.py
)


@pytest.mark.parametrize("name", RUN_CONFIGS)
def test_shipped_config_loads_and_survives_its_own_toml(project: Path, tmp_path: Path, name: str) -> None:
    config = Config.load(project / "configs" / name)
    (tmp_path / name).write_text(config.to_toml())
    assert Config.load(tmp_path / name) == config


def test_every_shipped_config_is_tested(project: Path) -> None:
    found = {path.name for path in (project / "configs").glob("*.toml") if not path.name.startswith("machine")}
    assert found == set(RUN_CONFIGS)


def test_quarter_config_is_a_quarter_with_a_small_host_tier_and_nvme(project: Path) -> None:
    config = Config.load(project / "configs/quarter.toml")
    assert config.budget.device == DeviceBudget(share=0.25)
    assert config.budget.host is not None
    assert config.nvme.staging < config.budget.host <= 64 * 2**20
    assert config.nvme.dirs


def test_two_tier_config_has_no_nvme(project: Path) -> None:
    config = Config.load(project / "configs/two_tier.toml")
    assert config.nvme.dirs == ()
    assert config.budget.host


def test_nvme_only_config_has_no_host_tier(project: Path) -> None:
    config = Config.load(project / "configs/nvme_only.toml")
    assert config.budget.host == 0
    assert config.budget.nvme
    assert config.nvme.dirs


def test_in_backward_config_is_the_quarter_with_updates_in_backward(project: Path) -> None:
    quarter = Config.load(project / "configs/quarter.toml")
    plan = quarter.plan.model_copy(update={"update_in_backward": 1})
    assert Config.load(project / "configs/in_backward.toml") == quarter.model_copy(update={"plan": plan})


@pytest.mark.parametrize("name", RUN_CONFIGS)
@pytest.mark.parametrize("total_bytes", [10**7, 400 * 2**20])
def test_demo_budget_on_the_cpu_is_device_host_and_staging_together(
    project: Path, tmp_path: Path, name: str, total_bytes: int
) -> None:
    config, budget_bytes = fit_budget(Config.load(project / "configs" / name), total_bytes, "cpu", tmp_path)
    assert config.budget.device is not None
    assert config.budget.host is not None
    staging = config.nvme.staging if config.nvme.dirs else 0
    assert config.budget.device.resolve(0) + config.budget.host + staging == budget_bytes == total_bytes
    assert config.budget.device.resolve(0) >= 0.75 * total_bytes
    assert config.nvme.dirs in ((), (tmp_path,))
    assert Config.load(tomllib.loads(config.to_toml())) == config


def test_demo_budget_on_cuda_is_device_memory_alone(project: Path, tmp_path: Path) -> None:
    given = Config.load(project / "configs/quarter.toml")
    config, budget_bytes = fit_budget(given, 10**9, "cuda", tmp_path)
    assert config.budget.device == DeviceBudget(size_bytes=10**9)
    assert budget_bytes == 10**9
    assert config.budget.host == given.budget.host
    assert config.nvme.staging == given.nvme.staging


def test_every_shipped_machine_is_tested(project: Path) -> None:
    assert {path.name for path in (project / "configs/machines").iterdir()} == set(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_shipped_machine_loads_and_can_plan_a_model(project: Path, tmp_path: Path, name: str) -> None:
    machine = load_machine(project / "configs/machines" / name)
    save_machine(machine, tmp_path / name)
    assert load_machine(tmp_path / name) == machine
    assert machine.measured.startswith("datasheet")
    assert machine.has_tier(Tier.HOST)
    assert machine.has_tier(Tier.NVME) == ("gen" in name)
    roofline = Roofline.of(machine)
    assert roofline.fp32_flops_per_s < roofline.bf16_flops_per_s < 1e15  # dense: figures with sparsity are twice as high
    # Drives cannot bring the card more than its own link takes in.
    assert machine.nvme_write_bytes_per_s <= machine.d2h_bytes_per_s
    assert machine.nvme_read_bytes_per_s <= machine.h2d_bytes_per_s
    assert bool(machine.nvme_endurance_bytes) == bool(machine.nvme_bytes)


@pytest.mark.parametrize("name", MACHINES)
def test_each_value_of_a_shipped_machine_has_its_source(project: Path, name: str) -> None:
    comment: list[str] = []
    follows_value = False
    without = []
    for line in (project / "configs/machines" / name).read_text().splitlines():
        if line.startswith("#"):
            comment = [line] if follows_value else [*comment, line]
            follows_value = False
        elif " = " in line:
            follows_value = True
            key = line.split(" = ")[0]
            is_sourced = re.search("https://|[Ss]ame page|Assumed", " ".join((*comment, line)))
            if key not in ("name", "measured", "nvme_shares_host_link") and not is_sourced:
                without.append(key)
        else:
            comment = comment if follows_value else []
    assert without == []
