"""Builds the simulated device once for each state of its sources, outside the source tree."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

HERE = Path(__file__).resolve().parent
MODULE = "_simulated"
# Each part is compiled as one unit: reading PyTorch's headers takes longer than all the rest.
PARTS = ("device", "ops", "binding")
LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")
# The libraries of PyTorch say which ABI they have; -O1: what runs long are PyTorch's own kernels.
# NDEBUG: headers of PyTorch lay out classes by it, and its libraries are built so.
FLAGS = ("-std=c++20", "-O1", "-DNDEBUG", "-g1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter")


def _torch_folder() -> Path:
    return Path(torch.__file__).resolve().parent


def _include_flags() -> list[str]:
    headers = _torch_folder() / "include"
    # pybind11 comes with PyTorch's headers.
    return [
        *("-isystem", str(headers)),
        *("-isystem", str(headers / "torch" / "csrc" / "api" / "include")),
        *("-isystem", sysconfig.get_path("include")),
    ]


def _sources(part: str) -> list[Path]:
    return sorted((HERE / part).glob("*.cpp"))


def _texts(*suffixes: str) -> Iterator[bytes]:
    for part in PARTS:
        for path in sorted((HERE / part).iterdir()):
            if path.suffix in suffixes:
                yield path.name.encode() + path.read_bytes()


def _digest(*texts: bytes) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _setting() -> bytes:
    """What a build depends on besides its sources."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    version = subprocess.run([_compiler(), "--version"], capture_output=True, check=True).stdout
    return " ".join([torch.__version__, sys.version, str(_torch_folder()), abi, *FLAGS]).encode() + version


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} returned {done.returncode}:\n{done.stderr}")


def _compile(part: str, folder: Path, setting: bytes) -> Path:
    own = [path.read_bytes() for path in _sources(part)]
    made = folder / f"{part}-{_digest(setting, *_texts('.hpp'), *own)}.o"
    if made.exists():
        return made
    unit = folder / f"{part}.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in _sources(part)))
    unfinished = made.with_suffix(".part")
    _run([_compiler(), *FLAGS, *_include_flags(), "-c", str(unit), "-o", str(unfinished)])
    unfinished.rename(made)
    return made


def cache_folder() -> Path:
    """Returns where builds lie: under the environment's folder, or the user's cache where that cannot be written."""
    root = Path(sys.prefix)
    if not os.access(root, os.W_OK):
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tieroff"
    return root / "simulated_device"


def built() -> Path:
    """Returns the module's library, built where it is not there yet.

    Raises:
        RuntimeError: the compiler refused; with what it said.
    """
    setting = _setting()
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{MODULE}-{_digest(setting, *_texts('.hpp', '.cpp'))}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of one test run may come here at once
        if library.exists():
            return library
        with ThreadPoolExecutor(min(len(PARTS), os.cpu_count() or 1)) as pool:
            objects = list(pool.map(lambda part: _compile(part, folder, setting), PARTS))
        libraries = _torch_folder() / "lib"
        unfinished = library.with_suffix(".part")
        linked = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", *(f"-l{name}" for name in LIBRARIES)]
        _run([_compiler(), "-shared", *map(str, objects), *linked, "-o", str(unfinished)])
        unfinished.rename(library)
    return library


def load() -> ModuleType:
    """Returns the module, built where it is not there yet."""
    spec = importlib.util.spec_from_loader(MODULE, importlib.machinery.ExtensionFileLoader(MODULE, str(built())))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
