"""Default budgets of the lower tiers."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tieroff.config import Config
from tieroff.errors import ConfigError
from tieroff.storage.limits import host_limit_bytes
from tieroff.storage.memory import is_in_memory

HOST_SHARE = 0.5
"""Pinned memory takes this share of what is left. The rest is for the data loader, the page cache and the program."""

FOLDER_MARGIN_SHARE = 0.05
FOLDER_MARGIN_BYTES = 2**30
"""Left free in a folder: the larger of a share of its free bytes and a GiB."""


def default_host_bytes() -> int:
    """Returns `HOST_SHARE` of the memory that this process may still take before the machine or a cgroup stops it."""
    return int(host_limit_bytes() * HOST_SHARE)


def default_nvme_bytes(dirs: Sequence[Path]) -> int:
    """Returns what folders have free less the margin; 0 without any.

    Bytes are spread evenly, so the fullest folder decides for all. Folders on one file system share its free bytes.

    Raises:
        ConfigError: a folder is missing or cannot be read.
    """
    try:
        drives = [os.stat(folder).st_dev for folder in dirs]
        sharing = Counter(drives)
        per_folder = [available_folder_bytes(folder) // sharing[drive] for folder, drive in zip(dirs, drives, strict=True)]
    except FileNotFoundError as error:
        raise ConfigError(f"[nvme] dirs: {error.filename} does not exist; make it, or name another folder") from error
    except OSError as error:
        raise ConfigError(f"[nvme] dirs: {error.filename}: {error.strerror}; name one that this user may use") from error
    return len(dirs) * min(per_folder, default=0)


def available_folder_bytes(folder: Path) -> int:
    """Returns the free bytes of a folder's file system that this user may take, less the margin."""
    space = os.statvfs(folder)
    free_bytes = space.f_bavail * space.f_frsize
    return max(0, free_bytes - max(FOLDER_MARGIN_BYTES, int(free_bytes * FOLDER_MARGIN_SHARE)))


def default_dirs(config: Config, device_type: str) -> tuple[Path, ...]:
    """Returns the folders of a run whose config names none: the one for temporary files, where a budget is in vain without it.

    That is on the CPU, whose device memory is the host's: a device budget was asked for, and the config has no tier below.
    """
    budget = config.budget
    is_wanted = device_type == "cpu" and budget.device is not None and not budget.host and budget.nvme is None
    return _temporary_dirs() if is_wanted else ()


def _temporary_dirs() -> tuple[Path, ...]:
    """Returns the first folder for temporary files that lies on a drive with room; () if none does."""
    try:
        named = tempfile.gettempdir()  # as TMPDIR says
    except OSError:  # nowhere may this user write
        return ()
    for folder in dict.fromkeys(os.path.realpath(path) for path in (named, "/var/tmp")):
        if os.access(folder, os.W_OK | os.X_OK) and not _is_in_memory(folder) and available_folder_bytes(Path(folder)):
            return (Path(folder),)
    return ()


def _is_in_memory(folder: str) -> bool:
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return is_in_memory(directory)
    finally:
        os.close(directory)
