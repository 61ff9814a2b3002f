"""`load_weights` and `save_weights`: what goes in comes out, whatever it is and wherever it lies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tieroff
from tests.support.delayed import DelayedBackend
from tests.support.parity import are_same_bits, machine_file
from tieroff.checkpoint.folder import INDEX_FILE
from tieroff.checkpoint.save import split_in_shards
from tieroff.checkpoint.shard import CODES
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.items.residency import State

BACKENDS: dict[str, Any] = {"cpu": CpuBackend, "delayed": lambda: DelayedBackend(7)}


class Zoo(nn.Module):
    """Every kind of parameter and buffer that a model may have."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 32)
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # documented, and missing in the stub
        self.norm = nn.BatchNorm1d(32)
        self.rnn = nn.LSTM(32, 32)
        self.low = nn.Parameter(torch.randn(7, 5, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.head = nn.Linear(32, 30)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("counts", torch.arange(5, dtype=torch.int16))
        self.alias = nn.Module()
        self.alias.register_buffer("mask", self.mask)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(self.norm(self.embedding(tokens)))[0]) * self.scale
        return out


def wrap(model: nn.Module, optimizer: Any, folder: Path, backend: Backend, *, host_bytes: int = 0) -> None:
    (folder / "drive").mkdir(exist_ok=True)
    tieroff.wrap(
        model,
        optimizer,
        {
            "device": "cpu",
            "budget": {"device": "1GiB", "host": host_bytes, "nvme": 0 if host_bytes else "16MiB"},
            "nvme": {"dirs": [] if host_bytes else [str(folder / "drive")], "staging": "1MiB"},
            "plan": {"policy": "floor", "min_bytes": 64, "machine": str(machine_file(folder))},
        },
        backend=backend,
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[Tensor]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randint(0, 30, (12,))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def assert_same_values(a: nn.Module, b: nn.Module) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert are_same_bits(value.detach(), theirs[name].detach()), name
        assert value.stride() == theirs[name].stride(), name


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad and p.numel()], lr=1e-2)


@pytest.fixture
def original() -> nn.Module:
    torch.manual_seed(3)
    return Zoo()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = BACKENDS[request.param]()
    yield backend


@pytest.mark.parametrize(
    ("host_bytes", "max_shard_bytes", "is_optimizer_first"),
    [(0, "2KiB", True), (0, "1GiB", False), (16 << 20, "2KiB", False)],
    ids=["nvme-shards-optimizer", "nvme-file", "host-shards"],
)
def test_a_model_from_the_meta_device_trains_as_the_original(
    is_optimizer_first: bool, max_shard_bytes: str, host_bytes: int, backend: Backend, original: nn.Module, tmp_path: Path
) -> None:
    tieroff.save_weights(original, tmp_path / "saved", max_shard_bytes=max_shard_bytes)
    with torch.device("meta"):
        model = Zoo()
    model.embedding.weight.mark = "kept"  # type: ignore[attr-defined]
    objects = list(model.parameters())
    optimizer = adamw(model) if is_optimizer_first else None
    wrap(model, optimizer, tmp_path, backend, host_bytes=host_bytes)
    progress: list[tuple[int, int]] = []
    assert tieroff.load_weights(model, tmp_path / "saved", on_progress=lambda *at: progress.append(at)) == ([], [])
    assert [a is b for a, b in zip(objects, model.parameters(), strict=True)] == [True] * len(objects)
    assert model.head.weight is model.embedding.weight and model.alias.mask is model.mask
    assert model.embedding.weight.mark == "kept" and not model.frozen.requires_grad  # type: ignore[attr-defined]
    assert (
        progress[-1][0]
        == progress[-1][1]
        == sum(t.numel() * t.element_size() for t in {id(t): t for t in original.state_dict(keep_vars=True).values()}.values())
    )
    assert_same_values(model, original)
    engine = tieroff.engine(model)
    if optimizer is None:
        optimizer = adamw(model)
        engine.attach(optimizer)
    items = list(engine.executor.homes.parameters.values())
    assert len(items) >= 8
    assert all(item.state is State.LOWER for item in items)
    assert {item.tier for item in items} == {Tier.HOST if host_bytes else Tier.NVME}
    assert engine.device_bytes == 0
    expected = train(original, adamw(original))
    assert all(map(torch.equal, expected, train(model, optimizer)))
    assert engine.stats().phase == "planned"
    assert_same_values(model, original)
    tieroff.unwrap(model)
    assert_same_values(model, original)


