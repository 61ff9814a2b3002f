"""Directories that are checked before use, and files that have no name."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
from collections.abc import Callable, Sequence

from tieroff.errors import ConfigError, StoreError
from tieroff.storage import buffers
from tieroff.storage.engines.base import OpenFile
from tieroff.storage.memory import PAGE_BYTES, is_in_memory
from tieroff.units import format_bytes

_logger = logging.getLogger(__name__)

BLOCK_BYTES_MIN = 4096

Opener = Callable[..., int]
"""As os.open; tests pass one that fails."""

_DIRECTORY_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDWR | os.O_EXCL | os.O_CLOEXEC
_FILE_MODE = 0o600
# The file system has no O_TMPFILE (EOPNOTSUPP, EISDIR), or no O_DIRECT (EINVAL, sometimes for both).
_REFUSALS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)


def open_directory(path: str, *, free_bytes_min: int = 0) -> int:
    """Returns a descriptor of a directory that can hold a store's file.

    Raises:
        ConfigError: it is missing, no directory, read-only, writable for everybody without the sticky bit, has too
            little space left, or a symbolic link lies anywhere on the way to it.
    """
    fd = _walk(path)
    try:
        _check_directory(path, fd, free_bytes_min)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _walk(path: str) -> int:
    """Opens a directory step by step: no step is looked up twice, and none may be a symbolic link."""
    here = "/" if path.startswith("/") else "."
    fd = os.open(here, _DIRECTORY_FLAGS)
    for name in (part for part in path.split("/") if part not in ("", ".")):
        step = os.path.join(here, name)
        try:
            below = os.open(name, _DIRECTORY_FLAGS, dir_fd=fd)
        except OSError as error:
            raise _refused(path, _why_not_opened(error, name, fd, step)) from error
        finally:
            os.close(fd)
        here, fd = step, below
    return fd


def _why_not_opened(error: OSError, name: str, parent_fd: int, step: str) -> str:
    if error.errno == errno.ENOENT:
        return f"{step} does not exist; make it, or name another one"
    if error.errno not in (errno.ENOTDIR, errno.ELOOP):
        return f"{os.strerror(error.errno or 0)} at {step}; give this user access to it"
    if stat.S_ISLNK(os.lstat(name, dir_fd=parent_fd).st_mode):
        target = os.readlink(name, dir_fd=parent_fd)
        return f"a symbolic link leads there, {step} to {target}; name the directory itself, without links"
    return f"{step} is not a directory; name one"


def _refused(path: str, found: str) -> ConfigError:
    return ConfigError(f"[nvme] dirs: {path} is not a writable directory on a drive of this machine: {found}")


def _check_directory(path: str, fd: int, free_bytes_min: int) -> None:
    mode = os.fstat(fd).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise _refused(path, "one that everybody may write to, without the sticky bit: chmod +t it, or use one below it")
    is_read_only = os.fstatvfs(fd).f_flag & os.ST_RDONLY
    if is_read_only or not os.access(".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
        raise _refused(path, "a read-only one: mount it writable, or name another one")
    if free_bytes(fd) < free_bytes_min:
        raise _refused(
            path,
            f"one with {format_bytes(free_bytes(fd))} free where {format_bytes(free_bytes_min)} are needed: free some, "
            "or lower [budget] nvme",
        )


def free_bytes(fd: int) -> int:
    """Returns what this user may still take of the file system that an open file or directory lies in."""
    space = os.fstatvfs(fd)
    return space.f_bavail * space.f_frsize


def rooms(directory_fds: Sequence[int], min_free_bytes: int) -> list[int]:
    """Returns the bytes that each directory may take; directories on one drive share its room alike."""
    drives = [os.fstat(fd).st_dev for fd in directory_fds]
    return [
        max(0, free_bytes(fd) - min_free_bytes) // drives.count(drive) for fd, drive in zip(directory_fds, drives, strict=True)
    ]


def open_nameless(path: str, directory_fd: int, *, is_direct: bool, opener: Opener = os.open) -> OpenFile:
    """Returns an empty file of mode 0600 in the directory that has no name, so that nothing remains however the process ends.

    Args:
        is_direct: try O_DIRECT first; if it is refused, the file is buffered and marked so.

    Raises:
        StoreError: neither way works, or others have put something at the file's place.
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
            try:
                _check_ours(fd, path)
                is_memory = is_in_memory(fd)
            except BaseException:
                os.close(fd)
                raise
            if is_memory:
                _logger.warning("%s is a file system in memory: bytes moved there still take host memory", path)
            return _describe(fd, path, is_direct=direct_flag != 0 and not is_memory)
        if failure is None or failure.errno not in _REFUSALS:
            break
    number = failure.errno if failure is not None else None
    if number == errno.EEXIST:
        raise _planted(path, "a randomly drawn name is taken already")
    raise StoreError(
        f"[nvme] dirs: cannot make a file in {path}: {os.strerror(number or 0)}; check that the directory is on a local, "
        "writable drive",
        path=path,
        errno=number,
    )


