"""Faults of the drive in the middle of training, through the whole engine: the same numbers, or a StoreError and no loss."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import tieroff
from tests.fault.storage.faulty import FaultyEngine
from tests.support.twins import Setting, assert_same, equal, follow, look, mlp_and_adam, usual_step
from tieroff.core.tensor import Tier
from tieroff.errors import StateError, StoreError
from tieroff.runtime.backend import base as backends
from tieroff.runtime.items.homes import HomeItem
from tieroff.storage.engines import available, choose
from tieroff.storage.space import SpaceStore

STEPS = 6
HIT = 4  # a planned step
PAGE = 4096

pytestmark = pytest.mark.timeout(300)


class Trainer:
    """The same loop plain and wrapped, over an engine that can be made to fail."""

    def __init__(self, folder: Path, engine_name: str, monkeypatch: pytest.MonkeyPatch, *, delayed: bool = False) -> None:
        self.plain = follow(mlp_and_adam, usual_step, STEPS).seen
        self.setting = Setting(folder, nvme=True, delayed=delayed)
        self.engine: Any = None
        self._name = engine_name
        monkeypatch.setattr("tieroff.session.build.choose", self._choose)

    def _choose(self, _name: str, **_measured: str | None) -> FaultyEngine:
        self.engine = FaultyEngine(choose(self._name))
        return self.engine

    def wrap(self, *, host: int, nvme: int = 2**25) -> None:
        config = self.setting.config()
        config["budget"] |= {"host": host, "nvme": nvme}
        if not nvme:
            del config["nvme"]
        torch.manual_seed(0)
        self.model, self.optimizer = mlp_and_adam()
        tieroff.wrap(self.model, self.optimizer, config, backend=self.setting.backend())

    def run(self, steps: range, *, before: Callable[[int], None] = lambda index: None) -> list[dict[str, Any]]:
        seen = []
        for index in steps:
            before(index)
            torch.manual_seed(1000 + index)
            seen.append(look(self.model, self.optimizer, usual_step(self.model, self.optimizer, index)))
        return seen

    def try_step(self) -> tuple[list[dict[str, Any]], StoreError | None]:
        """Runs the step that may fail; the graph that it leaves is gone, as after a loop that ended with the error."""
        try:
            return self.run(range(HIT, HIT + 1)), None
        except StoreError as error:
            return [], error.with_traceback(None)

    def wrap_and_reach_hit(self) -> None:
        """Wraps over the drive alone and runs up to the step that is to be hit."""
        self.wrap(host=0)
        assert_same(self.plain[:HIT], self.run(range(HIT)))

    def assert_same_and_unwrap(self, step: list[dict[str, Any]]) -> None:
        """The step that might have failed did not, and shows what the plain loop shows."""
        assert_same(self.plain[HIT : HIT + 1], step)
        tieroff.unwrap(self.model)

    def assert_whole(self) -> None:
        """Every parameter and state has its value of before or after the step that failed, and no other."""
        tieroff.unwrap(self.model)
        now, before, after = look(self.model, self.optimizer), self.plain[HIT - 1], self.plain[HIT]
        for name, value in now.items():
            if name.startswith(("parameter", "buffer")):
                assert equal(value, before[name]) or equal(value, after[name]), name
            if name.startswith("state"):
                for part, tensor in value.items():
                    assert equal(tensor, before[name][part]) or equal(tensor, after[name][part]), (name, part)
        assert list(self.setting.dir.iterdir()) == []


@pytest.fixture(params=available())
def trainer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    return Trainer(tmp_path, request.param, monkeypatch)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_failed_writes_go_to_host_memory_while_it_has_room(
    trainer: Trainer, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.wrap(host=16 * PAGE)  # a plan fills 14 of them and sends the rest to the drive
    caplog.set_level(logging.WARNING, "tieroff")

    def fail(index: int) -> None:
        if index == HIT:
            trainer.engine.inject("write", "errno", errno=number, count=2)

    assert_same(trainer.plain, trainer.run(range(STEPS), before=fail))
    assert trainer.engine.hits == [("write", "errno")] * 2
    assert caplog.text.count("goes to host instead") == 2
    assert tieroff.engine(trainer.model).stats().phase == "planned"
    tieroff.unwrap(trainer.model)


def test_full_host_memory_is_nothing_to_warn_of_in_inference(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    """A plan that fills host memory has no room there for what it keeps on the device, which leaves in inference."""
    trainer.wrap(host=16 * PAGE)
    trainer.run(range(HIT))
    managed = tieroff.engine(trainer.model)._managed
    first, second, *_ = managed.executor.homes.parameters.values()
    caplog.set_level(logging.DEBUG, "tieroff")

    def find_no_room(item: HomeItem) -> None:
        item.tier = Tier.HOST
        assert managed.executor.traffic.spill.demote(item, StoreError("expected room, got none", errno=errno.ENOSPC))

    with torch.no_grad(), trainer.model.get_submodule("first").register_forward_hook(lambda *_: find_no_room(first)):
        trainer.model(torch.randn(4, 8))
    find_no_room(second)
    said = [record.levelno for record in caplog.records if "goes to nvme instead" in record.getMessage()]
    assert said == [logging.DEBUG, logging.WARNING]
    tieroff.unwrap(trainer.model)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize(("kind", "number"), [("errno", errno.EIO), ("errno", errno.ENOSPC), ("lost", errno.EBADMSG)])
def test_failed_write_without_room_elsewhere_raises_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delayed: bool, kind: Any, number: int
) -> None:
    """One write of the step after another fails, each in a run of its own."""
    trainer = Trainer(tmp_path, available()[0], monkeypatch, delayed=delayed)
    index = 0
    while True:
        trainer.wrap_and_reach_hit()
        trainer.engine.inject("write", kind, errno=number if kind == "errno" else 0, after=index)
        step, failure = trainer.try_step()
        if failure is not None:
            assert failure.errno == number
            assert str(trainer.setting.dir) in str(failure)
            trainer.assert_whole()
        else:
            trainer.assert_same_and_unwrap(step)
            if not trainer.engine.hits:
                break
        index += 3 if index > 6 else 1
    assert index > 12


@pytest.mark.parametrize("kind", ["errno", "flip", "misdirected"])
def test_failed_read_raises_or_is_mended_and_loses_nothing(trainer: Trainer, kind: Any) -> None:
    index = 0
    while True:
        trainer.wrap_and_reach_hit()
        trainer.engine.inject("read", kind, errno=errno.EIO if kind == "errno" else 0, after=index)
        step, failure = trainer.try_step()
        trainer.engine.clear()
        if failure is not None:
            assert failure.errno in (errno.EIO, errno.EBADMSG)
            trainer.assert_whole()
        else:
            trainer.assert_same_and_unwrap(step)
            if not trainer.engine.hits:
                break
        index += 4
    assert index > 12


def own_threads() -> set[str]:
    """Returns the ids of this process's threads that tieroff named."""
    tasks = Path("/proc/self/task")
    found = set()
    for task in os.listdir(tasks):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if (tasks / task / "comm").read_text().startswith("tieroff"):
                found.add(task)
    return found


