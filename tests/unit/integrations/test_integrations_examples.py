"""The examples: short, and each runs and moves bytes."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: nothing is downloaded

import pytest
import torch

# Libraries that warn of each other's future, and of a machine with few cores.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log\\(\\)`"),
]

LINES_AT_MOST = 40
COMPARED = ("gan", "grpo")  # with their plain runs, in tests/parity/programs
OF_RANKS = ("ray_train",)  # in tests/parity/shards
EXAMPLES = ("accelerate_loop", "hf_trainer", "lightning_fit", "peft_lora", "transformers_loop")


@pytest.fixture(autouse=True)
def _one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_example_is_tested(project: Path) -> None:
    assert tuple(sorted(path.stem for path in (project / "examples").glob("*.py"))) == tuple(
        sorted(EXAMPLES + COMPARED + OF_RANKS)
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_runs_and_moves_bytes(
    name: str, project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= LINES_AT_MOST
    runpy.run_path(str(path))["main"](str(tmp_path))
    told = capsys.readouterr().out
    assert "(planned)" in told
    assert "to nvme" in told
