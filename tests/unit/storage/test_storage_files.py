"""The file store: directories, nameless files, bytes on the drive, homes."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import random
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.injector import Injector
from tieroff.errors import ConfigError, StateError, StoreError
from tieroff.storage import buffers
from tieroff.storage.nvme import files
from tieroff.storage.nvme.file_home import FileHome
from tieroff.storage.nvme.file_store import FileStore, Room
from tieroff.storage.nvme.shares import share_out

native_engine = pytest.importorskip("tieroff.storage.engines.native")

MIB = 2**20


@pytest.fixture
def engine() -> Iterator[Any]:
    engine = native_engine.NativeEngine()
    yield engine
    engine.close()


@pytest.fixture
def store(engine: Any, tmp_path: Path) -> Iterator[FileStore]:
    store = FileStore([tmp_path], 32 * MIB, engine, checksum="always", room=Room(grow_bytes=MIB))
    yield store
    store.close()


def filled(size_bytes: int, seed: int) -> buffers.Buffer:
    buffer = buffers.allocate(size_bytes)
    buffer[:size_bytes] = random.Random(seed).randbytes(size_bytes)
    return buffer


def on_drive(store: FileStore, area: int, offset: int, size_bytes: int) -> bytes:
    """Reads the file by other means than the engine: buffered, through a descriptor of its own."""
    fd = os.open(f"/proc/self/fd/{store.files[area].fd}", os.O_RDONLY)
    try:
        return os.pread(fd, size_bytes, offset)
    finally:
        os.close(fd)


@pytest.mark.parametrize("shift", [0, 1])
def test_file_holds_the_bytes_and_zeroed_padding(store: FileStore, shift: int) -> None:
    size = 3 * MIB + 100
    old, new = filled(4 * MIB, 1), filled(4 * MIB, 2)
    block = store.allocate(size)
    for source in (old, new):
        store.write(block, source.address + shift, source).wait(30)
        padded = on_drive(store, block.area, block.offset, block.extent_bytes)
        assert padded[:size] == source[shift : size + shift]
        assert padded[size:] == bytes(block.extent_bytes - size)


def test_file_has_no_name_and_mode_0600(store: FileStore, tmp_path: Path) -> None:
    status = os.fstat(store.files[0].fd)
    assert os.listdir(tmp_path) == []
    assert status.st_nlink == 0
    assert stat.S_IMODE(status.st_mode) == 0o600


@pytest.mark.parametrize("refused", [os.O_TMPFILE, os.O_DIRECT, os.O_TMPFILE | os.O_DIRECT])
def test_file_is_made_another_way_where_flags_are_refused(engine: Any, tmp_path: Path, refused: int) -> None:
    def opener(path: str, flags: int, mode: int, *, dir_fd: int) -> int:
        without_directory = refused & ~os.O_DIRECTORY  # O_TMPFILE includes it
        if flags & without_directory:
            raise OSError(errno.EINVAL if refused & os.O_DIRECT else errno.EOPNOTSUPP, "refused")
        return os.open(path, flags, mode, dir_fd=dir_fd)

    store = FileStore([tmp_path], MIB, engine, room=Room(opener=opener))
    assert store.is_direct is not bool(refused & os.O_DIRECT)
    assert os.listdir(tmp_path) == []
    source, target = filled(5000, 1), buffers.allocate(5000)
    block = store.allocate(5000)
    store.write(block, source.address + 1, source).wait(30)
    store.read(block, target.address, target).wait(30)
    assert target[:4999] == source[1:5000]
    store.close()


def test_open_error_names_the_directory_and_leaves_nothing(engine: Any, tmp_path: Path) -> None:
    def opener(*_args: Any, **_flags: Any) -> int:
        raise OSError(errno.EROFS, "injected")

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match=str(tmp_path)) as caught:
        FileStore([tmp_path], MIB, engine, room=Room(opener=opener))
    assert caught.value.errno == errno.EROFS
    assert len(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_a_process_without_descriptors_leaves_no_folder(tmp_path: Path) -> None:
    """Where files have a name for a moment, the folder around it is made first, and then there is no descriptor for it."""

    def refuse(*_arguments: Any, **_options: Any) -> int:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    directory, limits = files.open_directory(str(tmp_path)), resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [directory]
    resource.setrlimit(resource.RLIMIT_NOFILE, (directory + 8, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.dup(directory))
        with pytest.raises(StoreError, match="Too many open files") as caught:
            files.open_nameless(str(tmp_path), directory, is_direct=False, opener=refuse)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
    assert caught.value.errno == errno.EMFILE
    assert list(tmp_path.iterdir()) == []


def test_directory_is_checked(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    cases = {"missing": "does not exist", "file": "is not a directory; name", "link": "symbolic link", "open": "sticky bit"}
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            FileStore([tmp_path / name], MIB, engine)
    with pytest.raises(ConfigError, match="symbolic link"):
        FileStore([f"{tmp_path}/link/"], MIB, engine)
    (tmp_path / "open").chmod(0o1777)
    FileStore([tmp_path / "open"], MIB, engine).close()


def test_directory_without_room_is_refused_before_any_file(engine: Any, tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    free = space.f_bavail * space.f_frsize
    with pytest.raises(ConfigError, match="are needed"):
        FileStore([tmp_path], free * 2, engine)
    halves = [tmp_path / "a", tmp_path / "b"]
    for path in halves:
        path.mkdir()
    with pytest.raises(ConfigError, match="are needed"):  # each half alone would fit: they share one drive
        FileStore(halves, int(free * 1.5), engine)


def test_two_stores_in_one_directory_keep_apart(engine: Any, tmp_path: Path) -> None:
    stores = [FileStore([tmp_path], MIB, engine) for _ in range(2)]
    sources = [filled(8192, seed) for seed in range(2)]
    blocks = [store.allocate(8192) for store in stores]
    for store, block, source in zip(stores, blocks, sources, strict=True):
        store.write(block, source.address, source).wait(30)
    stores[0].close()
    target = buffers.allocate(8192)
    stores[1].read(blocks[1], target.address, target).wait(30)
    assert target[:] == sources[1][:]
    stores[1].close()


def test_extents_are_spread_over_directories(engine: Any, tmp_path: Path) -> None:
    dirs = [tmp_path / str(index) for index in range(3)]
    for path in dirs:
        path.mkdir()
    store = FileStore(dirs, 12 * MIB, engine, room=Room(grow_bytes=MIB))
    areas = [store.allocate(MIB).area for _ in range(12)]
    assert [areas.count(index) for index in range(3)] == [4, 4, 4]
    store.close()


def folders(tmp_path: Path, count: int) -> list[Path]:
    dirs = [tmp_path / str(index) for index in range(count)]
    for path in dirs:
        path.mkdir()
    return dirs


def test_extents_are_spread_by_write_speed(engine: Any, tmp_path: Path) -> None:
    dirs = folders(tmp_path, 3)
    store = FileStore(dirs, 12 * MIB, engine, write_bytes_per_s=[3e9, 1e9, 2e9], room=Room(grow_bytes=MIB))
    blocks = [store.allocate(MIB) for _ in range(12)]
    areas = [block.area for block in blocks]
    assert [areas[:6].count(index) for index in range(3)] == [3, 1, 2]  # from the first on, not only in the end
    assert [areas.count(index) for index in range(3)] == [6, 2, 4]
    for block in blocks:
        store.free(block)
    store.reserve(12 * MIB)
    assert [os.fstat(file.fd).st_size for file in store.files] == [6 * MIB, 2 * MIB, 4 * MIB]
    store.close()


def test_drive_with_too_little_room_takes_less_and_the_others_more(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dirs = folders(tmp_path, 3)
    monkeypatch.setattr("tieroff.storage.nvme.files.rooms", lambda _fds, _free: [2 * MIB, 64 * MIB, 64 * MIB])
    store = FileStore(dirs, 12 * MIB, engine, write_bytes_per_s=[3e9, 1e9, 1e9], room=Room(grow_bytes=MIB))
    areas = [store.allocate(MIB).area for _ in range(12)]
    assert [areas.count(index) for index in range(3)] == [2, 5, 5]
    with pytest.raises(StoreError):
        store.allocate(MIB)
    store.close()


@pytest.mark.parametrize(
    ("capacity", "speeds", "limits", "expected"),
    [
        (100, [1, 1], [1000, 1000], [50, 50]),
        (100, [3, 1], [1000, 1000], [75, 25]),
        (100, [3, 1], [60, 1000], [60, 40]),
        (100, [8, 1, 1], [10, 30, 1000], [10, 30, 60]),
        (100, [1, 1], [30, 40], [30, 40]),
        (100, [1, 1], [0, 1000], [0, 100]),
        (7, [1, 1, 1], [9, 9, 9], [2, 2, 3]),
    ],
)
def test_shares_follow_speed_as_far_as_there_is_room(
    capacity: int, speeds: list[float], limits: list[int], expected: list[int]
) -> None:
    assert share_out(capacity, speeds, limits) == expected


@pytest.mark.parametrize("speeds", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")]])
def test_speed_that_is_missing_is_refused(engine: Any, tmp_path: Path, speeds: list[float]) -> None:
    with pytest.raises(ConfigError, match="write speed above 0"):
        FileStore(folders(tmp_path, 2), MIB, engine, write_bytes_per_s=speeds)


def test_reserve_allocates_on_the_drive(store: FileStore) -> None:
    store.reserve(8 * MIB)
    assert store.reserved_bytes == 8 * MIB
    assert os.fstat(store.files[0].fd).st_blocks * 512 >= 8 * MIB
    with pytest.raises(StateError, match="at most"):
        store.reserve(33 * MIB)


def test_checksum_finds_a_flipped_bit_on_the_drive(store: FileStore) -> None:
    source, target = filled(2 * MIB, 1), buffers.allocate(2 * MIB)
    block = store.allocate(2 * MIB)
    store.write(block, source.address, source).wait(30)
    flipped = bytearray(on_drive(store, 0, block.offset, 2 * MIB))
    flipped[MIB + 3] ^= 4
    fd = os.open(f"/proc/self/fd/{store.files[0].fd}", os.O_RDWR)
    os.pwrite(fd, flipped, block.offset)
    os.close(fd)
    with pytest.raises(StoreError, match="checksum 0x") as caught:
        store.read(block, target.address, target).wait(30)
    assert caught.value.errno == errno.EBADMSG
    assert caught.value.offset == block.offset


@pytest.mark.parametrize(("mode", "before", "after"), [("off", 0, 0), ("warmup", 1, 0), ("always", 1, 1)])
def test_checksum_mode_says_when_reads_are_compared(engine: Any, tmp_path: Path, mode: Any, before: int, after: int) -> None:
    store = FileStore([tmp_path], MIB, engine, checksum=mode)
    source, target = filled(8192, 1), buffers.allocate(8192)
    block = store.allocate(8192)

    def failures() -> int:
        store.write(block, source.address, source).wait(30)
        engine.native.inject("read", flip=True)
        try:
            store.read(block, target.address, target).wait(30)
        except StoreError:
            return 1
        return 0

    assert failures() == before
    store.end_warmup()
    assert failures() == after
    store.close()


def test_home_shows_the_old_value_until_publish(store: FileStore) -> None:
    home = store.home(MIB)
    view = memoryview(home).cast("B")
    view[:] = b"\1" * MIB
    source = filled(MIB, 2)
    write = home.write(source.address, source)
    write.wait(30)
    assert bytes(view) == b"\1" * MIB
    assert store.used_bytes == 2 * MIB
    home.publish()
    assert bytes(view) == source[:]
    assert store.used_bytes == MIB
    with pytest.raises(StateError, match=r"since the last publish"):
        home.publish()


def test_home_whose_publishing_was_interrupted_shows_what_is_read(store: FileStore) -> None:
    """The old value or the new one, to the engine and to user code the same."""
    injector, values, target = Injector(), [filled(8192, 1), filled(8192, 2)], buffers.allocate(8192)
    for at in itertools.count():
        home = store.home(8192)
        for value in values:
            home.write(value.address, value).wait(30)
            was_interrupted = injector.run(home.publish, at if value is values[1] else -1)
        store.repair()
        shown = bytes(memoryview(home).cast("B"))
        home.read(target.address, target).wait(30)
        assert shown == target[:8192], f"interrupted before line {at}: {injector.where}"
        assert shown in [bytes(value[:8192]) for value in values]
        del home
        assert store.used_bytes == 0
        if not was_interrupted:
            break
    assert at > 30


def test_home_is_never_written_directly_where_it_is_mapped(store: FileStore) -> None:
    home = store.home(MIB)
    assert isinstance(home, FileHome)
    for seed in range(5):
        source = filled(MIB, seed)
        shown = home.place.shown
        home.write(source.address, source).wait(30)
        assert home.place.shadow is not None
        assert (home.place.shadow.area, home.place.shadow.offset) != (shown.area, shown.offset)
        home.publish()


def test_home_on_a_reused_extent_with_dirty_pages_shows_the_new_value(store: FileStore) -> None:
    home = store.home(MIB)
    view = memoryview(home).cast("B")
    for seed in range(8):
        view[:] = bytes([255 - seed]) * MIB  # dirty pages of an extent that publish() frees and the next write() takes
        source = filled(MIB, seed)
        home.write(source.address, source).wait(30)
        home.publish()
        assert bytes(view) == source[:]
        assert on_drive(store, home.place.shown.area, home.place.shown.offset, MIB) == source[:]


def resident_bytes(address: int, size_bytes: int) -> int:
    """Bytes of a range that are in memory or in the page cache, by mincore."""
    pages = (ctypes.c_ubyte * (size_bytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert libc.mincore(address, size_bytes, pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_home_trim_drops_pages_and_page_cache(store: FileStore) -> None:
    home = store.home(4 * MIB)
    view = memoryview(home).cast("B")
    view[:] = filled(4 * MIB, 1)[:]
    assert resident_bytes(home.address, 4 * MIB) == 4 * MIB
    home.trim()
    assert resident_bytes(home.address, 4 * MIB) == 0
    assert bytes(view) == filled(4 * MIB, 1)[:]


def process_file_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Rss")


def test_page_returner_keeps_homes_from_staying_resident(store: FileStore) -> None:
    homes = [store.home(4 * MIB) for _ in range(4)]
    before = process_file_bytes()
    for seed, home in enumerate(homes):
        memoryview(home).cast("B")[:] = bytes([seed]) * (4 * MIB)
    assert process_file_bytes() - before > 12 * MIB
    store.return_pages(0.001)
    returner: Any = store.page_returner
    assert returner.wait_rounds(returner.round_count + 2, 30)
    assert returner.errno == 0
    assert process_file_bytes() - before < 4 * MIB
    store.return_pages(None)
    for seed, home in enumerate(homes):
        assert bytes(memoryview(home).cast("B")) == bytes([seed]) * (4 * MIB)


def test_pages_of_one_home_are_given_back_and_others_stay(store: FileStore) -> None:
    kept, given = store.home(4 * MIB), store.home(4 * MIB)
    for home in (kept, given):
        memoryview(home).cast("B")[:] = bytes([7]) * (4 * MIB)
    before = process_file_bytes()
    store.give_back(given.address, given.size_bytes)
    assert before - 5 * MIB < process_file_bytes() < before - 3 * MIB
    elsewhere = bytearray(b"own" * MIB)
    store.give_back(ctypes.addressof(ctypes.c_char.from_buffer(elsewhere)), len(elsewhere))
    assert elsewhere == b"own" * MIB
    for home in (kept, given):
        assert bytes(memoryview(home).cast("B")) == bytes([7]) * (4 * MIB)


def test_page_returner_may_run_during_transfers(store: FileStore) -> None:
    store.return_pages(0.0001)
    home = store.home(2 * MIB)
    view = memoryview(home).cast("B")
    target = buffers.allocate(2 * MIB)
    for seed in range(20):
        source = filled(2 * MIB, seed)
        home.write(source.address, source).wait(30)
        home.publish()
        view[4096 : 4096 + 9] = b"from user"
        home.read(target.address, target).wait(30)
        assert target[4096 : 4096 + 9] == b"from user"
        assert target[8192:] == source[8192:]


def permissions(address: int) -> str:
    """What may be done with memory at an address, as the system shows it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[1]
    return "unmapped"


def test_dead_home_is_mapped_no_more_before_its_extent_is_reused(store: FileStore) -> None:
    home = store.home(MIB)
    address = home.address
    assert permissions(address) == "rw-s"
    del home
    store.allocate(MIB)
    assert permissions(address) == "---p"


def test_address_space_of_dead_homes_is_used_again(store: FileStore) -> None:
    addresses = set()
    for _ in range(40):
        home = store.home(8 * MIB)
        memoryview(home).cast("B")[0] = 1
        addresses.add(home.address)
        del home
    assert len(addresses) < 40
    assert store.used_bytes == 0
