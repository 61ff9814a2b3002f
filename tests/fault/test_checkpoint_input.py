"""Checkpoints that are damaged, lacking or another model's: a clear error, and every value as it was."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

import tieroff
from tests.support.parity import machine_file
from tieroff.checkpoint import shard as shard_module
from tieroff.errors import CheckpointError, StateError, StoreError

INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], None]


def build(width: int = 24) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 16))


def wrap(model: nn.Module, folder: Path) -> nn.Module:
    drive = folder / "drive"
    drive.mkdir(exist_ok=True)
    return tieroff.wrap(
        model,
        config={
            "device": "cpu",
            "budget": {"device": "1GiB", "host": 0, "nvme": "8MiB"},
            "nvme": {"dirs": [str(drive)]},
            "plan": {"policy": "floor", "min_bytes": 0, "machine": str(machine_file(folder))},
        },
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a checkpoint of several shards."""
    torch.manual_seed(1)
    folder = tmp_path / "saved"
    tieroff.save_weights(build(), folder, max_shard_bytes="1KiB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture(params=["plain", "wrapped", "meta", "wrapped meta"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[nn.Module]:
    torch.manual_seed(2)
    with torch.device("meta" if "meta" in request.param else "cpu"):
        model = build()
    if "wrapped" in request.param:
        wrap(model, tmp_path)
    yield model
    if "wrapped" in request.param:
        tieroff.unwrap(model)


def values_of(model: nn.Module) -> dict[str, Any]:
    return {
        name: "meta" if value.is_meta else value.detach().clone() for name, value in model.state_dict(keep_vars=True).items()
    }


def assert_refused(model: nn.Module, path: Path, *told: str, **options: Any) -> CheckpointError:
    """Loading raises an error that says all this, and no value has changed."""
    before = values_of(model)
    with pytest.raises(CheckpointError) as caught:
        tieroff.load_weights(model, path, **options)
    for part in told:
        assert part in str(caught.value)
    after = values_of(model)
    for name, value in before.items():
        assert after[name] == "meta" if isinstance(value, str) else torch.equal(value, after[name])
    return caught.value


def last_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


def cut_data(folder: Path) -> None:
    os.truncate(last_shard(folder), last_shard(folder).stat().st_size - 5)


def cut_header(folder: Path) -> None:
    os.truncate(last_shard(folder), 40)


def empty(folder: Path) -> None:
    os.truncate(last_shard(folder), 0)


def garbage(folder: Path) -> None:
    last_shard(folder).write_bytes(b"PK\x03\x04" + bytes(range(256)) * 4)


def longer(folder: Path) -> None:
    with last_shard(folder).open("ab") as file:
        file.write(b"more")


def huge_header(folder: Path) -> None:
    path = last_shard(folder)
    path.write_bytes(b"\xff" * 7 + b"\x7f" + path.read_bytes()[8:])


@pytest.mark.parametrize("damage", [cut_data, cut_header, empty, garbage, longer, huge_header])
def test_a_damaged_shard_is_refused_before_anything_changes(damage: Damage, model: nn.Module, saved: Path) -> None:
    damage(saved)
    assert_refused(model, saved, str(last_shard(saved)), "truncated or something else")


def test_a_missing_shard_is_named(model: nn.Module, saved: Path) -> None:
    gone = last_shard(saved)
    gone.unlink()
    assert_refused(model, saved, str(gone), "missing")


def rewritten_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / INDEX
    document = json.loads(path.read_text())
    path.write_text(json.dumps(change(document) or document))


@pytest.mark.parametrize("outside", ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_that_names_a_path_outside_its_folder_is_refused(outside: str, model: nn.Module, saved: Path) -> None:
    rewritten_index(saved, lambda document: document["weight_map"].update({"2.bias": outside}))
    assert_refused(model, saved, "not in the index's own folder", repr(outside), "2.bias")


@pytest.mark.parametrize(
    "change",
    [
        lambda _: [1, 2],
        lambda document: document.pop("weight_map") and None,
        lambda _: {"weight_map": {"a": 3}},
        lambda _: {"weight_map": ["a"]},
    ],
    ids=["a list", "no map", "numbers", "a list as map"],
)
def test_an_index_of_another_form_is_refused(change: Callable[[dict[str, Any]], Any], model: nn.Module, saved: Path) -> None:
    rewritten_index(saved, change)
    assert_refused(model, saved, INDEX)


def test_an_index_that_is_no_json_is_refused(model: nn.Module, saved: Path) -> None:
    (saved / INDEX).write_text('{"weight_map": {')
    assert_refused(model, saved, INDEX, "JSON")


def test_an_index_that_names_the_wrong_shard_is_refused(model: nn.Module, saved: Path) -> None:
    first = sorted(saved.glob("*.safetensors"))[0].name
    rewritten_index(saved, lambda document: document["weight_map"].update({"2.bias": first}))
    assert_refused(model, saved, "2.bias", first)


def test_shards_of_two_saves_do_not_mix(model: nn.Module, saved: Path, tmp_path: Path) -> None:
    """A shard that was replaced by one of another save, with other tensors in it."""
    files = sorted(saved.glob("*.safetensors"))
    files[0].write_bytes(files[-1].read_bytes())
    assert_refused(model, saved, str(files[0]))


@pytest.mark.parametrize("name", ["nowhere", "nowhere.safetensors", f"nowhere/{INDEX}"])
def test_a_wrong_path_is_named(name: str, model: nn.Module, tmp_path: Path) -> None:
    assert_refused(model, tmp_path / name, str(tmp_path / name), "missing")


def test_a_folder_without_a_checkpoint_says_what_it_holds(model: nn.Module, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    assert_refused(model, other, "an empty folder")
    (other / "weights.bin").touch()
    assert_refused(model, other, "weights.bin", "name the file itself")


def test_another_models_checkpoint_says_where_shapes_differ(model: nn.Module, tmp_path: Path) -> None:
    tieroff.save_weights(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)), tmp_path / "other")
    assert_refused(model, tmp_path / "other", "1.weight has shape [24], the checkpoint [16, 24]")


def test_missing_and_unexpected_names_are_told(model: nn.Module, tmp_path: Path) -> None:
    values = {name: value.clone() for name, value in build().state_dict().items()}
    values["extra.weight"] = torch.ones(3)
    del values["2.bias"]
    safetensors.torch.save_file(values, tmp_path / "partly.safetensors")
    error = assert_refused(model, tmp_path / "partly.safetensors", "missing 2.bias", "unexpected extra.weight")
    assert (error.missing, error.unexpected) == (("2.bias",), ("extra.weight",))
    before = values_of(model)["2.bias"]
    missing, unexpected = tieroff.load_weights(model, tmp_path / "partly.safetensors", strict=False)
    assert (missing, unexpected) == (["2.bias"], ["extra.weight"])
    after = values_of(model)
    assert torch.equal(after["2.weight"], values["2.weight"])
    assert after["2.bias"] == before if isinstance(before, str) else torch.equal(after["2.bias"], before)


def test_other_shapes_are_told_even_when_not_strict(model: nn.Module, tmp_path: Path) -> None:
    tieroff.save_weights(build(width=32), tmp_path / "wide")
    assert_refused(model, tmp_path / "wide", "0.weight has shape [24, 16], the checkpoint [32, 16]", strict=False)


def test_other_types_are_told_or_converted_on_demand(model: nn.Module, tmp_path: Path) -> None:
    other = build().to(torch.bfloat16)
    tieroff.save_weights(other, tmp_path / "low")
    assert_refused(model, tmp_path / "low", "0.weight is F32, the checkpoint's is BF16", "convert=True")
    tieroff.load_weights(model, tmp_path / "low", convert=True)
    for name, value in model.state_dict().items():
        assert value.dtype in (torch.float32, torch.int64)
        assert torch.equal(value, other.state_dict()[name].to(value.dtype))


def test_tied_parameters_with_two_values_are_refused(tmp_path: Path) -> None:
    safetensors.torch.save_file({"0.weight": torch.ones(4, 4), "1.weight": torch.zeros(4, 4)}, tmp_path / "two.safetensors")
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    assert_refused(tied, tmp_path / "two.safetensors", "0.weight and 1.weight", "ties")
    untied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tieroff.load_weights(untied, tmp_path / "two.safetensors")
    assert float(untied.get_parameter("0.weight").detach().sum()) == 16


def test_a_file_that_is_replaced_while_it_is_loaded_is_noticed(saved: Path) -> None:
    files = sorted(saved.glob("*.safetensors"))

    def replace(_done: int, _total: int) -> None:
        files[-1].write_bytes(files[-1].read_bytes())

    with pytest.raises(CheckpointError, match="another file"):
        tieroff.load_weights(build(), saved, on_progress=replace)


def test_a_drive_that_fails_while_loading_says_which_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, path: Path, *_args: Any, **_options: Any) -> None:
            self._file: Any = safe_open(path, "pt", backend="pread")

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def get_tensor(self, _name: str) -> torch.Tensor:
            raise OSError(5, "Input/output error")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    monkeypatch.setattr(shard_module, "safe_open", Failing)
    with pytest.raises(StoreError, match="Input/output error") as caught:
        tieroff.load_weights(build(), saved)
    assert caught.value.errno == 5
    assert Path(caught.value.path) in saved.iterdir()


