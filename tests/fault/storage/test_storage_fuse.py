"""A file system in user space, as of object stores: one that has all that a store asks for, and ones that refuse a part.

The file system is a process of the test's own, which speaks the kernel's protocol of FUSE and keeps files in memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tieroff.storage.engines import available

SERVER = '''
import ctypes, errno, os, stat, struct, sys

IN, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, OPEN, READ, WRITE, STATFS, RELEASE = (
    1, 2, 3, 4, 9, 10, 11, 14, 15, 16, 17, 18)
FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, CREATE, INTERRUPT, BATCH_FORGET, FALLOCATE, TMPFILE = (
    20, 25, 26, 27, 28, 29, 35, 36, 42, 43, 51)
MAX_WRITE = 128 * 1024

class Files:
    """Folders (node 1 is the root) and files, all in memory; names are by folder."""

    def __init__(self, refuses):
        self.refuses, self.nodes, self.names = refuses, {1: None}, {}

    def attributes(self, node):
        content = self.nodes[node]
        size = 0 if content is None else len(content)
        mode = stat.S_IFDIR | 0o700 if content is None else stat.S_IFREG | 0o600
        links = int(node == 1 or node in self.names.values())
        return struct.pack("<6Q10I", node, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)

    def entry(self, node):
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self.attributes(node)

    def opened(self, flags):
        if flags & os.O_DIRECT and "direct" in self.refuses:
            raise OSError(errno.EINVAL, "")
        return struct.pack("<QIi", 0, 0, 0)

    def make(self, name, content):
        node = 1 + len(self.nodes)
        self.nodes[node] = content
        if name is not None:
            self.names[name] = node
        return self.entry(node)

    def answer(self, op, node, body):
        if op == INIT:
            return struct.pack("<IIIIHHIIHHI7I", 7, 31, 0, 1 << 5 | 1 << 22, 16, 12, MAX_WRITE, 1, 32, 0, 0, *[0] * 7)
        if op == LOOKUP:
            name = node, body.rstrip(b"\\0")
            if name not in self.names:
                raise OSError(errno.ENOENT, "")
            return self.entry(self.names[name])
        if op == MKDIR:
            return self.make((node, body[8:].rstrip(b"\\0")), None)
        if op in (GETATTR, SETATTR):
            if op == SETATTR and struct.unpack_from("<I", body)[0] & 8:
                self.resize(node, struct.unpack_from("<Q", body, 16)[0])
            return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
        if op == CREATE:
            reply = self.opened(struct.unpack_from("<I", body)[0])
            return self.make((node, body[16:].rstrip(b"\\0")), bytearray()) + reply
        if op == TMPFILE and "nameless" not in self.refuses:
            reply = self.opened(struct.unpack_from("<I", body)[0])
            return self.make(None, bytearray()) + reply
        if op in (UNLINK, RMDIR):
            del self.names[node, body.rstrip(b"\\0")]
            return b""
        if op == OPEN:
            return self.opened(struct.unpack_from("<I", body)[0])
        if op == OPENDIR:
            return struct.pack("<QIi", 0, 0, 0)
        if op == READDIR:
            return b"" if struct.unpack_from("<Q", body, 8)[0] else self.listed(node)
        if op == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            return bytes(self.nodes[node][offset : offset + size])
        if op == WRITE:
            _, offset, size = struct.unpack_from("<QQI", body)
            if offset + size > len(self.nodes[node]):
                self.resize(node, offset + size)
            self.nodes[node][offset : offset + size] = body[40 : 40 + size]
            return struct.pack("<II", size, 0)
        if op == STATFS:
            return struct.pack("<5Q4I6I", 1 << 22, 1 << 22, 1 << 22, 1000, 1000, 4096, 255, 4096, 0, *[0] * 6)
        if op == FALLOCATE and "reserve" not in self.refuses:
            _, offset, length, mode = struct.unpack_from("<QQQI", body)
            if mode:
                raise OSError(errno.EOPNOTSUPP, "")
            if offset + length > len(self.nodes[node]):
                self.resize(node, offset + length)
            return b""
        if op in (RELEASE, RELEASEDIR, FLUSH, FSYNC):
            return b""
        raise OSError(errno.ENOSYS, "")

    def resize(self, node, size):
        content = self.nodes[node]
        if size < len(content):
            del content[size:]
        else:
            content.extend(bytes(size - len(content)))

    def listed(self, folder):
        out = b""
        for at, ((parent, name), node) in enumerate(self.names.items(), 1):
            if parent == folder:
                out += struct.pack("<QQII", node, at, len(name), 8) + name + bytes(-len(name) % 8)
        return out


def serve(device, files):
    while True:
        try:
            message = os.read(device, MAX_WRITE + 65536)
        except OSError as error:
            if error.errno == errno.ENODEV:  # unmounted
                return
            if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                continue
            raise
        length, op, unique, node, *_ = IN.unpack_from(message)
        if op in (FORGET, BATCH_FORGET, INTERRUPT):
            continue
        try:
            reply, number = files.answer(op, node, message[IN.size : length]), 0
        except OSError as error:
            reply, number = b"", -error.errno
        os.write(device, OUT.pack(OUT.size + len(reply), number, unique) + reply)


folder, name, refuses = sys.argv[1:4]
device = os.open("/dev/fuse", os.O_RDWR)
libc = ctypes.CDLL(None, use_errno=True)
options = f"fd={device},rootmode=40700,user_id=0,group_id=0"
if libc.mount(b"test", folder.encode(), b"fuse", 6, options.encode()) != 0:
    sys.exit("no FUSE: " + os.strerror(ctypes.get_errno()))
if os.fork() == 0:
    libc.prctl(1, 9)  # ends with the process that mounted
    serve(device, Files(refuses.split(",")))
    os._exit(0)
os.close(device)
'''

STORE = """
import errno, random
from tieroff.errors import ConfigError, StoreError
from tieroff.storage import buffers
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore, Room
MIB = 2**20
engine = choose(name)
try:
    store = FileStore([folder], 16 * MIB, engine, "always", room=Room(min_free_bytes=0, grow_bytes=MIB))
    source, target = buffers.allocate(MIB), buffers.allocate(MIB)
    block, homes = store.allocate(MIB), [store.home(MIB) for _ in range(3)]
    for round in range(3):
        source[:] = random.Random(round).randbytes(MIB)
        store.write(block, source.address, source).wait(60)
        store.read(block, target.address, target).wait(60)
        assert target[:] == source[:], "a block"
        for home in homes:
            home.write(source.address, source).wait(60)
            home.publish()
            home.trim()
            assert bytes(memoryview(home).cast("B")) == source[:], "a home by its mapping"
            view = memoryview(home).cast("B")
            view[:4] = b"user"  # as code that writes a parameter where it lies
            del view
            home.trim()
            home.read(target.address, target).wait(60)
            assert target[:] == b"user" + source[4:], "a home that was written through its mapping"
    homes.clear()
    del home
    store.free(block)
    store.close()
    print("right", os.listdir(folder))
except (ConfigError, StoreError) as error:
    assert folder in str(error), error
    print("refused:", error)
engine.close()
"""


@pytest.fixture(scope="module")
def namespace() -> tuple[str, ...]:
    if shutil.which("unshare") is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs util-linux' unshare and /dev/fuse")
    refusal = subprocess.run(["unshare", "-Urm", "true"], capture_output=True, text=True).stderr
    if refusal:
        pytest.skip(f"no user namespace: {refusal.strip()}")
    return ("unshare", "-Urm")


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize("refuses", ["nothing", "nameless", "direct", "reserve", "direct,nameless,reserve"])
def test_a_file_system_in_user_space_is_a_drive_like_any(
    tmp_path: Path, project: Path, namespace: tuple[str, ...], refuses: str, name: str
) -> None:
    done = subprocess.run(
        [*namespace, sys.executable, "-W", "ignore", "-c", SERVER + STORE, str(tmp_path), name, refuses],
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "no FUSE: " in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "right []"