def _planted(path: str, found: str) -> StoreError:
    return StoreError(
        f"[nvme] dirs: others can reach a file that was made in {path}: {found}; others write into this directory, name one "
        "that only this user may write to",
        path=path,
        errno=errno.EEXIST,
    )


def _check_ours(fd: int, path: str) -> None:
    """Checks what was opened, not its name, and sets the mode, which an umask may have made too small to use."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink or status.st_size:
        raise _planted(
            path,
            f"a file of user {status.st_uid} with mode {status.st_mode:#o}, {status.st_nlink} names and {status.st_size} bytes",
        )
    os.fchmod(fd, _FILE_MODE)


def _open_tmpfile(directory_fd: int, direct_flag: int, opener: Opener) -> int:
    # O_EXCL with O_TMPFILE: the file cannot be given a name later.
    return opener(".", os.O_TMPFILE | _FILE_FLAGS | direct_flag, _FILE_MODE, dir_fd=directory_fd)


def _open_unlinked(directory_fd: int, direct_flag: int, opener: Opener) -> int:
    """Opens the file in a folder that only this user may enter, so that others cannot replace the name meanwhile.

    Removes nothing that it has not made: a planted file stays where it is.
    """
    folder = f".tieroff-{secrets.token_hex(16)}"
    os.mkdir(folder, 0o700, dir_fd=directory_fd)
    try:
        folder_fd = os.open(folder, _DIRECTORY_FLAGS, dir_fd=directory_fd)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # the folder is ours; with any other error it may be another one now
            os.rmdir(folder, dir_fd=directory_fd)
        raise
    try:
        status = os.fstat(folder_fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise FileExistsError(errno.EEXIST, "the folder that was just made is another one now")
        fd = _create_unlinked(folder_fd, direct_flag, opener)
    except FileExistsError:
        raise  # the file there is not ours to remove
    except BaseException:
        os.rmdir(folder, dir_fd=directory_fd)
        raise
    else:
        os.rmdir(folder, dir_fd=directory_fd)
    finally:
        os.close(folder_fd)
    return fd


def _create_unlinked(folder_fd: int, direct_flag: int, opener: Opener) -> int:
    try:
        fd = opener("data", os.O_CREAT | os.O_NOFOLLOW | _FILE_FLAGS | direct_flag, _FILE_MODE, dir_fd=folder_fd)
    except FileExistsError:
        raise
    except OSError:
        _unlink_if_there("data", folder_fd)  # O_DIRECT is refused only after the file was made
        raise
    try:
        os.unlink("data", dir_fd=folder_fd)
    except BaseException:
        os.close(fd)
        raise
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
        from tieroff.storage.native import _native
    except ImportError:
        return PAGE_BYTES, PAGE_BYTES
    memory_bytes, offset_bytes = _native.direct_alignment(fd)
    return memory_bytes or PAGE_BYTES, offset_bytes or PAGE_BYTES


def preallocate(file: OpenFile, offset: int, size_bytes: int) -> None:
    """Makes the file longer with room on the drive behind it, so that no later write or mapped page finds it full.

    Raises:
        OSError: no room (ENOSPC); the file is as long as before.
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
