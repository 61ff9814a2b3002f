"""The rooms inside a package have floors, no module imports itself round a circle, and no folder is crowded."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

FILES_MAX = 12
CROWDED = (
    "tieroff",
    "benchmarks",
    "scripts",
    "tests",
    "native",
    "examples",
    "configs",
)  # pages of docs are grouped by mkdocs.yml

# From the ground up: a room imports from those before it. A file of its own in the package is a room too.
FLOORS = {
    "core": (
        "ranks place tensor lifetime machine trace plan sharding buckets timeline history explain schedule check seams io"
    ),
    "storage": "memory limits native locks buffers completion store extents homes engines transfers space host nvme",
    "planner": (
        "native simulate problem bounds layout extended layers user_code foresight policy auto policies least make_plan "
        "predict beside"
    ),
    "runtime": (
        "settings tensors movable signal_safety collectives backend items resources step execution hooks optimizer executor "
        "managed lifecycle reporting engine process_memory"
    ),
    "session": "device ranks links rank_budget shared budgets budget_messages workshop planning given_plan build",
    "study": "profiles policies compare sharding",
    "rehearsal": "build costs cuda below figures script rehearse command",
}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING"


def nodes_that_run(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a tree's nodes but those under `if TYPE_CHECKING`."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not is_for_types(child):
            yield from nodes_that_run(child)


def module_of(root: Path, name: str) -> Path | None:
    """Returns the file of a module, if it is one below `root`."""
    path = root.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    return path / "__init__.py" if (path / "__init__.py").is_file() else None


def imported(path: Path, root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the line and the file of every module below `root` that a file imports when it runs, at any depth."""
    parts = path.relative_to(root).with_suffix("").parts
    for node in nodes_that_run(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: len(parts) - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # A name that is a module of the package stands for that module alone, not for the package too.
            names = [f"{module}.{alias.name}" if module_of(root, f"{module}.{alias.name}") else module for alias in node.names]
        for name in dict.fromkeys(names):
            if (found := module_of(root, name)) is not None and found != path:
                yield getattr(node, "lineno", 0), found


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def arrows_up(package: Path, floors: Sequence[str]) -> list[str]:
    """Returns one line per import from a room to one that is not below it, and per room without a floor."""
    broken: list[str] = []
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        if room == "__init__":
            continue
        if room not in floors:
            broken.append(f"{package.name}: {room} has no floor")
            continue
        for line, target in imported(path, package.parent.parent):
            if not target.is_relative_to(package) or (other := room_of(target, package)) in (room, "__init__"):
                continue
            if other in floors and floors.index(other) > floors.index(room):
                broken.append(f"{path.relative_to(package.parent)}:{line}: {room} imports {other}")
    return list(dict.fromkeys(broken))


def circles(package: Path) -> list[list[str]]:
    """Returns the groups of modules that import each other, directly or by way of others."""
    graph = {path: {found for _, found in imported(path, package.parent)} for path in package.rglob("*.py")}
    reach: dict[Path, set[Path]] = {}
    for start in graph:
        seen, open_ = set[Path](), list(graph[start])
        while open_:
            path = open_.pop()
            if path not in seen and path in graph:
                seen.add(path)
                open_.extend(graph[path])
        reach[start] = seen
    groups = defaultdict(list)
    for path in sorted(graph):
        if path in reach[path]:
            members = frozenset(other for other in reach[path] if path in reach[other])
            groups[members].append(str(path.relative_to(package.parent)))
    return list(groups.values())


def crowded(project: Path, folders: tuple[str, ...]) -> list[str]:
    """Returns the folders with more than FILES_MAX files of source."""
    paths = [path for folder in folders for path in (project / folder).rglob("*") if path.is_file()]
    made = {"__pycache__", "build", "node_modules"}
    sources = [path for path in paths if path.suffix not in (".so", ".pyc") and not made & set(path.parts)]
    counts = Counter(str(path.parent.relative_to(project)) for path in sources)
    return [f"{folder}: {count} files" for folder, count in sorted(counts.items()) if count > FILES_MAX]


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_downwards(project: Path, package: str) -> None:
    assert arrows_up(project / "tieroff" / package, FLOORS[package].split()) == []


def test_no_module_imports_itself_round_a_circle(project: Path) -> None:
    assert circles(project / "tieroff") == []


def test_no_folder_is_crowded(project: Path) -> None:
    assert crowded(project, CROWDED) == []


def package_of(folder: Path, **files: str) -> Path:
    """Writes a package `top.deep` of rooms `low` and `high`, with the text of some files."""
    package = folder / "top" / "deep"
    for name in ("__init__", "low/__init__", "low/a", "low/b", "high/__init__", "high/c"):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files.get(path.stem, ""))
    (folder / "top/__init__.py").write_text("")
    return package


def test_modules_of_tests_have_names_of_their_own(project: Path) -> None:
    """Pytest imports them by these alone, and refuses the second one: in a run of all folders, and in no other."""
    names = Counter(path.name for path in (project / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_an_arrow_up_and_a_room_without_a_floor_are_found(tmp_path: Path) -> None:
    package = package_of(tmp_path, a="from top.deep.high import c", c="from top.deep.low import a")
    assert arrows_up(package, ("low", "high")) == ["deep/low/a.py:1: low imports high"]
    assert arrows_up(package, ("low",)) == ["deep: high has no floor"]


def test_a_circle_is_found_across_lazy_and_relative_imports(tmp_path: Path) -> None:
    package = package_of(
        tmp_path, a="def f():\n    from .b import x", b="import top.deep.low.a", c="from top.deep.low import a"
    )
    assert circles(package.parent) == [["top/deep/low/a.py", "top/deep/low/b.py"]]


def test_imports_for_types_alone_make_no_arrow(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from top.deep.high.c import x"
    package = package_of(tmp_path, a=text, c="from top.deep.low.a import y")
    assert arrows_up(package, ("low", "high")) == []
    assert circles(package.parent) == []


def test_a_crowded_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for index in range(FILES_MAX):
        (tmp_path / "src" / f"{index}.py").write_text("")
    assert crowded(tmp_path, ("src",)) == []
    (tmp_path / "src" / "more.cpp").write_text("")
    assert crowded(tmp_path, ("src",)) == [f"src: {FILES_MAX + 1} files"]
