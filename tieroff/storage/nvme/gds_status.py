"""How bytes of the engine `gds` would reach a directory."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tieroff.errors import ConfigError, StoreError
from tieroff.storage.engines.cuda_memory import CudaMemory
from tieroff.storage.engines.cufile import GdsStatus, load_kvikio, open_cufile
from tieroff.storage.nvme import files


def gds_status(dirs: Sequence[str | os.PathLike[str]]) -> list[GdsStatus]:
    """Returns how this engine's bytes would reach each directory, found with a nameless file in it that is gone after."""
    return [_status_of(os.fspath(path)) for path in dirs]


def _status_of(path: str) -> GdsStatus:
    try:
        load_kvikio()
        CudaMemory()
        directory = files.open_directory(path, free_bytes_min=0)
        try:
            file = files.open_nameless(path, directory, is_direct=True)
        finally:
            os.close(directory)
    except (ConfigError, StoreError) as error:
        return GdsStatus(path, "none", str(error))
    try:
        opened, status = open_cufile(f"/proc/self/fd/{file.fd}", path)
        opened.close()
        return status
    except RuntimeError as error:
        return GdsStatus(path, "none", f"kvikio refused a file there: {error}")
    finally:
        os.close(file.fd)
