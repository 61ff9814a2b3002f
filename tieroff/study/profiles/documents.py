"""JSON documents as profilers write them: plain, gzipped, or alone in an archive."""

from __future__ import annotations

import gzip
import json
import tarfile
import zlib
from pathlib import Path
from typing import IO, Any

from tieroff.errors import CaptureError

_GZIP = b"\x1f\x8b"


def read_document(path: str | Path, what: str) -> dict[str, Any]:
    """Returns the JSON object in a file, which may be gzipped, or the only file of a tar archive.

    Args:
        path: of the file.
        what: what it should hold, for messages.

    Raises:
        CaptureError: it cannot be read, is cut off, is no JSON object, or an archive of several files.
    """
    path = Path(path)
    try:
        if path.is_file() and tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                return _object(_only_member(archive, path), path, what)
        with path.open("rb") as file:
            is_packed = file.read(2) == _GZIP
            file.seek(0)
            return _object(gzip.GzipFile(fileobj=file) if is_packed else file, path, what)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise CaptureError(f"{path}: expected {what}, but it cannot be read to its end: {error}") from error


def _only_member(archive: tarfile.TarFile, path: Path) -> IO[bytes]:
    members = [member for member in archive.getmembers() if member.isfile()]
    if len(members) != 1:
        names = ", ".join(member.name for member in members[:3])
        raise CaptureError(
            f"{path}: expected one file in the archive, got {len(members)} ({names}{', ...' if len(members) > 3 else ''}): "
            "unpack it, and name the file of one rank"
        )
    file = archive.extractfile(members[0])
    assert file is not None  # of a member that is a file
    return file


def _object(file: IO[bytes] | gzip.GzipFile, path: Path, what: str) -> dict[str, Any]:
    try:
        document = json.loads(file.read())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CaptureError(f"{path}: expected {what}, but it is no JSON, or cut off: {error}") from error
    if not isinstance(document, dict):
        raise CaptureError(f"{path}: expected {what}, which is a JSON object, got {type(document).__name__}")
    return document
