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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch

from tieroff.errors import ConfigError

log = logging.getLogger("tieroff")

_MODULE = "_rehearsal"
_LINKED = ("torch_python", "torch", "torch_cpu", "c10")
# NDEBUG: headers of PyTorch lay out classes by it, and its libraries are built so. -O1: what runs long are PyTorch's kernels.
_FLAGS = ("-std=c++20", "-O1", "-DNDEBUG", "-fPIC")


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


@dataclass(frozen=True, slots=True)
class Extension:
    """A module in C++ against PyTorch's headers, built where it is used first.

    Attributes:
        name: the module's.
        parts: folders of sources. Each is compiled as one unit, since reading PyTorch's headers takes longer than all the rest.
        cache: name of the folder that keeps builds; see `cache_folder`.
        flags: of the compiler, besides those that PyTorch asks for.
        compilers: the first of them that is there is taken.
        notice: what is logged when a build begins.
    """

    name: str
    parts: tuple[Path, ...]
    cache: str
    flags: tuple[str, ...]
    compilers: tuple[str, ...] = ("g++", "clang++", "c++")
    notice: str = ""

    def load(self) -> ModuleType:
        """Returns the module; a second call returns it again.

        Raises:
            ConfigError: there is no compiler, or it refused.
        """
        if self.name in sys.modules:
            return sys.modules[self.name]
        path = str(self.built())
        spec = importlib.util.spec_from_loader(self.name, importlib.machinery.ExtensionFileLoader(self.name, path))
        if spec is None or spec.loader is None:
            raise ConfigError(f"{path} cannot be loaded; delete the file, and it is built anew")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[self.name] = module
        return module

    def built(self) -> Path:
        """Returns the library, built where it is not there yet.

        Raises:
            ConfigError: as `load` does.
        """
        compiler = next(filter(None, map(shutil.which, self.compilers)), None)
        if compiler is None:
            raise ConfigError(f"expected a C++ compiler ({' or '.join(self.compilers)}) to build {self.name} with, found none")
        setting = self._setting(compiler)
        folder = cache_folder(self.cache)
        folder.mkdir(parents=True, exist_ok=True)
        library = folder / f"{self.name}-{_digest(setting, *self._texts('.hpp', '.cpp'))}.so"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may build at the same time
            if not library.exists():
                if self.notice:
                    log.warning(self.notice)
                self._build(compiler, setting, library)
        return library

    def _build(self, compiler: str, setting: bytes, library: Path) -> None:
        with ThreadPoolExecutor(min(len(self.parts), os.cpu_count() or 1)) as pool:
            objects = list(pool.map(lambda part: self._compile(compiler, part, library.parent, setting), self.parts))
        libraries = _torch_folder() / "lib"
        linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *(f"-l{name}" for name in _LINKED)]
        unfinished = library.with_suffix(".part")
        _run([compiler, "-shared", *map(str, objects), *linked, "-o", str(unfinished)])
        unfinished.rename(library)

    def _compile(self, compiler: str, part: Path, folder: Path, setting: bytes) -> Path:
        sources = sorted(part.glob("*.cpp"))
        own = [path.read_bytes() for path in sources]
        made = folder / f"{part.name}-{_digest(setting, *self._texts('.hpp'), *own)}.o"
        if not made.exists():
            unit, unfinished = folder / f"{made.stem}.cpp", made.with_suffix(".part")
            unit.write_text("".join(f'#include "{path}"\n' for path in sources))
            headers = _torch_folder() / "include"  # pybind11 comes with them
            include = (headers, headers / "torch" / "csrc" / "api" / "include", sysconfig.get_path("include"))
            named = [text for path in include for text in ("-isystem", str(path))]
            _run([compiler, *_FLAGS, *self.flags, _abi(), *named, "-c", str(unit), "-o", str(unfinished)])
            unfinished.rename(made)
        return made

    def _setting(self, compiler: str) -> bytes:
        """What a build depends on besides its sources."""
        version = _run([compiler, "--version"])
        known = [torch.__version__, sys.version, str(_torch_folder()), _abi(), *_FLAGS, *self.flags, version]
        return " ".join(known).encode()

    def _texts(self, *suffixes: str) -> Iterator[bytes]:
        for part in self.parts:
            for path in sorted(part.iterdir()):
                if path.suffix in suffixes:
                    yield path.name.encode() + path.read_bytes()


_DEVICE = Extension(
    _MODULE,
    (Path(__file__).resolve().parent / "device",),
    "rehearsed_device",
    ("-fvisibility=hidden", "-w"),
    notice="building the rehearsed device, once; about a minute",
)


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
    return cast(Native, _DEVICE.load())


def cache_folder(name: str) -> Path:
    """Returns where builds lie: under the environment's folder, or the user's cache where that cannot be written."""
    root = Path(sys.prefix)
    return (root if os.access(root, os.W_OK) else Path.home() / ".cache" / "tieroff") / name


def _torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def _abi() -> str:
    return f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"  # as PyTorch's libraries have it


def _digest(*texts: bytes) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"a module was not built: {shlex.join(command)} returned {done.returncode}:\n{done.stderr[-4000:]}; "
            "another compiler may take it, or another build of PyTorch"
        )
    return done.stdout