def test_wrapped_and_plain_models_are_saved_alike(backend: Backend, original: nn.Module, tmp_path: Path) -> None:
    plain = tieroff.save_weights(original, tmp_path / "plain")
    optimizer = adamw(original)
    wrap(original, optimizer, tmp_path, backend)
    wrapped = tieroff.save_weights(original, tmp_path / "wrapped")
    assert plain[0].read_bytes() == wrapped[0].read_bytes()
    train(original, optimizer)
    tieroff.save_weights(original, tmp_path / "trained", max_shard_bytes="1KiB")
    other = Zoo()
    tieroff.load_weights(other, tmp_path / "trained" / INDEX_FILE)
    assert_same_values(other, original)
    tieroff.unwrap(original)


def test_weights_are_loaded_into_a_model_that_trains(backend: Backend, original: nn.Module, tmp_path: Path) -> None:
    tieroff.save_weights(original, tmp_path / "saved")
    model = Zoo()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad and p.numel()], lr=0.1)
    wrap(model, optimizer, tmp_path, backend)
    train(model, optimizer)
    tieroff.load_weights(model, tmp_path / "saved" / "model.safetensors")
    assert_same_values(model, original)
    reference = torch.optim.SGD([p for p in original.parameters() if p.requires_grad and p.numel()], lr=0.1)
    assert all(map(torch.equal, train(original, reference), train(model, optimizer)))
    assert tieroff.engine(model).stats().phase == "planned"  # a new value is no new model: the plan goes on
    assert_same_values(model, original)
    tieroff.unwrap(model)


def test_a_plain_model_from_the_meta_device_is_filled_in_memory(original: nn.Module, tmp_path: Path) -> None:
    tieroff.save_weights(original, tmp_path / "saved")
    with torch.device("meta"):
        model = Zoo()
    optimizer = adamw(model)
    tieroff.load_weights(model, tmp_path / "saved")
    assert_same_values(model, original)
    assert all(map(torch.equal, train(original, adamw(original)), train(model, optimizer)))


def test_a_model_partly_on_the_meta_device_is_filled(original: nn.Module, tmp_path: Path) -> None:
    tieroff.save_weights(original, tmp_path / "saved", max_shard_bytes="1KiB")
    model = Zoo()
    with torch.device("meta"):
        model.rnn = nn.LSTM(32, 32)
    wrap(model, None, tmp_path, CpuBackend())
    tieroff.load_weights(model, tmp_path / "saved")
    assert_same_values(model, original)
    tieroff.unwrap(model)


def test_files_are_read_by_safetensors_and_its_files_by_us(original: nn.Module, tmp_path: Path) -> None:
    paths = tieroff.save_weights(original, tmp_path / "saved", max_shard_bytes="2KiB")
    index = json.loads((tmp_path / "saved" / INDEX_FILE).read_text())
    assert paths[-1].name == INDEX_FILE and len(paths) > 3
    values: dict[str, Tensor] = {}
    for path in paths[:-1]:
        found = safetensors.torch.load_file(path)
        assert {name for name, file in index["weight_map"].items() if file == path.name} == set(found)
        values |= found
    expected = original.state_dict()
    assert expected.keys() - values.keys() == {"head.weight", "alias.mask"}
    assert all(are_same_bits(expected[name], value) for name, value in values.items())
    assert index["metadata"]["total_size"] == sum(value.numel() * value.element_size() for value in values.values())
    tieroff.save_weights(original, tmp_path / "one")
    other = Zoo()
    safetensors.torch.load_model(other, tmp_path / "one" / "model.safetensors")
    assert all(are_same_bits(value, other.state_dict()[name]) for name, value in expected.items())
    safetensors.torch.save_model(original, str(tmp_path / "theirs.safetensors"))
    other = Zoo()
    tieroff.load_weights(other, tmp_path / "theirs.safetensors")
    assert_same_values(other, original)


@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_every_type_of_the_format_goes_there_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    class Holder(nn.Module):
        value: Tensor

        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.register_buffer("value", value)

    raw = torch.arange(64, dtype=torch.uint8).remainder(2 if dtype is torch.bool else 251)
    holder = Holder(raw.view(dtype).reshape(2, -1))
    (path,) = tieroff.save_weights(holder, tmp_path)
    found = Holder(torch.zeros_like(holder.value))
    tieroff.load_weights(found, path)
    assert are_same_bits(found.value, holder.value)
    assert are_same_bits(safetensors.torch.load_file(path)["value"], holder.value)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 400))
def test_shards_hold_everything_once_and_no_more_than_they_may(sizes: list[int], limit_bytes: int) -> None:
    tensors = [(f"t{i}", torch.empty(size, dtype=torch.uint8)) for i, size in enumerate(sizes)]
    shards = split_in_shards(tensors, limit_bytes)
    assert sorted(name for shard in shards for name, _ in shard) == sorted(name for name, _ in tensors)
    for shard in shards:
        assert len(shard) == 1 or sum(t.numel() for _, t in shard) <= limit_bytes
