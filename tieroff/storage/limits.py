"""Memory limits of this process: the machine's, the smallest cgroup limit up the tree, and locked memory."""

from __future__ import annotations

from pathlib import Path


def host_limit_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can still be taken: the least, over the machine and all cgroups up the tree, of the limit
    less what is used. Pages of files that were not touched lately do not count as used.

    Args:
        root: where /proc and /sys are found.
    """
    left = [_machine_left(root)]
    for controllers, path in _groups(root):
        if controllers == "":
            left += _tree_left(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            left += _tree_left(mount, path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return max(0, min(left))


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


def _tree_left(mount: Path, path: str, limit_name: str, usage_name: str) -> list[int]:
    """What is left at each level. Levels that are not mounted here, as in a container, are passed over."""
    left = []
    group = mount / path.lstrip("/")
    for level in [group, *group.parents]:
        limit, usage = _number(level / limit_name), _number(level / usage_name)
        if limit is not None and usage is not None:
            left.append(limit - max(0, usage - _inactive_file(level)))
        if level == mount:
            break
    return left


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
        return path.read_text().splitlines()
    except OSError:
        return []
