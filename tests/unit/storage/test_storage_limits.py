"""What a process may still take of the host: the machine's free memory, cgroups of both versions, locked memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from tieroff.errors import ConfigError, StoreError
from tieroff.storage import engines
from tieroff.storage.engines import Engine
from tieroff.storage.host.pool import HostStore
from tieroff.storage.limits import host_limit, host_limit_bytes, locked_limit_bytes

MIB = 2**20
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemAvailable: 1000 kB\n"} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, errors="surrogateescape")
    return root


def mounts(*lines: str) -> dict[str, str]:
    """A `mountinfo` whose lines say: top of the tree, folder, kind, options."""
    text = "\n".join(
        f"{number} 1 0:{number} {top} {folder} rw,relatime shared:9 - {kind} {kind} {options}"
        for number, (top, folder, kind, options) in enumerate((line.split(" ") for line in lines), 30)
    )
    return {"proc/self/mountinfo": f"1 0 8:1 / / rw - ext4 /dev/sda rw\n{text}\n"}


def group(folder: str, limit: object, usage: object, stat: str = "") -> dict[str, str]:
    """The files of a cgroup of version 2."""
    return {f"{folder}/memory.max": f"{limit}\n", f"{folder}/memory.current": f"{usage}\n", f"{folder}/memory.stat": stat}


def group_v1(folder: str, limit: object, usage: object, stat: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("files", "expected", "group_path"),
    [
        ({}, 1_024_000, None),
        # no limit anywhere, and one above what the machine has
        ({"proc/self/cgroup": "0::/a/b\n", **group(f"{V2}/a/b", "max", 5)}, 1_024_000, None),
        ({"proc/self/cgroup": "0::/a/b\n", **group(f"{V2}/a/b", 10**12, 5)}, 1_024_000, None),
        # the least up the tree; pages of files that were not touched lately can be taken back
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                **group(f"{V2}/a/b", 900_000, 100),
                **group(f"{V2}/a", 500_000, 200_000, "anon 1\ninactive_file 50000\nactive_file 70000\n"),
            },
            350_000,
            f"{V2}/a",
        ),
        # the process is above its limit already
        ({"proc/self/cgroup": "0::/not/mounted/here\n", **group(V2, 70_000, 80_000)}, 0, V2),
        # more pages of files than the usage, as the two are read one after the other
        ({"proc/self/cgroup": "0::/a\n", **group(f"{V2}/a", 70_000, 10_000, "inactive_file 20000\n")}, 70_000, f"{V2}/a"),
        # above memory.high a process hardly runs
        (
            {"proc/self/cgroup": "0::/a\n", **group(f"{V2}/a", "max", 1000), f"{V2}/a/memory.high": "300000\n"},
            299_000,
            f"{V2}/a",
        ),
        (
            {"proc/self/cgroup": "0::/a\n", **group(f"{V2}/a", 200_000, 1000), f"{V2}/a/memory.high": "max\n"},
            199_000,
            f"{V2}/a",
        ),
        # usage or statistics cannot be read: the limit alone
        ({"proc/self/cgroup": "0::/a\n", f"{V2}/a/memory.max": "400000\n"}, 400_000, f"{V2}/a"),
        # outside of the namespace
        ({"proc/self/cgroup": "0::/../other\n", **group(f"{V2}/other", 1, 1)}, 1_024_000, None),
        # what no kernel writes
        ({"proc/self/cgroup": "nonsense\n0::\n", f"{V2}/memory.max": "?\n"}, 1_024_000, None),
        # version 1: by total_inactive_file, which is that of the whole tree
        (
            {
                "proc/self/cgroup": "5:cpu,memory:/job\n4:cpuset:/\n",
                **group_v1(f"{V1}/job", 9223372036854771712, 1),
                **group_v1(V1, 600_000, 300_000, "inactive_file 5\ntotal_inactive_file 100000\n"),
            },
            400_000,
            V1,
        ),
        # both versions, memory with version 1; and the tree of version 2 elsewhere
        (
            {
                "proc/self/cgroup": "4:memory:/job\n0::/job\n",
                **mounts(
                    "/ /sys/fs/cgroup/cpu cgroup rw,cpu",
                    "/ /sys/fs/cgroup/memory cgroup rw,memory",
                    "/ /sys/fs/cgroup/unified cgroup2 rw",
                ),
                **group_v1(f"{V1}/job", 500_000, 100_000),
                **group(f"{V2}/unified/job", "max", 1),
            },
            400_000,
            f"{V1}/job",
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n0::/job\n",
                **mounts("/ /sys/fs/cgroup/unified cgroup2 rw"),
                **group(f"{V2}/unified/job", 500_000, 200_000),
            },
            300_000,
            f"{V2}/unified/job",
        ),
        # a controller together with others, under another name, and a space in it
        (
            {
                "proc/self/cgroup": "4:cpuacct,memory:/a job\n",
                **mounts("/ /mnt/all\\040groups cgroup rw,cpuacct,memory"),
                **group_v1("mnt/all groups/a job", 500_000, 0),
            },
            500_000,
            "mnt/all groups/a job",
        ),
        # a drive is mounted at a name that is not UTF-8
        (
            {
                "proc/self/cgroup": "4:memory:/job\n",
                **mounts("/ /media/stick\udce9 vfat rw", "/ /sys/fs/cgroup/memory cgroup rw,memory"),
                **group_v1(f"{V1}/job", 500_000, 0),
            },
            500_000,
            f"{V1}/job",
        ),
        # a container that is shown its own part of the tree, and has a group in it
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1a2b/worker\n",
                **mounts("/docker/1a2b /sys/fs/cgroup/memory cgroup rw,memory"),
                **group_v1(V1, 900_000, 0),
                **group_v1(f"{V1}/worker", 300_000, 0),
            },
            300_000,
            f"{V1}/worker",
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/1a2b\n",
                **mounts("/docker/1a2b /sys/fs/cgroup/memory cgroup rw,memory"),
                **group_v1(V1, 900_000, 0),
            },
            900_000,
            V1,
        ),
        # and one that is not told which part that is
        ({"proc/self/cgroup": "4:memory:/docker/1a2b\n", **group_v1(V1, 900_000, 0)}, 900_000, V1),
    ],
)
def test_host_limit_is_the_least_up_the_tree(
    tmp_path: Path, files: dict[str, str], expected: int, group_path: str | None
) -> None:
    root = machine(tmp_path, files)
    limit = host_limit(root)
    assert (limit.left_bytes, limit.group) == (expected, root / group_path if group_path is not None else None)
    assert host_limit_bytes(root) == expected
    assert limit.limiter == ("the machine" if group_path is None else f"the cgroup {root / group_path}")


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = engines.choose("threads" if "threads" in engines.available() else "aiofiles")
    yield engine
    engine.close()


def test_slab_is_refused_when_others_took_the_memory_meanwhile(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Asked of the cgroup again for each slab: one that does not fit would have this process killed."""
    group = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": str(4 * MIB),
        "sys/fs/cgroup/job/memory.current": "0",
        "proc/meminfo": "MemAvailable: 1000000 kB\n",
    }
    root = machine(tmp_path, group)
    monkeypatch.setattr("tieroff.storage.host.pool.host_limit", lambda: host_limit(root))
    with pytest.raises(ConfigError, match=rf"5\.00 MiB is too much, the cgroup {root}/sys/fs/cgroup/job leaves at most 4\.00"):
        HostStore(5 * MIB, engine)
    store = HostStore(4 * MIB, engine, slab_bytes=MIB)
    store.allocate(MIB)
    machine(root, {**group, "sys/fs/cgroup/job/memory.current": str(3 * MIB + 1)})
    with pytest.raises(StoreError, match=rf"KiB that the cgroup {root}/sys/fs/cgroup/job has left") as caught:
        store.allocate(MIB)
    assert caught.value.errno == errno.ENOMEM
    assert store.reserved_bytes == store.used_bytes == MIB
    machine(root, group)
    store.allocate(MIB)
    store.close()


LIMITS = "Limit   Soft Limit   Hard Limit   Units\nMax locked memory         {}              8388608              bytes\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/limits": LIMITS.format("unlimited")}, None),
        ({"proc/self/limits": LIMITS.format(8 * MIB)}, 8 * MIB),
        ({"proc/self/limits": LIMITS.format(8 * MIB), "proc/self/status": "VmLck: 1024 kB\nVmPin: 2048 kB\n"}, 5 * MIB),
        ({"proc/self/limits": LIMITS.format(MIB), "proc/self/status": "VmLck: 4096 kB\n"}, 0),
    ],
)
def test_locked_limit_is_what_the_process_may_still_lock(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert locked_limit_bytes(machine(tmp_path, files)) == expected
