"""FSDP2 with its shards below a device: bit for bit the run without tieroff, while everything moves and no access races."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator import sim, target
from tests.parity.shards.launched import Found, told_by
from tests.parity.shards.test_shards import check, check_budget_held

pytestmark = [
    pytest.mark.skipif(not target.IS_SIMULATED, reason="each rank has a simulated device of its own"),
    pytest.mark.timeout(600),
]

# What each case is: tests/parity/shards/program.py. "transformer" is at 40 % of its peak.
CASES = ("nvme", "summed", "transformer", "transformer in the least")
MORE = (
    *("bf16 on a device", "hybrid", "host", "mixed", "auto", "tied", "lora", "rerun", "evaluation", "summed without sync"),
    *("summed without sync, bf16, on a device", "hybrid without sync", "clipped by tieroff", "one rank"),
    *("kept after forward", "sgd"),
)
OFFLOADED = "offloaded, clipped by tieroff"
ON_FOUR = ("mixed", "bf16 on a device", "hybrid", "transformer")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Found:
    return told_by(project, tmp_path_factory.mktemp("two"), 2, CASES, device=sim.NAME)


@pytest.mark.parametrize("case", CASES)
def test_shards_below_a_device_have_the_numbers_of_plain_fsdp2_and_no_race(two: Found, case: str) -> None:
    for found in two[case]:
        check(found, case)


def test_a_transformer_at_40_percent_of_its_peak_needs_no_more_of_a_device(two: Found) -> None:
    for found in two["transformer"]:
        check_budget_held(found)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Found:
    return told_by(project, tmp_path_factory.mktemp("more"), 2, (*MORE, OFFLOADED), device=sim.NAME)


@pytest.mark.long
@pytest.mark.parametrize("case", MORE)
def test_more_ways_to_shard_below_a_device(more: Found, case: str) -> None:
    for found in more[case]:
        check(found, case)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Found:
    return told_by(project, tmp_path_factory.mktemp("four"), 4, ON_FOUR, device=sim.NAME)


@pytest.mark.long
@pytest.mark.parametrize("case", ON_FOUR)
def test_four_ranks_below_a_device(four: Found, case: str) -> None:
    for found in four[case]:
        check(found, case)


@pytest.mark.long
def test_gradients_that_fsdp2_keeps_on_the_host_are_clipped_over_the_devices_mesh(more: Found) -> None:
    for found in more[OFFLOADED]:
        assert found["differ"] == []
        assert found["wrong"] == {}
        assert found["phase"] == "planned"
        assert found["moved"]["activation"] > 0 == found["moved"]["parameter"]


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Found:
    return told_by(project, tmp_path_factory.mktemp("life"), 2, ("loaded", "copied", "used"), "life", sim.NAME)


@pytest.mark.long
@pytest.mark.parametrize("scene", ["loaded", "copied", "used"])
def test_user_code_reaches_shards_below_a_device(life: Found, scene: str) -> None:
    for found in life[scene]:
        assert found["differ"] == []
        assert found.get("moved", {"parameter": 1})["parameter"] > 0
        assert found.get("on", ["cpu"]) == ["cpu"]  # what `state_dict()` gives
