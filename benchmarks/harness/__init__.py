"""What the benchmarks share. Importing it makes the modules in `scripts` importable, which the benchmarks run."""

import sys
from pathlib import Path

# A benchmark is started by its path, so only its own folder is on the module search path.
_SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
if _SCRIPTS not in sys.path:
    sys.path.append(_SCRIPTS)
