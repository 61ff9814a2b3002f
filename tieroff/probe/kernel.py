"""What the kernel and the drivers offer for I/O: io_uring, and ways between a GPU and a drive."""

from __future__ import annotations

import ctypes
import errno
import gzip
import os
import platform
import re
from pathlib import Path

IO_URING_SETUP = 425  # the same number on every architecture
_PARAMS_BYTES = 120

P2P_KERNEL = (6, 2)
P2P_CUDA = (12, 8)


def uring_refusal(root: Path = Path("/")) -> str:
    """Returns why io_uring cannot be used by this process, or "". Found by asking for a ring, which is closed again."""
    number = setup_errno()
    if number == 0:
        return ""
    try:
        disabled = (root / "proc/sys/kernel/io_uring_disabled").read_text().strip()
    except OSError:
        disabled = "absent"
    if number == errno.ENOSYS:
        return "io_uring_setup: the kernel has none, or a seccomp profile hides it (ENOSYS)"
    if number in (errno.EPERM, errno.EACCES):
        name = errno.errorcode[number]
        if disabled in ("1", "2"):
            return f"io_uring_setup: {name}, kernel.io_uring_disabled is {disabled}: an administrator may set it to 0"
        return f"io_uring_setup: {name}, kernel.io_uring_disabled is {disabled}: a seccomp profile, such as a container's"
    if number == errno.ENOMEM:
        return "io_uring_setup: ENOMEM, the limit on locked memory is too low (ulimit -l)"
    return f"io_uring_setup: {os.strerror(number)} ({errno.errorcode.get(number, number)})"


def setup_errno() -> int:
    """Asks for a ring of one entry; returns the errno, 0 where there is one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    fd = libc.syscall(ctypes.c_long(IO_URING_SETUP), ctypes.c_long(1), ctypes.create_string_buffer(_PARAMS_BYTES))
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def nvidia_fs(root: Path = Path("/")) -> tuple[bool, str]:
    """Returns whether the driver nvidia-fs is loaded, and its version or what is missing."""
    version = root / "proc/driver/nvidia-fs/version"
    if version.exists():
        return True, version.read_text().strip()
    if (root / "sys/module/nvidia_fs").exists():
        return True, "loaded"
    return False, "the module nvidia_fs is not loaded"


def p2pdma(cuda: str | None, root: Path = Path("/"), release: str = "") -> tuple[bool, str]:
    """Returns whether a GPU and a drive may exchange data without nvidia-fs, and what is missing for it.

    Args:
        cuda: version of CUDA, or None without one.
        root: where /proc and /boot are found.
        release: the kernel's, or "" for the one that runs.
    """
    release = release or platform.release()
    missing = []
    if _numbers(release) < P2P_KERNEL:
        missing.append(f"a kernel from {_text(P2P_KERNEL)} on (this is {release})")
    if _has_kernel_option("CONFIG_PCI_P2PDMA", release, root) is False:
        missing.append("a kernel with CONFIG_PCI_P2PDMA")
    if cuda is None or _numbers(cuda) < P2P_CUDA:
        missing.append(f"CUDA from {_text(P2P_CUDA)} on ({'this is ' + cuda if cuda else 'there is none'})")
    try:
        driver = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        driver = ""
    if "Open Kernel Module" not in driver:
        missing.append("the open driver of NVIDIA" + (" (another one is loaded)" if driver else ""))
    return not missing, "missing: " + ", ".join(missing) if missing else "kernel, driver and CUDA have what it needs"


def cufile_compatibility(root: Path = Path("/")) -> tuple[bool, str]:
    """Returns whether cuFile may fall back to ordinary I/O through host memory, and which file says so."""
    path = root / "etc/cufile.json"
    try:
        text = path.read_text()
    except OSError:
        return True, "allowed, its default: there is no /etc/cufile.json"
    found = re.search(r'^\s*"allow_compat_mode"\s*:\s*(true|false)', text, re.MULTILINE)
    is_allowed = found is None or found[1] == "true"
    return is_allowed, f"{'allowed' if is_allowed else 'not allowed'} by /etc/cufile.json"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _has_kernel_option(name: str, release: str, root: Path) -> bool | None:
    """Returns whether the kernel was built with an option; None where its configuration cannot be read."""
    for path in (root / "proc/config.gz", root / "boot" / f"config-{release}"):
        try:
            content = path.read_bytes()
        except OSError:
            continue
        text = gzip.decompress(content) if path.suffix == ".gz" else content
        return f"{name}=y".encode() in text.splitlines()
    return None
