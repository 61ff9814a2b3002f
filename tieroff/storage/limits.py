"""How much memory this process may take: the machine's, and the smallest cgroup limit up the tree."""

from __future__ import annotations

from pathlib import Path


def host_limit_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes that can still be taken: the least, over the machine and all cgroups up the tree, of the limit
    less what is used. Pages of files that nobody has touched lately do not count as used.

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


def _machine_left(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _groups(root: Path) -> list[tuple[str, str]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    parts = [line.split(":", 2) for line in lines]
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
    try:
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    values = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))
