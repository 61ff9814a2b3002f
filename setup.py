"""Builds the native module; everything else about the package is in pyproject.toml."""

from pathlib import Path

import pybind11
from setuptools import Extension, setup

ROOT = Path(__file__).parent
NATIVE = Path("native")


def _files(pattern: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).glob(pattern))


setup(
    ext_modules=[
        Extension(
            "tieroff._native",
            sources=[*_files("src/*.cpp"), *_files("bindings/*.cpp")],
            depends=_files("include/tieroff/*.hpp"),
            include_dirs=[str(NATIVE / "include"), pybind11.get_include()],
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-pthread",
                "-fvisibility=hidden",
            ],
            extra_link_args=["-pthread"],
            language="c++",
        )
    ]
)
