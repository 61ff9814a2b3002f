"""What a forked child finds: nothing that hangs it, and nothing with which it could harm its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tieroff.storage.engines import available

PRELUDE = """
import os, sys, threading
from tieroff.errors import StateError
from tieroff.storage import buffers
from tieroff.storage.engines import choose
from tieroff.storage.nvme.file_store import FileStore
from tieroff.storage.host.pool import HostStore

engine = choose(sys.argv[2])
nvme = FileStore([sys.argv[1]], 2**26, engine)
host = HostStore(2**26, engine)
nvme.return_pages(0.001)
source, target = buffers.allocate(2**23), buffers.allocate(2**23)
source[:] = os.urandom(2**23)

def refused(call):
    try:
        call()
    except StateError as error:
        return "fork" in str(error)
    return False
"""

IN_FLIGHT = """
blocks = [store.allocate(2**23) for store in (nvme, host) for _ in range(4)]
stores = [nvme] * 4 + [host] * 4
homes = [store.home(2**20) for store in (nvme, host)]
writes = [store.write(block, source.address, source) for store, block in zip(stores, blocks)]
waiter = threading.Thread(target=writes[3].wait)  # a thread that waits inside the native module at the fork
waiter.start()
descriptors = [file.fd for file in nvme.files]
child = os.fork()
if child == 0:
    calls = [
        lambda: nvme.allocate(1), lambda: host.allocate(1), lambda: nvme.home(1), lambda: nvme.reserve(1),
        lambda: nvme.write(blocks[0], source.address, source), lambda: homes[0].read(target.address, target),
        lambda: writes[0].wait(), lambda: writes[0].done(), lambda: writes[7].cancel(),
        lambda: nvme.return_pages(1.0),
    ]
    bad = [index for index, call in enumerate(calls) if not refused(call)]
    for fd in descriptors:
        try:
            os.fstat(fd)
            bad.append(f"descriptor {fd} is open")
        except OSError:
            pass
    paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in paths if os.path.lexists(path)]
    with open("/proc/self/maps") as maps:
        links += [line.split()[-1] for line in maps]
    bad += [link for link in links if link.startswith(("anon_inode:[io_uring]", "anon_inode:[eventfd]"))]
    homes.clear()
    nvme.close(); host.close(); engine.close()
    del nvme, host, engine, writes, blocks, homes, stores, calls
    if bad:
        print("child:", bad, flush=True)
    sys.exit(1 if bad else 0)  # the whole way out, with every destructor
status = os.waitpid(child, 0)[1]
for write in writes:
    write.wait(60)
waiter.join()
for store, block in zip(stores, blocks):
    target[:] = bytes(2**23)
    store.read(block, target.address, target).wait(60)
    assert target[:] == source[:]
nvme.close(); host.close(); engine.close()
print("status", status)
"""

NEW_ONES = """
child = os.fork()
if child == 0:
    del nvme, host, engine
    engine = choose(sys.argv[2])
    store = FileStore([sys.argv[1]], 2**26, engine)
    block = store.allocate(2**23)
    store.write(block, source.address, source).wait(60)
    store.read(block, target.address, target).wait(60)
    store.close(); engine.close()
    sys.exit(0 if target[:] == source[:] else 1)
print("status", os.waitpid(child, 0)[1])
"""

ELSEWHERE = """
import ctypes, gc, mmap
from tieroff.storage import memory
from tieroff.storage.host.slabs import RegisteredSlabs
pinned = HostStore(2**26, engine, RegisteredSlabs(lambda address, size: None, lambda address: None))
pinned.reserve(2**20)
homes = [nvme.home(2**20), pinned.home(2**20)]
addresses = [home.address for home in homes]
child = os.fork()
if child == 0:
    # Where the parent has pinned slabs and mapped files the child has nothing: it puts its own memory there, and keeps it.
    for address in addresses:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        assert memory._mmap(address, 2**20, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address
        ctypes.memset(address, 7, 2**20)
    homes.clear()
    del nvme, host, pinned
    gc.collect()
    sys.exit(int([ctypes.string_at(address, 1) for address in addresses] != [bytes([7])] * 2))
status = os.waitpid(child, 0)[1]
homes.clear()
nvme.close(); host.close(); pinned.close(); engine.close()
print("status", status)
"""

LOADER = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((8,), float(index))

block = nvme.allocate(2**23)
write = nvme.write(block, source.address, source)
loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context="fork")
total = sum(float(batch.sum()) for batch in loader)
write.wait(60)
nvme.close(); host.close(); engine.close()
print("status", int(total != 8 * 64 * 63 / 2))
"""


@pytest.mark.parametrize("name", available())
@pytest.mark.parametrize(
    "script", [IN_FLIGHT, NEW_ONES, ELSEWHERE, LOADER], ids=["in flight", "new ones", "elsewhere", "loader"]
)
def test_fork_harms_neither_parent_nor_child(tmp_path: Path, project: Path, name: str, script: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(project)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PRELUDE + script, str(tmp_path), name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == ["status 0"], done.stdout + done.stderr
    assert done.returncode == 0
    assert os.listdir(tmp_path) == []
