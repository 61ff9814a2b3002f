"""What people save and load with: torch.save, safetensors and torch.distributed.checkpoint on wrapped models and optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import tieroff
from tests.support.delayed import DelayedBackend
from tests.support.parity import copy_of, differing, machine_file, state_of
from tieroff.runtime.backend.cpu import CpuBackend
from tieroff.runtime.optimizer import state_dicts

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # said of every call with no_dist=True
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch's own writer uses it
]

Pair = tuple[nn.Module, torch.optim.Optimizer]
BACKENDS: dict[str, Any] = {"cpu": CpuBackend, "delayed": lambda: DelayedBackend(7)}
TIERS = {"nvme": (0, "16MiB"), "host": ("16MiB", 0)}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 32)
        self.norm = nn.BatchNorm1d(32)
        self.middle = nn.Linear(32, 32)
        self.head = nn.Linear(32, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.norm(self.embedding(tokens))).relu())
        return out


def build(seed: int) -> Pair:
    torch.manual_seed(seed)
    model = Tied()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(pair: Pair, steps: int = 4) -> list[Tensor]:
    model, optimizer = pair
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(torch.randint(0, 30, (12,))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def values(pair: Pair) -> dict[str, Any]:
    return {**{name: copy_of(value) for name, value in pair[0].state_dict().items()}, **state_of(pair[1])}


@pytest.fixture(params=[f"{backend}-{tier}" for backend in BACKENDS for tier in TIERS])
def wrap(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Pair], Pair]]:
    backend, tier = request.param.split("-")
    host, nvme = TIERS[tier]
    (tmp_path / "drive").mkdir()
    wrapped: list[nn.Module] = []

    def wrap(pair: Pair) -> Pair:
        tieroff.wrap(
            *pair,
            {
                "device": "cpu",
                "budget": {"device": "1GiB", "host": host, "nvme": nvme},
                "nvme": {"dirs": [str(tmp_path / "drive")] if nvme else [], "staging": "1MiB"},
                "plan": {"policy": "floor", "min_bytes": 0, "machine": str(machine_file(tmp_path))},
            },
            backend=BACKENDS[backend](),
        )
        wrapped.append(pair[0])
        return pair

    yield wrap
    for model in wrapped:
        tieroff.unwrap(model)


def save_all(pair: Pair, folder: Path) -> None:
    torch.save({"model": pair[0].state_dict(), "optimizer": pair[1].state_dict()}, folder / "all.pt")


def load_all(pair: Pair, folder: Path, **options: Any) -> None:
    found = torch.load(folder / "all.pt", weights_only=True, **options)
    pair[0].load_state_dict(found["model"])
    pair[1].load_state_dict(found["optimizer"])


def dcp_state(pair: Pair) -> dict[str, Any]:
    model, optimizer = get_state_dict(*pair)
    return {"model": model, "optimizer": optimizer}


def save_dcp(pair: Pair, folder: Path) -> None:
    dcp.save(dcp_state(pair), checkpoint_id=folder / "dcp", no_dist=True)


def load_dcp(pair: Pair, folder: Path) -> None:
    state = dcp_state(pair)
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)
    set_state_dict(*pair, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save_full_dcp(pair: Pair, folder: Path) -> None:
    model, optimizer = get_state_dict(*pair, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    torch.save([model, optimizer], folder / "full.pt")


def load_full_dcp(pair: Pair, folder: Path) -> None:
    model, optimizer = torch.load(folder / "full.pt", weights_only=True)
    set_state_dict(*pair, model_state_dict=model, optim_state_dict=optimizer)


WAYS: dict[str, tuple[Callable[[Pair, Path], None], Callable[[Pair, Path], None]]] = {
    "torch": (save_all, load_all),
    "torch mmap": (save_all, lambda pair, folder: load_all(pair, folder, mmap=True)),
    "dcp": (save_dcp, load_dcp),
    "dcp full": (save_full_dcp, load_full_dcp),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_saved_comes_back_in_mid_run(way: str, wrap: Callable[[Pair], Pair], tmp_path: Path) -> None:
    """Saved wrapped, loaded plain and into another wrapped pair in mid-run: the same values, and the same losses after."""
    save, load = WAYS[way]
    source = wrap(build(1))
    train(source)
    expected = values(source)
    save(source, tmp_path)
    assert differing(expected, values(source)) == [], "saving changed something"
    after = train(source)
    plain = build(2)
    load(plain, tmp_path)
    assert differing(expected, values(plain)) == []
    other = wrap(build(3))
    train(other)
    load(other, tmp_path)
    assert differing(expected, values(other)) == []
    assert other[0].get_parameter("head.weight") is other[0].get_parameter("embedding.weight")
    assert all(map(torch.equal, after, train(other)))
    assert tieroff.engine(other[0]).stats().phase == "planned"
    assert differing(values(source), values(other)) == []


def test_a_checkpoint_of_a_plain_run_goes_into_a_wrapped_one(wrap: Callable[[Pair], Pair], tmp_path: Path) -> None:
    plain = build(1)
    train(plain)
    save_all(plain, tmp_path)
    wrapped = wrap(build(2))
    load_all(wrapped, tmp_path)
    assert all(map(torch.equal, train(plain), train(wrapped)))
    assert differing(values(plain), values(wrapped)) == []


def test_state_dicts_are_whole_in_the_middle_of_a_step(wrap: Callable[[Pair], Pair]) -> None:
    wrapped, plain = wrap(build(1)), build(1)
    train(wrapped)
    train(plain)
    tokens = torch.arange(12)
    losses = [model(tokens).square().mean() for model, _ in (wrapped, plain)]
    assert differing(values(plain), values(wrapped)) == []
    for loss in losses:
        loss.backward()
    assert differing(values(plain), values(wrapped)) == []
    grads = [{name: p.grad for name, p in model.named_parameters()} for model, _ in (wrapped, plain)]
    assert None not in grads[1].values()
    assert differing(*grads) == []


def test_safetensors_files_hold_what_the_model_holds(wrap: Callable[[Pair], Pair], tmp_path: Path) -> None:
    source = wrap(build(1))
    train(source)
    model = source[0]
    expected = copy.deepcopy(model.state_dict())
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    untied = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    safetensors.torch.save_file(untied, tmp_path / "file.safetensors")
    with pytest.raises(RuntimeError, match="share memory"):  # tied weights, as with a plain model
        safetensors.torch.save_file(model.state_dict(), tmp_path / "tied.safetensors")
    assert differing(untied, safetensors.torch.load_file(tmp_path / "file.safetensors")) == []
    other = wrap(build(2))
    train(other)
    safetensors.torch.load_model(other[0], str(tmp_path / "model.safetensors"))
    assert differing(expected, copy.deepcopy(other[0].state_dict())) == []
    other[0].load_state_dict(build(4)[0].state_dict())
    other[0].load_state_dict(safetensors.torch.load_file(tmp_path / "file.safetensors"), strict=False)
    assert differing(expected, copy.deepcopy(other[0].state_dict())) == []
    tieroff.load_weights(other[0], tmp_path / "model.safetensors")
    train(other, 1)


def test_assigning_a_mapped_checkpoint_moves_it_to_the_tiers(wrap: Callable[[Pair], Pair], tmp_path: Path) -> None:
    source = build(1)
    save_all(source, tmp_path)
    wrapped = wrap(build(2))
    found = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)
    wrapped[0].load_state_dict(found["model"], assign=True)
    wrapped[0].get_submodule("head").weight = wrapped[0].get_parameter("embedding.weight")
    del found
    with torch.no_grad():
        tokens = torch.arange(12)
        assert torch.equal(wrapped[0](tokens), source[0](tokens))
    assert len(tieroff.engine(wrapped[0]).executor.homes.parameters) == len(list(wrapped[0].parameters()))


def test_an_asynchronous_save_holds_the_values_of_its_call(wrap: Callable[[Pair], Pair], tmp_path: Path) -> None:
    pair = wrap(build(1))
    train(pair)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        expected = values(pair)
        saving = dcp.async_save(dcp_state(pair), checkpoint_id=tmp_path / "async")
        train(pair)  # goes on while the save is under way
        assert isinstance(saving, Future)
        saving.result()
        other = build(2)
        state = dcp_state(other)
        dcp.load(state, checkpoint_id=tmp_path / "async")
        set_state_dict(*other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    finally:
        dist.destroy_process_group()
    assert differing(expected, values(other)) == []


def test_state_dicts_of_a_device_are_copied_to_the_cpu_and_own_tensors_are_left_alone() -> None:
    """On tensors that only say that they lie on a GPU; the real ones are in the next test."""
    with FakeTensorMode():
        model = nn.BatchNorm1d(4, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        given = state_dicts.GivenOut()
        handles = [state_dicts.install(model, given)]
        handles.append(state_dicts.install_on_optimizer(optimizer, torch.device("cuda"), tuple, given))
        found = model.state_dict(prefix="a.")
        assert {value.device.type for value in found.values()} == {"cpu"} and len(found) == 5
        assert all(not value.requires_grad for value in found.values())
        kept = model.state_dict(keep_vars=True)
        assert kept["weight"] is model.weight and kept["running_mean"] is model.running_mean
        optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4, device="cuda"), "note": 1}
        packed = optimizer.state_dict()
        assert {value.device.type for value in packed["state"][0].values() if isinstance(value, Tensor)} == {"cpu"}
        assert packed["state"][0]["note"] == 1 and packed["param_groups"][0]["params"] == [0, 1]
        assert optimizer.state[model.weight]["exp_avg"].device.type == "cuda"
        for handle in handles:
            handle.remove()
        assert {value.device.type for value in model.state_dict().values()} == {"cuda"}


@pytest.mark.gpu
def test_state_dicts_on_a_gpu_are_whole_and_on_the_cpu(tmp_path: Path) -> None:
    plain, wrapped = build(1), build(1)
    plain[0].cuda()
    (tmp_path / "drive").mkdir()
    tieroff.wrap(
        *wrapped,
        {
            "device": "cuda",
            "budget": {"device": "60%", "host": "64MiB", "nvme": "64MiB"},
            "nvme": {"dirs": [str(tmp_path / "drive")]},
            "plan": {"policy": "auto", "min_bytes": 0},
        },
    )
    for pair in (plain, wrapped):
        for step in range(5):
            torch.manual_seed(step)
            pair[0](torch.randint(0, 30, (12,)).cuda()).square().mean().backward()
            pair[1].step()
            pair[1].zero_grad()
    states = [value for entries in wrapped[1].state_dict()["state"].values() for value in entries.values()]
    assert {value.device.type for value in (*wrapped[0].state_dict().values(), *states)} == {"cpu"}
    assert differing(values(plain), values(wrapped)) == []
    save_all(wrapped, tmp_path)
    load_all(wrapped, tmp_path)
    assert differing(values(plain), values(wrapped)) == []
    tieroff.unwrap(wrapped[0])
    assert differing(values(plain), values(wrapped)) == []
