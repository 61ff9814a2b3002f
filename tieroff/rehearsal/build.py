"""Builds the rehearsed device, C++ against PyTorch's headers, once for each state of its sources, PyTorch and the compiler."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, Protocol

import torch

from tieroff.errors import ConfigError

log = logging.getLogger("tieroff")

_SOURCES = Path(__file__).resolve().parent / "device"
_MODULE = "_rehearsal"
_COMPILERS = ("g++", "clang++", "c++")
_LINKED = ("torch_python", "torch", "torch_cpu", "c10")
# NDEBUG: headers of PyTorch lay out classes by it, and its libraries are built so.
_FLAGS = ("-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-w")


class Native(Protocol):
    """The built module."""

    def register(self, clock: object) -> None:
        """Makes the device PyTorch's "cuda"; `clock` is a `Costs`."""

    def set_machine(self, device_bytes: int, links: list[tuple[float, float]], duplex_share: float) -> None:
        """Sets the device's memory, and (bytes per second, latency in s) of h2d, d2h, nvme_read and nvme_write."""

    def counters(self) -> dict[str, int]:
        """Returns what the device has done since it was loaded: times in ns, bytes per link, and now's and the peak's bytes."""

    def restart_step_peak(self) -> None:
        """A step begins: its peak is what is allocated now."""

    def default_generator(self) -> Any:
        """Returns the device's generator, which draws nothing."""

    def map_host(self, size_bytes: int, is_drive: bool) -> int:
        """Returns the address of memory that is not there until it is written; copies of a drive's take its time."""

    def unmap_host(self, address: int) -> None:
        """Ends it."""

    def forbid_access(self, storage: int, message: str) -> None:
        """Has every access of a storage (its `_cdata`) raise."""


def load() -> Native:
    """Returns the device's module, built where it is not there yet; it is loaded before anything asks PyTorch for CUDA.

    Raises:
        ConfigError: this PyTorch has CUDA of its own, or there is no compiler, or it refused.
    """
    if torch.version.cuda is not None or torch.version.hip is not None:
        raise ConfigError(
            "expected a PyTorch without CUDA, whose place the rehearsed device takes, but this one was built with it: make an "
            f"environment with PyTorch's CPU build, torch {torch.__version__.partition('+')[0]}+cpu, for rehearsals"
        )
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    spec = importlib.util.spec_from_loader(_MODULE, importlib.machinery.ExtensionFileLoader(_MODULE, str(_built())))
    if spec is None or spec.loader is None:
        raise ConfigError(f"the rehearsed device {_built()} cannot be loaded; delete the file, and it is built anew")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_MODULE] = module
    return module


def cache_folder() -> Path:
    """Returns where builds lie: under the environment's folder, or the user's cache where that cannot be written."""
    root = Path(sys.prefix)
    return (root if os.access(root, os.W_OK) else Path.home() / ".cache" / "tieroff") / "rehearsed_device"


def _built() -> Path:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise ConfigError(f"expected a C++ compiler ({' or '.join(_COMPILERS)}) to build the rehearsed device with, found none")
    sources = sorted(_SOURCES.glob("*.cpp"))
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{_MODULE}-{_digest(compiler)}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another rehearsal may build at the same time
        if library.exists():
            return library
        log.warning("building the rehearsed device, once; about a minute")
        unit, unfinished = folder / f"{library.stem}.cpp", library.with_suffix(".part")
        # One unit: reading PyTorch's headers takes longer than all the rest.
        unit.write_text("".join(f'#include "{path}"\n' for path in sources))
        _compile(compiler, unit, unfinished)
        unfinished.rename(library)
    return library


def _digest(compiler: str) -> str:
    version = _run([compiler, "--version"])
    setting = " ".join([torch.__version__, sys.version, str(Path(torch.__file__).parent), *_FLAGS, version])
    texts = [setting.encode(), *(path.name.encode() + path.read_bytes() for path in sorted(_SOURCES.iterdir()))]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _compile(compiler: str, unit: Path, library: Path) -> None:
    root = Path(torch.__file__).resolve().parent
    headers, libraries = root / "include", root / "lib"
    include = [headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include")]
    flags = [*_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
    linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *(f"-l{name}" for name in _LINKED)]
    _run(
        [
            compiler,
            *flags,
            *(part for path in include for part in ("-isystem", str(path))),
            "-shared",
            str(unit),
            *linked,
            "-o",
            str(library),
        ]
    )


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"the rehearsed device was not built: {shlex.join(command)} returned {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return done.stdout
