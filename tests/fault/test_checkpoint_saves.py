"""A save that fails, at whatever call and for whatever reason, leaves the checkpoint before it whole and nothing beside it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.parity import machine_file
from tieroff.checkpoint.folder import INDEX_FILE, WEIGHTS_FILE, read_index
from tieroff.errors import CheckpointError, ConfigError, StoreError

SHARDED, SINGLE = "1KiB", "1GiB"


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 16))


def assert_holds(folder: Path, model: nn.Module) -> None:
    """The folder holds this model's weights and no other file."""
    found = build(99)
    tieroff.load_weights(found, folder)
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)
    files = {path.name for path in folder.iterdir()}
    index = folder / INDEX_FILE
    if WEIGHTS_FILE in files:
        assert files == {WEIGHTS_FILE}
    else:
        shards = set(read_index(index).values())
        assert files == {INDEX_FILE, *shards}


class Failing:
    """A system call that fails from its n-th call on."""

    def __init__(self, name: str, after: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._call: Callable[..., Any] = getattr(os, name)
        self._left, self._errno = after, number
        self.has_failed = False
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._left == 0:
            self.has_failed = True
            raise OSError(self._errno, os.strerror(self._errno))
        self._left -= 1
        return self._call(*args, **kwargs)


CALLS = [
    ("posix_fallocate", errno.ENOSPC),
    ("write", errno.ENOSPC),
    ("write", errno.EIO),
    ("fsync", errno.EIO),
    ("replace", errno.EACCES),
    ("open", errno.EMFILE),
]


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize(("call", "number"), CALLS, ids=lambda part: errno.errorcode.get(part, part))
@pytest.mark.parametrize(("before", "now"), [(SHARDED, SHARDED), (SHARDED, SINGLE), (SINGLE, SHARDED), (SINGLE, SINGLE)])
def test_a_failing_save_leaves_the_old_checkpoint_whole(
    before: str, now: str, call: str, number: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = build(1), build(2)
    tieroff.save_weights(old, tmp_path, max_shard_bytes=before)
    with monkeypatch.context() as patch:
        failing = Failing(call, after, number, patch)
        told: StoreError | None = None
        try:
            tieroff.save_weights(new, tmp_path, max_shard_bytes=now)
        except StoreError as error:
            told = error
    if told is None:
        assert not failing.has_failed
        assert_holds(tmp_path, new)
        return
    assert (told.errno, failing.has_failed) == (number, True)
    assert str(tmp_path) in str(told) and os.strerror(number) in str(told)
    if "is in place" in str(told):  # all but the folder's last sync was done
        found = build(99)
        tieroff.load_weights(found, tmp_path)
        expected = old if before == SINGLE and now == SHARDED else new
        assert torch.equal(found.get_parameter("0.weight"), expected.get_parameter("0.weight"))
    else:
        assert_holds(tmp_path, old)
    tieroff.save_weights(new, tmp_path, max_shard_bytes=now)  # and the next one, on a drive that works, is as any other
    assert_holds(tmp_path, new)


@pytest.mark.parametrize("before", [SHARDED, SINGLE])
@pytest.mark.parametrize("now", [SHARDED, SINGLE])
def test_a_save_replaces_what_an_earlier_one_wrote(before: str, now: str, tmp_path: Path) -> None:
    tieroff.save_weights(build(1), tmp_path, max_shard_bytes=before)
    written = tieroff.save_weights(build(2), tmp_path, max_shard_bytes=now)
    assert set(written) == set(tmp_path.iterdir())
    assert_holds(tmp_path, build(2))


def test_files_of_other_origin_are_never_removed(tmp_path: Path) -> None:
    import safetensors.torch

    safetensors.torch.save_model(build(1), str(tmp_path / WEIGHTS_FILE))
    with pytest.raises(CheckpointError, match="other origin"):
        tieroff.save_weights(build(2), tmp_path, max_shard_bytes=SHARDED)
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_FILE]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / INDEX_FILE).write_text('{"metadata": {"total_size": 3}, "weight_map": {"a": "notes.txt"}}')
    tieroff.save_weights(build(2), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {WEIGHTS_FILE, INDEX_FILE, "notes.txt"}


def test_an_index_that_claims_to_be_ours_removes_nothing_outside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "precious.txt").write_text("mine")
    (folder / INDEX_FILE).write_text('{"metadata": {"writer": "tieroff"}, "weight_map": {"a": "../precious.txt"}}')
    tieroff.save_weights(build(2), folder)
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_a_process_killed_in_mid_save_leaves_the_old_checkpoint_whole_and_the_next_save_clears_up(
    tmp_path: Path, project: Path
) -> None:
    tieroff.save_weights(build(1), tmp_path, max_shard_bytes=SHARDED)
    program = f"""
    import os, signal, tieroff
    from tests.fault.test_checkpoint_saves import SHARDED, build
    written = []
    def die(done, total):
        if done > total // 2:
            os.kill(os.getpid(), signal.SIGKILL)
    tieroff.save_weights(build(2), {str(tmp_path)!r}, max_shard_bytes=SHARDED, on_progress=die)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=project, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = build(99)
    tieroff.load_weights(found, tmp_path)
    assert torch.equal(found.get_parameter("0.weight"), build(1).get_parameter("0.weight"))
    left = list(tmp_path.glob(".*.part"))
    assert left
    seen: list[bool] = []

    def save_beside(done: int, total: int) -> None:
        """Another save of the same folder, in the middle of this one."""
        if not seen:
            seen.append(True)
            tieroff.save_weights(build(3), tmp_path, max_shard_bytes=SHARDED)

    (tmp_path / ".mine.part").write_text("not of a save")
    tieroff.save_weights(build(4), tmp_path, max_shard_bytes=SHARDED, on_progress=save_beside)
    tieroff.load_weights(found, tmp_path)
    assert torch.equal(found.get_parameter("0.weight"), build(4).get_parameter("0.weight"))
    assert list(tmp_path.glob(".*.part")) == [tmp_path / ".mine.part"]


def test_a_wrapped_model_goes_on_after_a_save_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = build(1), build(1)
    (tmp_path / "drive").mkdir()
    tieroff.wrap(
        model,
        config={
            "device": "cpu",
            "budget": {"device": "1GiB", "host": 0, "nvme": "8MiB"},
            "nvme": {"dirs": [str(tmp_path / "drive")]},
            "plan": {"policy": "floor", "min_bytes": 0, "machine": str(machine_file(tmp_path))},
        },
    )
    with monkeypatch.context() as patch, pytest.raises(StoreError):
        Failing("write", 3, errno.ENOSPC, patch)
        tieroff.save_weights(model, tmp_path / "saved", max_shard_bytes=SHARDED)
    x = torch.randn(4, 16)
    assert torch.equal(model(x), plain(x))
    tieroff.unwrap(model)


@pytest.mark.parametrize("size", [0, -1, "much"])
def test_a_size_of_shards_that_makes_no_sense_is_refused(size: int | str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        tieroff.save_weights(build(1), tmp_path / "saved", max_shard_bytes=size)
    assert not (tmp_path / "saved").exists()


def test_a_folder_that_is_a_file_or_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=str(path)):
            tieroff.save_weights(build(1), path)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(CheckpointError, match=r"_extra_state.*torch\.save"):
        tieroff.save_weights(Extra(2, 2), tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"complex128.*torch\.save"):
        tieroff.save_weights(nn.Linear(2, 2, dtype=torch.complex128), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
