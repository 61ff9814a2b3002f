"""Memory limits of this process: the machine's, the smallest cgroup limit up the tree, and locked memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Files with a limit of a group, and the one with its usage. Above `memory.high` a process is not killed, but hardly runs.
_LIMITS_V2, _USAGE_V2 = ("memory.max", "memory.high"), "memory.current"
_LIMITS_V1, _USAGE_V1 = ("memory.limit_in_bytes",), "memory.usage_in_bytes"


@dataclass(frozen=True, slots=True)
class HostLimit:
    """What this process may still take of the host's memory.

    Attributes:
        left_bytes: at least 0.
        group: the folder of the cgroup that leaves so little; None where the machine itself has no more.
    """

    left_bytes: int
    group: Path | None = None

    @property
    def limiter(self) -> str:
        """Who leaves no more, for a message."""
        return "the machine" if self.group is None else f"the cgroup {self.group}"


def host_limit(root: Path = Path("/")) -> HostLimit:
    """Returns what can still be taken: the least, over the machine and all cgroups up the tree, of the limit less what is used.

    Pages of files that were not touched lately do not count as used.

    Args:
        root: where /proc and /sys are found.
    """
    found = [HostLimit(_machine_left(root))]
    mounts = list(_mounts(root))
    for controllers, path in _groups(root):
        if controllers == "":
            tree = next((m for m in mounts if m.kind == "cgroup2"), _Mount("cgroup2", "/", root / "sys/fs/cgroup", ""))
            found += _tree_left(tree, path, _LIMITS_V2, _USAGE_V2)
        elif "memory" in controllers.split(","):
            usual = _Mount("cgroup", "/", root / "sys/fs/cgroup/memory", "memory")
            tree = next((m for m in mounts if m.kind == "cgroup" and "memory" in m.options.split(",")), usual)
            found += _tree_left(tree, path, _LIMITS_V1, _USAGE_V1)
    return min(found, key=lambda limit: limit.left_bytes)


def host_limit_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can still be taken; see `host_limit`."""
    return host_limit(root).left_bytes


def locked_limit_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process may still lock in memory (RLIMIT_MEMLOCK), or None without a limit.

    Slabs are never locked with mlock. A driver that pins them may count them here, and io_uring counts its rings on
    kernels before 5.12.

    Args:
        root: where /proc is found.
    """
    for line in _lines(root / "proc/self/limits"):
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return max(0, int(soft) - _locked_bytes(root)) if soft.isdigit() else None
    return None


def _locked_bytes(root: Path) -> int:
    fields = (line.split() for line in _lines(root / "proc/self/status") if line.startswith(("VmLck:", "VmPin:")))
    return sum(int(field[1]) * 1024 for field in fields)


def _machine_left(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _groups(root: Path) -> list[tuple[str, str]]:
    parts = [line.split(":", 2) for line in _lines(root / "proc/self/cgroup")]
    return [(part[1], part[2]) for part in parts if len(part) == 3]


@dataclass(frozen=True, slots=True)
class _Mount:
    """Where a tree of cgroups, or a part of it, is mounted.

    Attributes:
        kind: cgroup (version 1) or cgroup2.
        top: the group that the folder shows; a container is often shown its own alone.
        folder: where.
        options: of version 1 also the controllers.
    """

    kind: str
    top: str
    folder: Path
    options: str

    def shown(self, path: str) -> Path:
        """Returns the folder of a group. One that is not shown here, as outside of a container, has no files there."""
        below = path.removeprefix(self.top) if path == self.top or path.startswith(self.top.rstrip("/") + "/") else path
        return self.folder / below.lstrip("/")


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, types = before.split(), after.split()
        if len(fields) >= 5 and len(types) >= 3 and types[0] in ("cgroup", "cgroup2"):
            yield _Mount(types[0], _unescaped(fields[3]), root / _unescaped(fields[4]).lstrip("/"), types[2])


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)  # the kernel writes a space as \040


def _tree_left(mount: _Mount, path: str, limits: tuple[str, ...], usage: str) -> list[HostLimit]:
    """What is left at each level. Levels that are not mounted here, as in a container, are passed over."""
    found = []
    group = mount.shown(path)
    for level in [group, *group.parents]:
        given = [limit for name in limits if (limit := _number(level / name)) is not None]
        if given:
            used = (_number(level / usage) or 0) - _inactive_file(level)
            found.append(HostLimit(max(0, min(given) - max(0, used)), level))
        if level == mount.folder:
            break
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" is no limit


def _inactive_file(group: Path) -> int:
    values = {name: value for name, _, value in (line.partition(" ") for line in _lines(group / "memory.stat"))}
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _lines(path: Path) -> list[str]:
    """Lines of a file; none where there is no such file, as on older kernels and in containers."""
    try:
        return path.read_text(errors="surrogateescape").splitlines()  # a mount of any name
    except OSError:
        return []
