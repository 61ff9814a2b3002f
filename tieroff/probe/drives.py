"""What a folder lies on: its file system, and the drive underneath."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def file_system(folder: Path) -> str:
    """Returns the type of the file system that holds a folder, by the longest mount point above it, or ""."""
    mount = _mount(folder)
    return str(mount.fstype) if mount else ""


def drive(folder: Path, root: Path = Path("/")) -> str:
    """Returns the models of the drives that hold a folder, or their names where they have no model.

    Args:
        folder: an existing folder.
        root: where /sys is found.

    Returns:
        Such as "nvme0n1 (Samsung SSD 990 PRO)"; several, with commas, under a volume that is made of several; "" where
        the system does not say.
    """
    number = os.stat(folder).st_dev
    blocks = root / "sys/dev/block"
    found = blocks / f"{os.major(number)}:{os.minor(number)}"
    if not found.exists():  # some file systems have numbers of their own, such as btrfs; their mount names the drive
        mount = _mount(folder)
        found = root / "sys/class/block" / os.path.basename(str(mount.device) if mount else "none")
    return ", ".join(_models(found.resolve())) if found.exists() else ""


def _mount(folder: Path) -> psutil._common.sdiskpart | None:
    real = Path(os.path.realpath(folder))
    mounts = [part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)) if mounts else None


def _models(block: Path) -> list[str]:
    if (block / "partition").exists():
        block = block.parent
    below = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if below:
        return [model for part in below for model in _models(part.resolve())]
    try:
        model = (block / "device/model").read_text().strip()
    except OSError:  # virtual drives have none
        model = ""
    return [f"{block.name} ({model})" if model else block.name]
