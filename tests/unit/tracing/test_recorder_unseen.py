"""A recorded step: what a dispatch mode sees of it is what the program calls, and none of the engine's own calls."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tieroff.tracing.recorder import StepRecorder

# How it makes views of what it moves. The loop calls neither.
MADE_BY_ENGINE = ("aten.empty.memory_format", "aten.set_.source_Storage_storage_offset")


class Steps(nn.Module):
    """A recurrent loop, whose gates are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = (torch.zeros(len(x), 16), torch.zeros(len(x), 16))
        for part in x.unbind(1):
            state = self.cell(part, state)
        return state[0]


def test_the_recorder_sees_none_of_the_engines_own_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Counter[str]()
    dispatch = StepRecorder.__torch_dispatch__

    def counted(self: StepRecorder, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen[str(func)] += 1
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(StepRecorder, "__torch_dispatch__", counted)
    model = Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {
        "device": "cpu",
        "budget": {"nvme": "16MiB"},
        "nvme": {"dirs": [str(tmp_path)]},
        "plan": {"min_bytes": 0, "cover": ["activations"]},
    }
    tieroff.wrap(model, optimizer, config, budget="min")
    model(torch.randn(4, 12, 8)).sum().backward()
    tieroff.unwrap(model)

    assert seen["aten.addmm.default"] + seen["aten.mm.default"] >= 2 * 12  # it was recorded
    assert [name for name in MADE_BY_ENGINE if seen[name]] == [], seen