def test_hooks_on_the_meta_device_are_refused_rather_than_lost(saved: Path) -> None:
    with torch.device("meta"):
        model = build()
    model.get_parameter("0.weight").register_hook(lambda grad: grad)
    with pytest.raises(StateError, match=r"0\.weight.*hooks"):
        tieroff.load_weights(model, saved)
    assert all(p.is_meta for p in model.parameters())


def test_weak_references_to_the_meta_device_are_told_before_anything_is_loaded(saved: Path) -> None:
    with torch.device("meta"):
        model = build()
    reference = weakref.ref(model.get_parameter("2.weight"))
    with pytest.raises(StateError, match=r"2\.weight.*weak references"):
        tieroff.load_weights(model, saved)
    assert all(p.is_meta for p in model.parameters())
    del reference
    tieroff.load_weights(model, saved)
    assert not any(p.is_meta for p in model.parameters())


def test_optimizer_state_that_was_loaded_too_early_is_told(saved: Path, tmp_path: Path) -> None:
    full = build()
    optimizer = torch.optim.SGD(full.parameters(), lr=0.1, momentum=0.9)
    full(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    with torch.device("meta"):
        model = build()
    early = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    early.load_state_dict(optimizer.state_dict())
    wrap(model, tmp_path)
    tieroff.engine(model).attach(early)
    with pytest.raises(StateError, match="load the weights first"):
        tieroff.load_weights(model, saved)
    early.state.clear()
    tieroff.load_weights(model, saved)
    early.load_state_dict(optimizer.state_dict())
    model(torch.randn(4, 16)).sum().backward()
    early.step()
    assert all(entry["momentum_buffer"].is_cpu for entry in early.state.values())
    tieroff.unwrap(model)


def test_a_forward_before_the_weights_are_loaded_says_so(saved: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = build()
    wrap(model, tmp_path)
    with pytest.raises(StateError, match=r"9 on the meta device.*load_weights"):
        model(torch.randn(4, 16))
    with pytest.raises(CheckpointError, match="on the meta device"):
        tieroff.save_weights(model, tmp_path / "on_meta")
    assert not (tmp_path / "on_meta").exists()
    tieroff.load_weights(model, saved)
    assert torch.isfinite(model(torch.randn(4, 16))).all()
    tieroff.unwrap(model)


def test_buffers_that_are_not_persistent_have_to_be_set_by_hand(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("angles", torch.arange(4.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.angles

    tieroff.save_weights(Rotary(), tmp_path / "saved")
    with torch.device("meta"):
        model = Rotary()
    wrap(model, tmp_path)
    assert tieroff.load_weights(model, tmp_path / "saved") == ([], [])
    with pytest.raises(StateError, match=r"1 on the meta device: angles; .*by hand"):
        model(torch.randn(2, 4))
    model.angles = torch.arange(4.0)
    assert model(torch.ones(2, 4)).shape == (2, 4)
    tieroff.unwrap(model)
