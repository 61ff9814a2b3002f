"""A folder in which somebody else is at work: what could lead bytes astray is refused, and its reason is told."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tieroff.errors import ConfigError, StoreError
from tieroff.storage.engines import Engine, available, choose
from tieroff.storage.nvme import files
from tieroff.storage.nvme.file_store import FileStore, Room

MIB = 2**20
TOKEN = "0123456789abcdef0123456789abcdef"
FOLDER = f".tieroff-{TOKEN}"


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = choose(available()[0])
    yield engine
    engine.close()


def without_tmpfile(path: str, flags: int, mode: int, *, dir_fd: int) -> int:
    """Opens as a file system without nameless files does."""
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "refused")
    return os.open(path, flags, mode, dir_fd=dir_fd)


@pytest.fixture
def known_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody guessed the name that is drawn at random."""
    monkeypatch.setattr("secrets.token_hex", lambda _size: TOKEN)


def give_name(fd: int, path: Path) -> int:
    """Tries to link an open file under a name, as anybody with the descriptor may; returns the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    here, follow_links = -100, 0x400
    result = libc.linkat(here, f"/proc/self/fd/{fd}".encode(), here, os.fsencode(path), follow_links)
    return ctypes.get_errno() if result else 0


def descriptor_count() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("where", ["last", "middle", "first", "last/", "relative", "dots"])
def test_symbolic_link_anywhere_on_the_way_is_refused(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    (tmp_path / "real" / "data").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "alias").symlink_to(tmp_path / "real" / "data")
    monkeypatch.chdir(tmp_path)
    path, step = {
        "last": (f"{tmp_path}/real/alias", f"{tmp_path}/real/alias"),
        "last/": (f"{tmp_path}/real/alias/", f"{tmp_path}/real/alias"),
        "middle": (f"{tmp_path}/link/data", f"{tmp_path}/link"),
        "first": ("/proc/self/cwd/real", "/proc/self"),
        "relative": ("link/data", "./link"),
        "dots": ("real/../link/./data", "./real/../link"),
    }[where]
    before = descriptor_count()
    with pytest.raises(ConfigError, match="a symbolic link leads there") as caught:
        FileStore([path], MIB, engine)
    assert f"{step} to " in str(caught.value)
    assert descriptor_count() == before
    FileStore(["real/../real/./data//"], MIB, engine).close()


def test_folder_that_anybody_may_write_to_is_refused(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"everybody may write to, without the sticky bit: chmod \+t"):
        FileStore([folder], MIB, engine)
    folder.chmod(0o1777)
    FileStore([folder], MIB, engine).close()


@pytest.mark.parametrize("planted", ["file", "folder", "link", "dangling link"])
@pytest.mark.usefixtures("known_names")
def test_something_planted_at_our_name_is_refused_and_stays(engine: Engine, tmp_path: Path, planted: str) -> None:
    nvme, elsewhere = tmp_path / "nvme", tmp_path / "elsewhere"
    nvme.mkdir()
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("kept")
    name = nvme / FOLDER
    if planted == "file":
        name.write_text("kept")
    elif planted == "folder":
        name.mkdir(0o700)
    else:
        name.symlink_to(elsewhere if planted == "link" else tmp_path / "nowhere")
    before = descriptor_count()
    with pytest.raises(StoreError, match=r"others write into this\s+directory") as caught:
        FileStore([nvme], MIB, engine, room=Room(opener=without_tmpfile))
    assert caught.value.errno == errno.EEXIST
    assert os.listdir(nvme) == [FOLDER]
    assert os.listdir(elsewhere) == ["precious"]
    assert planted != "file" or name.read_text() == "kept"
    assert descriptor_count() == before


@pytest.mark.parametrize("planted", ["file", "link"])
@pytest.mark.usefixtures("known_names")
def test_something_planted_inside_our_folder_is_refused_and_stays(engine: Engine, tmp_path: Path, planted: str) -> None:
    nvme, victim = tmp_path / "nvme", tmp_path / "victim"
    nvme.mkdir()
    victim.write_text("kept")

    def opener(path: str, flags: int, mode: int, *, dir_fd: int) -> int:
        if path == "data" and planted == "file":
            (nvme / FOLDER / "data").write_text("kept")
        elif path == "data":
            (nvme / FOLDER / "data").symlink_to(victim)
        return without_tmpfile(path, flags, mode, dir_fd=dir_fd)

    before = descriptor_count()
    with pytest.raises(StoreError, match="others write into this directory") as caught:
        FileStore([nvme], MIB, engine, room=Room(opener=opener))
    assert caught.value.errno == errno.EEXIST
    assert (nvme / FOLDER / "data").read_text() == "kept"
    assert victim.read_text() == "kept"
    assert descriptor_count() == before


def test_folder_that_was_exchanged_for_an_open_one_is_refused(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def exchanged(name: str, _mode: int, *, dir_fd: int) -> None:
        make(name, 0o700, dir_fd=dir_fd)
        os.rmdir(name, dir_fd=dir_fd)
        make(name, 0o700, dir_fd=dir_fd)
        os.chmod(name, 0o777, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", exchanged)
    with pytest.raises(StoreError, match="others write into this directory"):
        FileStore([tmp_path], MIB, engine, room=Room(opener=without_tmpfile))
    monkeypatch.undo()
    (left,) = tmp_path.iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o777  # not ours, so not removed


@pytest.mark.parametrize("found", ["named", "filled", "fifo"])
def test_opened_file_that_others_may_reach_is_refused(engine: Engine, tmp_path: Path, found: str) -> None:
    nvme, other = tmp_path / "nvme", tmp_path / "other"
    nvme.mkdir()
    if found == "fifo":
        os.mkfifo(other)
    else:
        other.write_text("kept")

    def opener(_path: str, _flags: int, _mode: int, *, dir_fd: int) -> int:
        fd = os.open(other, os.O_RDWR | os.O_NONBLOCK)
        if found == "filled":
            other.rename(tmp_path / "gone")
            (tmp_path / "gone").unlink()
        return fd

    before = descriptor_count()
    with pytest.raises(StoreError, match=r"others can reach a file .*: a file of user"):
        FileStore([nvme], MIB, engine, room=Room(opener=opener))
    assert descriptor_count() == before
    assert found != "named" or other.read_text() == "kept"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_data_is_readable_by_its_owner_alone(engine: Engine, tmp_path: Path, umask: int, has_tmpfile: bool) -> None:
    folder_modes: list[int] = []

    def opener(path: str, flags: int, mode: int, *, dir_fd: int) -> int:
        open_file: Any = os.open if has_tmpfile else without_tmpfile
        if path == "data":
            folder_modes.append(stat.S_IMODE(os.fstat(dir_fd).st_mode))
        return int(open_file(path, flags, mode, dir_fd=dir_fd))

    previous = os.umask(umask)
    try:
        store = FileStore([tmp_path], MIB, engine, room=Room(opener=opener))
    finally:
        os.umask(previous)
    status = os.fstat(store.files[0].fd)
    assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_nlink) == (0o600, os.geteuid(), 0)
    assert all(mode & 0o077 == 0 for mode in folder_modes)
    assert bool(folder_modes) is not has_tmpfile
    assert os.listdir(tmp_path) == []
    assert give_name(store.files[0].fd, tmp_path / "name") == errno.ENOENT
    store.close()


def test_folder_that_is_removed_is_told_to_the_next_store_only(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    store = FileStore([folder], 8 * MIB, engine, room=Room(grow_bytes=MIB))
    folder.rmdir()
    home = store.home(4 * MIB)  # grows the file
    memoryview(home).cast("B")[-1] = 7
    home.trim()
    assert memoryview(home).cast("B")[-1] == 7
    with pytest.raises(ConfigError, match="does not exist"):
        FileStore([folder], MIB, engine)
    store.close()


def test_directory_descriptor_is_the_one_that_was_checked(engine: Engine, tmp_path: Path) -> None:
    """Exchanging the directory for a link after the check leads nowhere: the file is made through the descriptor."""
    folder, aside = tmp_path / "nvme", tmp_path / "aside"
    folder.mkdir()
    fd = files.open_directory(str(folder))
    folder.rename(aside)
    folder.symlink_to("/")
    names: list[str] = []

    def opener(path: str, flags: int, mode: int, *, dir_fd: int) -> int:
        names.append(os.readlink(f"/proc/self/fd/{dir_fd}"))
        return os.open(path, flags, mode, dir_fd=dir_fd)

    file = files.open_nameless(str(folder), fd, is_direct=True, opener=opener)
    assert names == [str(aside)]
    os.close(file.fd)
    os.close(fd)
