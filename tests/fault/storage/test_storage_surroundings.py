"""What a process meets outside itself: a drive that is really full, other runs, a file that shrinks, a killed neighbour."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tieroff.errors import StoreError
from tieroff.storage.engines import available, choose
from tieroff.storage.nvme.file_store import FileStore, Room

MIB = 2**20

PRELUDE = """
import ctypes, errno, os, sys
from tieroff.errors import ConfigError, StoreError
from tieroff.storage import buffers
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore, Room
MIB = 2**20
folder, name = sys.argv[1:3]
engine = choose(name)
source, target = buffers.allocate(MIB), buffers.allocate(MIB)
source[:] = os.urandom(MIB)

def check(store, block):
    target[:] = bytes(MIB)
    store.read(block, target.address, target).wait(60)
    assert target[:] == source[:]
"""


def start(script: str, project: Path, *arguments: str, through: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*through, sys.executable, "-W", "ignore", "-c", PRELUDE + script, *arguments],
        env={**os.environ, "PYTHONPATH": str(project)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, project: Path, *arguments: str, through: tuple[str, ...] = ()) -> tuple[int, str, str]:
    process = start(script, project, *arguments, through=through)
    out, errors = process.communicate(timeout=120)
    return process.returncode, out.strip(), errors


FULL = """
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=8m") == 0, os.strerror(ctypes.get_errno())
said = []
try:
    FileStore([folder], 16 * MIB, engine, room=Room(min_free_bytes=0))
except ConfigError as error:
    said.append("too small" if "are needed" in str(error) else str(error))

store = FileStore([folder], 7 * MIB, engine, "always", room=Room(min_free_bytes=0, grow_bytes=MIB))
blocks = [store.allocate(MIB) for _ in range(3)]
homes = [store.home(MIB)]
with open(folder + "/other", "wb", 0) as other:  # somebody else fills the drive to the last byte
    try:
        while other.write(bytes(4096)):
            pass
    except OSError as error:
        assert error.errno == errno.ENOSPC
try:
    store.allocate(MIB)
except StoreError as error:
    said.append("full" if error.errno == errno.ENOSPC and folder in str(error) else str(error))
for block in blocks:  # what was reserved is there, in files and behind pages that nobody has touched yet
    store.write(block, source.address, source).wait(60)
    check(store, block)
ctypes.memset(homes[0].address, 7, MIB)
homes[0].trim()
said.append("kept" if bytes(memoryview(homes[0]).cast("B")) == bytes([7]) * MIB else "lost")
os.unlink(folder + "/other")
block = store.allocate(MIB)
store.write(block, source.address, source).wait(60)
check(store, block)
homes.clear()
store.close(); engine.close()
print(*said, sep=", ")
"""


@pytest.fixture(scope="module")
def namespace() -> tuple[str, ...]:
    """What starts a command that may mount; skips where the kernel does not allow that to anybody."""
    if shutil.which("unshare") is None:
        pytest.skip("util-linux' unshare is not installed")
    refusal = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, text=True).stderr
    if refusal:
        pytest.skip(f"no user namespace: {refusal.strip()}")
    return ("unshare", "-Urm")


@pytest.mark.parametrize("name", available())
def test_drive_that_fills_up_is_told_and_keeps_what_was_reserved(
    tmp_path: Path, project: Path, namespace: tuple[str, ...], name: str
) -> None:
    code, out, errors = run(FULL, project, str(tmp_path), name, through=namespace)
    assert (code, out) == (0, "too small, full, kept"), errors


OVERLAY = """
libc = ctypes.CDLL(None, use_errno=True)
for part in ("lower", "upper", "work", "merged"):
    os.mkdir(f"{folder}/{part}")
layers = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work,userxattr"
if libc.mount(b"overlay", f"{folder}/merged".encode(), b"overlay", 0, layers.encode()) != 0:
    sys.exit("no overlay: " + os.strerror(ctypes.get_errno()))
store = FileStore([f"{folder}/merged"], 16 * MIB, engine, "always", room=Room(grow_bytes=MIB))
block, home = store.allocate(MIB), store.home(MIB)
for _ in range(3):
    source[:] = os.urandom(MIB)
    store.write(block, source.address, source).wait(60)
    check(store, block)
    home.write(source.address, source).wait(60)
    home.publish()
    home.trim()
    assert bytes(memoryview(home).cast("B")) == source[:]
del home
store.close(); engine.close()
print(os.listdir(f"{folder}/merged"), os.listdir(f"{folder}/upper"))
"""


@pytest.mark.parametrize("name", available())
def test_a_folder_of_a_container_is_a_drive_like_any(
    tmp_path: Path, project: Path, namespace: tuple[str, ...], name: str
) -> None:
    """What a container's own file system is made of: an overlay, whose files lie in another one."""
    code, out, errors = run(OVERLAY, project, str(tmp_path), name, through=namespace)
    if "no overlay: " in errors:
        pytest.skip(errors.strip().splitlines()[-1])
    assert (code, out) == (0, "[] []"), errors


