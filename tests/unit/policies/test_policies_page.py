"""docs/writing-a-policy.md, followed to the letter: the file it shows is written where it says, compares, plans and trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tieroff.core.io.json_files import load_plan

_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_POLICIES = "tieroff/study/policies"


@pytest.fixture
def checkout(project: Path, tmp_path: Path) -> Path:
    """Returns a checkout whose folder of policies can be written to; all else in it are links to the real one."""
    root = tmp_path / "checkout"
    for folder in ("", "tieroff", "tieroff/study", _POLICIES):
        (root / folder).mkdir(exist_ok=True)
        for entry in (project / folder).iterdir():
            if entry.name not in {"tieroff", "study", "policies", "__pycache__"} and not entry.name.startswith("."):
                (root / folder / entry.name).symlink_to(entry)
    shim = root / "bin/tieroff"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tieroff "$@"\n')
    shim.chmod(0o755)
    return root


def test_the_page_on_writing_a_policy_is_true_to_the_letter(checkout: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}"}
    said = []
    for language, title, text in _BLOCK.findall((checkout / "docs/writing-a-policy.md").read_text(encoding="utf-8")):
        if title:
            (checkout / title).write_text(text)
        if title.startswith("tieroff/"):
            continue
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, title]
        run = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, f"{text}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        said.append(run.stdout)
    compared, trained = said
    assert all(re.search(rf"{policy}\W+[\d.]+ (m|u)?s\b", compared) for policy in ("longest", "greedy"))
    assert trained.split("\n")[:2] == ["longest planned moved", "equal"]
    plan = load_plan(checkout / "longest.json")
    assert plan.policy == "longest" and plan.transfers
