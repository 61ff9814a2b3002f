"""Builds the native module; everything else about the package is in pyproject.toml."""

import sys
import tempfile
from pathlib import Path

import pybind11
from pybind11.setup_helpers import ParallelCompile
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).parent
NATIVE = Path("native")

# Of the calls that the module makes, the ones that liburing got last (2.3).
LIBURING_PROBE = """
#include <liburing.h>
int main() {
  io_uring ring{};
  (void)IORING_SETUP_DEFER_TASKRUN;
  return io_uring_ring_dontfork(&ring) + io_uring_register_ring_fd(&ring) + io_uring_submit_and_get_events(&ring);
}
"""


class BuildNative(build_ext):
    """With io_uring where liburing and its header are there; without, the engine `uring` says that it is missing."""

    def build_extension(self, extension: Extension) -> None:
        """Builds one module."""
        if IS_LINUX and self._has_liburing():
            extension.define_macros.append(("TIEROFF_WITH_LIBURING", None))
            extension.libraries.append("uring")
        super().build_extension(extension)

    def _has_liburing(self) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text(LIBURING_PROBE)
            try:
                # Under "/" the object lies beside its source, whose whole path the compiler object appends.
                objects = self.compiler.compile([str(source)], output_dir="/", extra_postargs=["-std=c++20"])
                self.compiler.link_executable(objects, "probe", output_dir=folder, libraries=["uring"], target_lang="c++")
            except (CompileError, LinkError):
                return False
            return True


def _files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).glob(pattern))


# What the planner uses builds anywhere; the rest calls the Linux kernel.
PLANNER = ("layout", "search", "simulate", "sharding")  # folders of native/src
BINDINGS = ("module", "layout", "simulate", "search", "improve", "sharding")


# Updates of parameters say themselves where a product and a sum are rounded once: the compiler is to do as written.
FLAGS = ["-std=c++20", "-O3", "-Wall", "-Wextra", "-Werror", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]

IS_LINUX = sys.platform == "linux"


def _sources() -> list[str]:
    if IS_LINUX:
        return [*_files("src/*/*.cpp"), *_files("bindings/*.cpp")]
    sources = [name for folder in PLANNER for name in _files(f"src/{folder}/*.cpp")]
    return [*sources, *(name for name in _files("bindings/*.cpp") if Path(name).stem.startswith(BINDINGS))]


# setuptools compiles one file after the other: two minutes on one core, for which all are there.
ParallelCompile("TIEROFF_BUILD_JOBS").install()

setup(
    cmdclass={"build_ext": BuildNative},
    ext_modules=[
        Extension(
            "tieroff._native",
            sources=_sources(),
            depends=[*_files("include/tieroff/**/*.hpp"), *_files("bindings/*.hpp")],
            define_macros=[("TIEROFF_WITH_STORAGE", None)] if IS_LINUX else [],
            include_dirs=[str(NATIVE / "include"), pybind11.get_include()],
            extra_compile_args=FLAGS,
            extra_link_args=["-pthread"],
            language="c++",
        )
    ],
)