BESIDE = """
store = FileStore([folder], 16 * MIB, engine, "always", room=Room(grow_bytes=MIB))
blocks = [store.allocate(MIB) for _ in range(8)]
home = store.home(MIB)
home.write(source.address, source).wait(60)
home.publish()
print("ready", flush=True)
for line in sys.stdin:
    for block in blocks:
        store.write(block, source.address, source)
    for block in blocks:
        block.written.wait(60)
        check(store, block)
    assert bytes(memoryview(home).cast("B")) == source[:]
    print("same", os.listdir(folder), flush=True)
del home
store.close(); engine.close()
"""


@pytest.mark.parametrize("name", available())
def test_two_runs_in_one_directory_never_touch_each_other(tmp_path: Path, project: Path, name: str) -> None:
    processes = [start(BESIDE, project, str(tmp_path), name) for _ in range(2)]
    first, second = processes
    try:
        for process in processes:
            assert ask(process, "") == "ready", process.communicate(timeout=60)[1]
        for _ in range(3):
            for process in processes:
                assert ask(process, "go\n") == "same []", process.communicate(timeout=60)[1]
        first.stdin.write("go\n")  # type: ignore[union-attr]
        first.stdin.flush()  # type: ignore[union-attr]
        first.send_signal(signal.SIGKILL)  # in the middle of its writes, or nearly so
        first.wait(60)
        assert ask(second, "go\n") == "same []", second.communicate(timeout=60)[1]
        _, errors = second.communicate(timeout=60)
        assert second.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert os.listdir(tmp_path) == []


def ask(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    if line:
        process.stdin.write(line)
        process.stdin.flush()
    return process.stdout.readline().strip()


MAPPINGS = """
import ctypes
from tieroff.storage.memory import Mapping
store = FileStore([folder], 16 * MIB, engine, room=Room(grow_bytes=MIB))
kept = [store.home(4096), store.allocate(4096)]
homes = [(store.home(4096), store.allocate(4096)) for _ in range(64)]  # no two beside each other in the file
libc = ctypes.CDLL(None)
others = Mapping(int(open("/proc/sys/vm/max_map_count").read()) * 8192, is_reserved=True)
page = others.address
while libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(4096), 1) == 0:
    page += 8192
try:
    while True:
        homes.append((store.home(4096), store.allocate(4096)))
except StoreError as error:
    text = str(error)
mappings = lambda: sum(1 for _ in open("/proc/self/maps"))
before, count = store.used_bytes, mappings()
for home, block in homes:
    store.free(block)
del homes, home, block
used, block = store.used_bytes, store.allocate(4096)
store.free(block)
is_free = before > used == 8192 and mappings() < count - 64
del others
again = [store.home(4096) for _ in range(128)]
again[-1].write(source.address, source).wait(60)
again[-1].publish()
print("vm.max_map_count" in text, is_free, bytes(memoryview(again[-1]).cast("B")) == source[:4096])
store.free(kept[1])
store.close()
engine.close()
"""


@pytest.mark.skipif(
    int(Path("/proc/sys/vm/max_map_count").read_text()) > 2**17, reason="to reach the limit takes too long here"
)
def test_as_many_mappings_as_the_kernel_allows_are_told_and_nothing_is_lost(tmp_path: Path, project: Path) -> None:
    """Each home is one. There the kernel refuses every new one, also in the place of one that is to go."""
    assert run(MAPPINGS, project, str(tmp_path), available()[0]) == (0, "True True True", "")


SHRUNK = """
store = FileStore([folder], 16 * MIB, engine, "always", room=Room(grow_bytes=MIB))
homes = [store.home(MIB) for _ in range(2)]
for home in homes:
    home.write(source.address, source).wait(60)
    home.publish()
    home.trim()
os.ftruncate(store.files[0].fd, 0)  # the pages behind the mapping are gone, as where a drive cannot give them
try:
    homes[0].read(target.address, target).wait(60)
except StoreError as error:
    print(errno.errorcode[error.errno], folder in str(error), flush=True)
print(bytes(memoryview(homes[1]).cast("B")) == source[:], flush=True)
"""


@pytest.mark.parametrize("name", available())
def test_page_that_the_drive_cannot_give_ends_the_process(tmp_path: Path, project: Path, name: str) -> None:
    """The engine's read is told; code that touches the mapping itself gets SIGBUS, so it never computes with other bytes."""
    code, out, _errors = run(SHRUNK, project, str(tmp_path), name)
    assert out == "EIO True"
    assert code == -signal.SIGBUS
    assert os.listdir(tmp_path) == []


def test_changed_pages_that_the_drive_does_not_take_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_range: int) -> None:
        raise OSError(errno.EIO, "injected")

    engine = choose(available()[0])
    store = FileStore([tmp_path], 4 * MIB, engine, room=Room(grow_bytes=MIB))
    home: Any = store.home(MIB)
    memoryview(home).cast("B")[:] = b"\7" * MIB
    with monkeypatch.context() as patched:
        patched.setattr("tieroff.storage.nvme.file_store.write_back", refuse)
        with pytest.raises(StoreError, match=f"write back {MIB} bytes of {tmp_path} at offset 0") as caught:
            home.trim()
    assert caught.value.errno == errno.EIO
    assert bytes(memoryview(home).cast("B")) == b"\7" * MIB
    del home
    store.close()
    engine.close()
