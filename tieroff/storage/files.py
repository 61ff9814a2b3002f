"""Directories that are checked before use, and files that have no name."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable

from tieroff.errors import ConfigError, StoreError
from tieroff.storage import buffers
from tieroff.storage.engines import OpenFile
from tieroff.storage.memory import PAGE_BYTES, is_in_memory
from tieroff.units import format_bytes

_logger = logging.getLogger(__name__)

BLOCK_BYTES_MIN = 4096

Opener = Callable[..., int]
"""As os.open; tests pass one that fails."""

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
# The file system has no O_TMPFILE (EOPNOTSUPP, EISDIR), or no O_DIRECT (EINVAL, sometimes for both).
_REFUSALS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


def open_directory(path: str, *, free_bytes_min: int) -> int:
    """Returns a descriptor of a directory that can hold a store's file.

    Raises:
        ConfigError: it is missing, no directory, a symbolic link, read-only, writable for everybody without the sticky
            bit, or has too little space left.
    """
    plain = path.rstrip("/") or "/"
    try:
        if stat.S_ISLNK(os.lstat(plain).st_mode):
            raise _refused(path, f"a symbolic link to {os.readlink(plain)}: name the directory itself")
        fd = os.open(plain, _DIRECTORY_FLAGS)
    except FileNotFoundError as error:
        raise _refused(path, "nothing there: make it, or name another one") from error
    except NotADirectoryError as error:
        raise _refused(path, "something else: name a directory") from error
    except OSError as error:
        raise _refused(path, f"{os.strerror(error.errno or 0)}: give this user access to it") from error
    try:
        _check_directory(path, fd, free_bytes_min)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refused(path: str, found: str) -> ConfigError:
    return ConfigError(f"expected a writable directory of this machine's drive at {path} ([nvme] dirs), got {found}")


def _check_directory(path: str, fd: int, free_bytes_min: int) -> None:
    mode = os.fstat(fd).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise _refused(
            path, "one that everybody may write to, without the sticky bit: chmod +t it, or use one below it"
        )
    space = os.fstatvfs(fd)
    if space.f_flag & os.ST_RDONLY or not os.access(path, os.W_OK | os.X_OK):
        raise _refused(path, "a read-only one: mount it writable, or name another one")
    free_bytes = space.f_bavail * space.f_frsize
    if free_bytes < free_bytes_min:
        raise _refused(
            path,
            f"one with {format_bytes(free_bytes)} free where {format_bytes(free_bytes_min)} are needed: free some, "
            "or lower [budget] nvme",
        )


def open_nameless(path: str, directory_fd: int, *, is_direct: bool, opener: Opener = os.open) -> OpenFile:
    """Returns an empty file of mode 0600 in the directory that has no name, so that nothing is left whatever happens.

    Args:
        is_direct: try O_DIRECT first; where it is refused the file is buffered and says so.

    Raises:
        StoreError: neither way works.
    """
    attempts = [os.O_DIRECT, 0] if is_direct else [0]
    failure: OSError | None = None
    for direct_flag in attempts:
        for open_file in (_open_tmpfile, _open_unlinked):
            try:
                fd = open_file(directory_fd, direct_flag, opener)
            except OSError as error:
                failure = error
                if error.errno not in _REFUSALS:
                    break
                continue
            is_memory = is_in_memory(fd)
            if is_memory:
                _logger.warning("%s is a file system in memory: what is moved there still takes host memory", path)
            return _describe(fd, path, is_direct=direct_flag != 0 and not is_memory)
        if failure is None or failure.errno not in _REFUSALS:
            break
    number = failure.errno if failure is not None else None
    raise StoreError(
        f"expected to make a file in {path}, got {os.strerror(number or 0)}: check that the directory is on a local, "
        "writable drive",
        path=path,
        errno=number,
    )


def _open_tmpfile(directory_fd: int, direct_flag: int, opener: Opener) -> int:
    # O_EXCL with O_TMPFILE: nobody can give the file a name later.
    return opener(".", os.O_TMPFILE | _FILE_FLAGS | direct_flag, 0o600, dir_fd=directory_fd)


def _open_unlinked(directory_fd: int, direct_flag: int, opener: Opener) -> int:
    """In a folder that only this user may enter, so that nobody puts something else at the name meanwhile."""
    folder = f".tieroff-{secrets.token_hex(16)}"
    os.mkdir(folder, 0o700, dir_fd=directory_fd)
    try:
        folder_fd = os.open(folder, _DIRECTORY_FLAGS, dir_fd=directory_fd)
        try:
            fd = opener("data", os.O_CREAT | os.O_NOFOLLOW | _FILE_FLAGS | direct_flag, 0o600, dir_fd=folder_fd)
        except OSError:
            _unlink_if_there("data", folder_fd)  # O_DIRECT is refused only after the file was made
            raise
        else:
            os.unlink("data", dir_fd=folder_fd)
        finally:
            os.close(folder_fd)
    finally:
        os.rmdir(folder, dir_fd=directory_fd)
    return fd


def _unlink_if_there(name: str, folder_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=folder_fd)
    except FileNotFoundError:
        return


def _describe(fd: int, path: str, *, is_direct: bool) -> OpenFile:
    memory_alignment = 1
    block_bytes = max(BLOCK_BYTES_MIN, PAGE_BYTES, os.fstat(fd).st_blksize)
    if is_direct:
        memory_alignment, offset_alignment = _direct_alignment(fd)
        block_bytes = max(block_bytes, offset_alignment)
    # st_blksize is a hint and can be anything, such as an array's stripe; blocks are powers of two and small.
    if block_bytes & (block_bytes - 1) or block_bytes > 2**18:
        block_bytes = max(BLOCK_BYTES_MIN, PAGE_BYTES)
    return OpenFile(fd, path, is_direct, block_bytes, memory_alignment)


def _direct_alignment(fd: int) -> tuple[int, int]:
    """Returns the alignment of memory and offsets for direct I/O, the page where the kernel does not say."""
    try:
        from tieroff import _native
    except ImportError:
        return PAGE_BYTES, PAGE_BYTES
    memory_bytes, offset_bytes = _native.direct_alignment(fd)
    return memory_bytes or PAGE_BYTES, offset_bytes or PAGE_BYTES


def preallocate(file: OpenFile, offset: int, size_bytes: int) -> None:
    """Makes the file longer with room on the drive behind it, so that no later write or mapped page finds it full.

    Raises:
        OSError: there is none (ENOSPC); the file is as long as before.
    """
    try:
        try:
            os.posix_fallocate(file.fd, offset, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            _write_zeros(file.fd, offset, size_bytes)
    except OSError:
        os.ftruncate(file.fd, offset)
        raise


def _write_zeros(fd: int, offset: int, size_bytes: int) -> None:
    """For file systems without fallocate, where the C library writes single bytes instead, which O_DIRECT refuses."""
    zeros = memoryview(buffers.allocate(min(size_bytes, 2**20)))
    end = offset + size_bytes
    while offset < end:
        offset += os.pwrite(fd, zeros[: min(len(zeros), end - offset)], offset)