def test_unwrap_that_cannot_read_a_value_ends_threads_and_files_all_the_same(trainer: Trainer) -> None:
    threads_before = own_threads()
    trainer.wrap(host=0)
    trainer.run(range(HIT))
    store = tieroff.engine(trainer.model).stores[Tier.NVME]
    trainer.engine.inject("read", "errno", errno=errno.EIO, count=0)
    with pytest.raises(StoreError) as caught:
        tieroff.unwrap(trainer.model)
    assert caught.value.errno == errno.EIO
    with pytest.raises(StateError, match="this store is closed"):
        store.allocate(1)
    assert own_threads() <= threads_before


def test_hang_raises_with_its_place_and_loses_nothing(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.wrap_and_reach_hit()
    monkeypatch.setattr(backends, "TRANSFER_TIMEOUT_S", 0.05)
    trainer.engine.inject("write", "hang", after=3)
    with pytest.raises(StoreError, match=r"write of \d+ bytes, .* at offset \d+: 0 bytes done: not ended") as caught:
        trainer.run(range(HIT, HIT + 1))
    assert caught.value.errno == errno.ETIMEDOUT
    assert caught.value.path == str(trainer.setting.dir)
    trainer.engine.release()
    trainer.assert_whole()


def test_folder_that_is_removed_underneath_changes_nothing(trainer: Trainer) -> None:
    trainer.wrap(host=0)

    def remove(index: int) -> None:
        if index == 2:
            trainer.setting.dir.rmdir()

    assert_same(trainer.plain, trainer.run(range(STEPS), before=remove))
    tieroff.unwrap(trainer.model)


def in_pieces(store: SpaceStore) -> None:
    """Takes what is free page by page and gives every second page back."""
    blocks = []
    while store.used_bytes < store.capacity_bytes:
        blocks.append(store.allocate(1))
    for block in blocks[1::2]:
        store.free(block)


@pytest.mark.parametrize("has_nvme", [True, False])
def test_host_memory_in_pieces(trainer: Trainer, has_nvme: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room in one piece goes to the drive; without one it is told, and nothing is lost."""
    monkeypatch.setattr("tests.support.twins.Mlp.__init__.__defaults__", (64,))
    monkeypatch.setattr("tests.support.twins.loss_of.__defaults__", (500, 64))
    trainer.plain = follow(mlp_and_adam, usual_step, STEPS).seen
    trainer.wrap(host=2**21, nvme=2**25 if has_nvme else 0)
    assert_same(trainer.plain[:HIT], trainer.run(range(HIT)))
    stores = tieroff.engine(trainer.model).stores
    host = stores[Tier.HOST]
    assert isinstance(host, SpaceStore)
    in_pieces(host)
    if has_nvme:
        assert_same(trainer.plain[HIT:], trainer.run(range(HIT, STEPS)))
        assert tieroff.engine(trainer.model).stats().moved_bytes["nvme_write"] > 0
        tieroff.unwrap(trainer.model)
        return
    with pytest.raises(StoreError, match=r"in pieces.*raise \[budget\] host, or name a folder") as caught:
        trainer.run(range(HIT, HIT + 1))
    assert caught.value.errno == errno.ENOSPC
    trainer.assert_whole()


def test_failed_unwrap_leaves_every_value_where_it_can_be_read(trainer: Trainer) -> None:
    trainer.wrap(host=0)
    trainer.run(range(HIT))
    trainer.engine.inject("read", "errno", errno=errno.EIO, count=0)
    with pytest.raises(StoreError, match=r"bringing .* back: read of"):
        tieroff.unwrap(trainer.model)
    now = look(trainer.model, trainer.optimizer)
    assert all(equal(value, trainer.plain[HIT - 1][name]) for name, value in now.items() if name != "out")
    assert_same(trainer.plain[HIT : HIT + 1], trainer.run(range(HIT, HIT + 1)))  # a plain loop on them goes on
