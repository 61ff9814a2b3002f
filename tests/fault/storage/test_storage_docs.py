"""docs/faults.md names a test for every fault: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path


def named_tests(text: str) -> list[tuple[str, list[str]]]:
    """Returns what the last column of the tables names: a file, and parts of the names of tests in it."""
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "| what others"))]
    found = []
    for row in rows:
        cell = re.sub(r"\([^)]*\)", "", row.rstrip(" |").rsplit(" | ", 1)[1])
        parts = re.findall(r"`([^`]+)`(?:: ([^`;]+))?", cell)
        assert parts, f"no test is named: {row}"
        found += [(file, [name.strip() for name in names.split(",") if name.strip()]) for file, names in parts]
    return found


def test_every_fault_of_the_docs_has_its_test(project: Path) -> None:
    named = named_tests((project / "docs/faults.md").read_text())
    assert len(named) > 40
    for file, names in named:
        (path,) = (project / "tests").rglob(file if file.endswith(".py") else f"test_storage_{file}.py")
        source = path.read_text()
        for name in names:
            assert re.search(rf"^def test_\w*{re.escape(name)}", source, re.MULTILINE), f"{path} has no test {name}"
