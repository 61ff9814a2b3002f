"""Memory that is given again when it was freed: to the engine's buffers, and to torch's large CPU tensors."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
import torch

from tieroff._native import PagePool, Pages
from tieroff.storage.host import page_pool as module

MIB = 2**20
LIBRARY_BUILDER = shutil.which("cc")


def make(*, has_huge_pages: bool = False, limit_bytes: int = 64 * MIB) -> PagePool:
    pool = PagePool(256 * MIB, has_huge_pages)
    pool.set_limit(limit_bytes)
    return pool


def fill(pages: Pages, value: int) -> None:
    torch.frombuffer(pages, dtype=torch.uint8).fill_(value)


def resident_bytes(first_address: int) -> int:
    """Returns the resident bytes of a pool whose first pages lie there: a word a page, whose top bit says that it is there."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(first_address // 4096 * 8)
        entries = array("Q", pagemap.read(256 * MIB // 4096 * 8))
    return sum(entry >> 63 for entry in entries) * 4096


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 4097, 3 * MIB])
def test_what_is_given_is_whole_pages_and_writable(size_bytes: int) -> None:
    pool = make()
    pages = pool.take(size_bytes)
    assert pages.address % 4096 == 0 and pages.size_bytes == size_bytes
    assert pool.in_use_bytes == max(4096, -(-size_bytes // 4096) * 4096)
    if size_bytes:
        fill(pages, 7)
        assert memoryview(pages)[-1] == 7


def test_freed_memory_is_given_again_and_what_is_left_of_it_stays() -> None:
    pool = make()
    first, wall = pool.take(8 * MIB), pool.take(4096)
    address = first.address
    del first
    assert (pool.in_use_bytes, pool.kept_bytes) == (4096, 8 * MIB)
    small = pool.take(3 * MIB)
    assert small.address == address
    assert (pool.in_use_bytes, pool.kept_bytes) == (3 * MIB + 4096, 5 * MIB)
    del small
    assert pool.take(8 * MIB).address == address  # free neighbours are one again
    assert wall.size_bytes == 4096


def test_of_several_the_smallest_that_does_is_given() -> None:
    pool = make()
    sizes = [9 * MIB, 3 * MIB, 5 * MIB]
    taken = [(pool.take(size), pool.take(4096)) for size in sizes]
    addresses = [pages.address for pages, _ in taken]
    walls = [wall for _, wall in taken]
    taken.clear()
    assert pool.take(4 * MIB).address == addresses[2]
    assert len(walls) == 3


def test_memory_in_use_is_never_given_again() -> None:
    pool = make()
    tensor = torch.frombuffer(pool.take(MIB), dtype=torch.uint8).fill_(7)
    part = tensor[10:20]
    del tensor
    fill(pool.take(MIB), 0)
    assert part.tolist() == [7] * 10


@pytest.mark.parametrize("has_huge_pages", [False, True])
def test_the_limit_holds_for_what_is_in_use_and_kept_together(has_huge_pages: bool) -> None:
    pool = make(has_huge_pages=has_huge_pages, limit_bytes=24 * MIB)
    used = [pool.take(8 * MIB) for _ in range(3)]
    start = used[0].address
    for pages in used:
        fill(pages, 1)
    anchor = used.pop()
    used.clear()
    assert (pool.in_use_bytes, pool.kept_bytes) == (8 * MIB, 16 * MIB)
    large = pool.take(12 * MIB)  # the kept ones are neighbours
    assert pool.kept_bytes == 4 * MIB
    larger = pool.take(10 * MIB)  # fresh: all that is kept has to go, and what is in use alone is above the limit
    fill(larger, 1)
    assert pool.kept_bytes == 0 and pool.in_use_bytes == 30 * MIB
    assert resident_bytes(start) == 30 * MIB
    del large, larger
    assert pool.in_use_bytes + pool.kept_bytes == 24 * MIB == resident_bytes(start)
    pool.set_limit(10 * MIB)
    assert pool.kept_bytes == 2 * MIB
    pool.set_limit(0)
    assert pool.kept_bytes == 0 and resident_bytes(start) == 8 * MIB
    assert memoryview(anchor)[5] == 1


def test_what_a_huge_page_brings_beyond_the_request_counts() -> None:
    pool = make(has_huge_pages=True)
    pages = pool.take(3 * MIB)
    fill(pages, 1)
    assert pool.kept_bytes == MIB
    assert resident_bytes(pages.address) <= 4 * MIB
    next_one = pool.take(MIB)
    assert next_one.address == pages.address + 3 * MIB and pool.kept_bytes == 0


def test_a_huge_page_with_holes_stays_in_pieces() -> None:
    """The system would put it together again, holes and all (khugepaged)."""
    pool = make(has_huge_pages=True)
    pieces = [pool.take(MIB) for _ in range(32)]
    for pages in pieces:
        fill(pages, 1)
    start = pieces[0].address
    del pieces[::2]
    pool.set_limit(0)
    assert pool.kept_bytes == 0 and resident_bytes(start) == 16 * MIB
    flags = Path("/proc/self/smaps").read_text().split("VmFlags:")
    for pages in pieces:
        at = next(i for i, text in enumerate(flags) if holds(text, pages.address))
        assert "nh" in flags[at + 1].split("\n")[0].split()


def holds(mapping: str, address: int) -> bool:
    """True for a part of smaps, up to its flags, whose mapping holds the address."""
    head = next(line for line in mapping.split("\n") if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line))
    start, stop = (int(end, 16) for end in head.split(" ")[0].split("-"))
    return start <= address < stop


@pytest.mark.skipif(LIBRARY_BUILDER is None, reason="no C compiler")
def test_a_library_whose_tables_are_read_only_is_served(tmp_path: Path) -> None:
    """All of them are filled when it is loaded, and what shares their last page stays writable."""
    (tmp_path / "user.c").write_text(
        "#include <stdlib.h>\n"
        "char data[8192] = {1};\n"
        "void *take(size_t size) { void *p; return posix_memalign(&p, 64, size) ? 0 : p; }\n"
        "void give(void *p) { free(p); data[0]++; }\n"
    )
    subprocess.run(
        [str(LIBRARY_BUILDER), "-shared", "-fPIC", "-O1", "-Wl,-z,now,-z,relro", "user.c", "-o", "libuser.so"],
        cwd=tmp_path,
        check=True,
    )
    program = f"""
import ctypes
from tieroff._native import process_pool, serve_from, serve_library
library = ctypes.CDLL({str(tmp_path / "libuser.so")!r})
library.take.restype, library.take.argtypes, library.give.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
pool = process_pool(1 << 30, False)
pool.set_limit(1 << 24)
assert serve_library("libuser.so") and serve_library("libuser.so")
serve_from(1 << 20)
memory = library.take(1 << 20)
assert pool.owns(memory) and not pool.owns(library.take(100))
library.give(memory)
assert pool.in_use_bytes == 0 and pool.kept_bytes == 1 << 20
assert ctypes.c_char.in_dll(library, "data").value == b"\x02"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(LIBRARY_BUILDER is None, reason="no C compiler")
def test_calls_that_another_tool_took_are_left_to_it(tmp_path: Path) -> None:
    """A memory profiler, say: a library whose calls of free go elsewhere than everybody's."""
    (tmp_path / "tool.c").write_text("int count; void free(void *p) { count += p != 0; }\n")
    (tmp_path / "user.c").write_text(
        "#include <stdlib.h>\n"
        "void *take(size_t size) { void *p; return posix_memalign(&p, 64, size) ? 0 : p; }\n"
        "void give(void *p) { free(p); }\n"
    )
    build = [str(LIBRARY_BUILDER), "-shared", "-fPIC", "-fno-builtin"]
    subprocess.run([*build, "tool.c", "-o", "libtool.so"], cwd=tmp_path, check=True)
    here = ["-L.", "-Wl,--no-as-needed", "-ltool", f"-Wl,-rpath,{tmp_path},-z,now"]
    subprocess.run([*build, "user.c", "-o", "libuser.so", *here], cwd=tmp_path, check=True)
    program = f"""
import ctypes, os
from tieroff._native import process_pool, serve_from, serve_library
library = ctypes.CDLL({str(tmp_path / "libuser.so")!r}, mode=os.RTLD_NOW | os.RTLD_DEEPBIND)
library.take.restype, library.take.argtypes, library.give.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
pool = process_pool(1 << 30, False)
pool.set_limit(1 << 24)
assert not serve_library("libuser.so")
serve_from(1 << 20)
memory = library.take(1 << 20)
assert not pool.owns(memory)
library.give(memory)
assert ctypes.c_int.in_dll(ctypes.CDLL({str(tmp_path / "libtool.so")!r}), "count").value == 1
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_address_space_that_is_used_up_is_told() -> None:
    pool = PagePool(4 * MIB, False)
    pages = pool.take(4 * MIB)
    with pytest.raises(MemoryError):
        pool.take(1)
    del pages
    assert pool.take(4 * MIB).size_bytes == 4 * MIB
    with pytest.raises(MemoryError):
        pool.take(2**63)


def test_address_space_that_is_not_there_is_told() -> None:
    with pytest.raises(OSError, match="mmap"):
        PagePool(2**62, False)


def run(program: str) -> str:
    head = (
        "import tieroff, torch, threading, os\n"
        "from tieroff.storage.host.page_pool import page_pool, serve_torch, stop_serving\n"
        "MIB = 2**20; pool = page_pool(); assert pool is not None\n"
    )
    done = subprocess.run([sys.executable, "-c", head + program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_large_tensors_of_torch_come_from_it_while_they_are_served() -> None:
    run("""
before = torch.ones(2 * MIB, dtype=torch.uint8)
pool.set_limit(64 * MIB)
assert not pool.owns(before.data_ptr())
serve_torch()
large, small = torch.ones(MIB, dtype=torch.uint8), torch.ones(MIB // 8 - 1, dtype=torch.uint8)
assert pool.owns(large.data_ptr()) and not pool.owns(small.data_ptr())
assert pool.in_use_bytes == MIB
address = large.data_ptr()
del large, before, small
assert pool.in_use_bytes == 0 and pool.kept_bytes >= MIB
again = torch.empty(MIB, dtype=torch.uint8)
assert again.data_ptr() == address
again.resize_(4 * MIB).fill_(3)
assert pool.in_use_bytes == 4 * MIB
stop_serving()
assert not pool.owns(torch.ones(2 * MIB, dtype=torch.uint8).data_ptr())
array = again.numpy()
del again
assert pool.in_use_bytes == 4 * MIB and array[-1] == 3
del array
assert pool.in_use_bytes == 0
""")


def test_a_forked_child_and_the_threads_of_both_go_on() -> None:
    out = run("""
serve_torch()
pool.set_limit(32 * MIB)
stop = False
def churn():
    while not stop:
        value = torch.full((2 * MIB,), 5, dtype=torch.uint8)
        assert value.sum().item() == 10 * MIB
threads = [threading.Thread(target=churn) for _ in range(3)]
torch.set_num_threads(1)
[t.start() for t in threads]
kept = torch.full((3 * MIB,), 9, dtype=torch.uint8)
assert pool.owns(kept.data_ptr())
for _ in range(20):
    child = os.fork()
    if child == 0:
        fresh = torch.full((3 * MIB,), 4, dtype=torch.uint8)
        kept.fill_(1)
        own = not pool.owns(fresh.data_ptr())  # a child is served by the C library, and keeps nothing
        os._exit(0 if kept[0] == 1 and own and pool.kept_bytes == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
assert kept.sum().item() == 27 * MIB
stop = True
[t.join() for t in threads]
print("done")
""")
    assert out == "done\n"


def test_a_process_without_address_space_goes_on_without_it() -> None:
    program = (
        "import resource, psutil, tieroff, torch\n"
        "from tieroff.runtime.backend.cpu import CpuBackend\n"
        "limit = psutil.Process().memory_info().vms + 2**30\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "backend = CpuBackend(); backend.keep_freed(2**30)\n"
        "tensor = backend.empty(3 << 20).fill_(1)\n"
        "assert not backend.gave(tensor) and tensor.sum().item() == 3 << 20\n"
        "backend.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_library_that_is_not_there_is_not_served() -> None:
    from tieroff._native import serve_library

    assert not serve_library("no-such-library.so")


def test_another_allocator_of_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "TORCH_ALLOCATES_IN", "no-such-library.so")
    module.is_in_the_way.cache_clear()
    with caplog.at_level("INFO", logger="tieroff"):
        assert not module.serve_torch()
    module.is_in_the_way.cache_clear()
    assert "allocates by other calls" in caplog.text
