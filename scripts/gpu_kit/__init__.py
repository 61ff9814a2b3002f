"""What `scripts/gpu_evidence.py` runs: its rows, the models they train, and the ways in which they train them.

Importing it makes the modules in `scripts/evidence` importable, which have the model of the curve.
"""

import sys
from pathlib import Path

# A script of `scripts` has only its own folder on the module search path.
_EVIDENCE = str(Path(__file__).resolve().parents[1] / "evidence")
if _EVIDENCE not in sys.path:
    sys.path.append(_EVIDENCE)
