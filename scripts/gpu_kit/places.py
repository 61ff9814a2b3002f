"""Where the kit finds things."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINES = ROOT / "configs" / "machines"
RESULTS = ROOT / "docs" / "results"
