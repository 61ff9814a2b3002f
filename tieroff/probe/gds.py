"""How the gds engine reaches a folder, as reported by cuFile and the kernel."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from tieroff.errors import TieroffError
from tieroff.probe.kernel import p2pdma

KVIKIO = ("kvikio-cu13", "kvikio-cu12", "kvikio")


def is_gds(folder: Path) -> bool:
    """Returns whether bytes go between device and drive past host memory, by all that can be known.

    cuFile does not say whether it used PCIe peer-to-peer; it is taken to where kernel, driver and CUDA have it.
    """
    path, _ = gds_path(folder)
    return path == "nvidia-fs" or (path == "cufile" and p2pdma(cuda_version())[0])


def cuda_version() -> str | None:
    """Returns the version of CUDA that torch was built for, or None."""
    try:
        import torch
    except ImportError:
        return None
    return torch.version.cuda


def gds_path(folder: Path) -> tuple[str, str]:
    """Returns the path of the gds engine to a folder ("none" where it does not work), and why it is not a better one."""
    if version_of(KVIKIO) is None:
        return "none", "kvikio is not installed: pip install tieroff[gds]"
    from tieroff.storage.nvme.gds_status import gds_status

    try:
        [status] = gds_status([folder])
    except (TieroffError, ImportError, OSError) as error:
        return "none", str(error)
    return status.path, status.reason


def version_of(distributions: tuple[str, ...]) -> str | None:
    """Returns name and version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
