"""The rooms of the planner: an import never points to a room above, so there is no circle between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tidy.test_layers import imported_modules

ROOMS = (
    *("foresight", "user_code", "simulate", "layout", "problem", "bounds", "extended", "layers", "sharding"),
    *("policy", "auto", "policies", "make_plan", "compare"),
)
"""Folders and files of tieroff/planner, each above those that it may import."""


def upward_imports(package: Path) -> Iterator[str]:
    """Yields a line per import of a room that is not below the file's own, and per room that is not in ROOMS."""
    for path in sorted((package / "planner").rglob("*.py")):
        room = path.relative_to(package / "planner").parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        if room not in ROOMS:
            yield f"{room} is no known room"
            continue
        for _, module in imported_modules(path, package):
            parts = module.split(".")
            target = parts[2] if parts[:2] == [package.name, "planner"] and len(parts) > 2 else ""
            if target in ROOMS[ROOMS.index(room) + 1 :]:
                yield f"{room} imports {target}"


def test_rooms_of_the_planner_import_only_those_below(project: Path) -> None:
    assert sorted(set(upward_imports(project / "tieroff"))) == []


@pytest.mark.parametrize(
    ("file", "line", "told"),
    [
        ("problem/runs.py", "from tieroff.planner.auto.select import Score", "problem imports auto"),
        ("auto/greedy.py", "from tieroff.planner import policies", "auto imports policies"),
        ("extra.py", "", "extra is no known room"),
    ],
)
def test_an_import_of_a_room_above_is_found(tmp_path: Path, file: str, line: str, told: str) -> None:
    path = tmp_path / "tieroff/planner" / file
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert set(upward_imports(tmp_path / "tieroff")) == {told}
