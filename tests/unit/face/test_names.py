"""What ops and tensors of a user's model are called in explanations, reports and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import MACHINE, adam
from tieroff.core.explain.words import op_words
from tieroff.core.io.json_files import save_trace
from tieroff.errors import InfeasiblePlanError
from tieroff.study.profiles.files import load_trace


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc2(self.act(self.fc1(x))))  # the line that is named


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


LINE = f"{Path(__file__).name}:{Block.forward.__code__.co_firstlineno + 1}"


def squares(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def trained(
    folder: Path,
    rows: int = 8,
    make: Callable[[], nn.Module] = Net,
    loss: Callable[[torch.Tensor], torch.Tensor] = squares,
    **budget: Any,
) -> nn.Module:
    (folder / "machine.toml").write_text(MACHINE)
    torch.manual_seed(0)
    model = make()
    optimizer = adam(model)
    planning = {"min_bytes": 0, "machine": str(folder / "machine.toml"), "policy": "floor"}
    tieroff.wrap(model, optimizer, {"device": "cpu", "budget": {"host": "8MiB", **budget}, "plan": planning})
    for _ in range(4):
        optimizer.zero_grad()
        loss(model(torch.randn(rows, 16))).backward()
        optimizer.step()
    return model


def test_an_activation_is_named_by_module_kind_and_line(tmp_path: Path) -> None:
    model = trained(tmp_path, device="1GiB")
    trace, told = tieroff.engine(model).trace, tieroff.engine(model).explain(detail=True)
    tieroff.unwrap(model)
    labels = [tensor.label for tensor in trace.tensors if tensor.name.startswith("activation:")]
    assert f"layers.1.fc1: saved by GELU, made by addmm ({LINE})" in labels
    assert f"layers.2.fc2: saved by Linear, made by gelu ({LINE})" in labels
    assert any(label.startswith("layers.0.fc2: saved by Block") for label in labels)  # tanh has no module of its own
    assert re.search(r"activation:\d", told) is None
    words = op_words(trace)
    assert "layers.1.fc1 uses weight" in words
    assert "backward of layers.1.fc2 uses weight" in words
    assert f"backward of layers.1.fc1: saved by GELU, made by addmm ({LINE})" in words


def test_the_page_of_a_run_names_activations_too(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    model = trained(tmp_path, device="1GiB")
    tieroff.engine(model).save_report(tmp_path / "run.html")
    tieroff.unwrap(model)
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert "layers.1.fc1: saved by GELU, made by addmm" in page
    assert re.search(r"activation:\d", page) is None


def test_labels_are_kept_in_files_and_are_no_part_of_the_structure(tmp_path: Path) -> None:
    model = trained(tmp_path, device="1GiB")
    trace = tieroff.engine(model).trace
    tieroff.unwrap(model)
    save_trace(trace, tmp_path / "trace.json")
    loaded = load_trace(tmp_path / "trace.json")
    assert [tensor.label for tensor in loaded.tensors] == [tensor.label for tensor in trace.tensors]
    assert loaded.digest == trace.digest
    other = trained(tmp_path, device="1GiB")
    assert tieroff.engine(other).trace.digest == trace.digest
    tieroff.unwrap(other)


def test_an_op_that_is_too_large_is_named_with_its_module_call_and_line(tmp_path: Path) -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        trained(tmp_path, rows=2048, device="1KiB", strict=True)
    assert "layers." in str(caught.value)
    assert LINE in str(caught.value)
    assert "most of it in aten." in str(caught.value)
    assert "half the batch: at best" in str(caught.value)


def test_a_loss_over_a_vocabulary_is_to_be_taken_in_chunks(tmp_path: Path) -> None:
    def loss(out: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out, torch.zeros(len(out), dtype=torch.long))

    with pytest.raises(InfeasiblePlanError, match="the loss in chunks"):
        trained(tmp_path, 512, lambda: nn.Sequential(nn.Linear(16, 500)), loss, device="1KiB", strict=True)
