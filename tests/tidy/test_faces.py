"""The tests use what tieroff offers in public: a private name is free to change without a test that fails."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

OTHERS = {"_native", "_parameters", "_models", "_version", "_checkpoint_internal"}
"""The compiled module, and names of torch's modules, tensors and hooks and of accelerate that tieroff defines too."""

OPEN = frozenset(
    """
    _VECTOR_MATH _managed _items_of _others_bytes _pool _readers _ready _staging _start_out _steps _writers
    """.split()  # noqa: SIM905  as words, it is read and changed with ease
)
"""Private names that tests still use. None is added; one that gets a public face leaves this list."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Yields every name that a file defines: functions, classes, fields, variables, and attributes that it assigns."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr  # not what is set on objects of others, such as a module's `_parameters`


def private_names(paths: list[Path]) -> set[str]:
    """Returns the private names that some files define."""
    return {name for path in paths for name in defined_names(ast.parse(path.read_text())) if is_private(name)}


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the name of every attribute read, name imported from tieroff, and attribute patched by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tieroff":
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"setattr", "getattr", "patch", "object"}:
            texts = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
            yield from ((node.lineno, text.split(".")[-1]) for text in texts)


def reached(text: str, private: set[str]) -> list[tuple[int, str]]:
    """Returns the lines of a test that use a private name which the test does not define itself."""
    tree = ast.parse(text)
    own = set(defined_names(tree))
    return [(line, name) for line, name in used_names(tree) if name in private and name not in own]


def test_tests_use_no_private_name(project: Path) -> None:
    private = private_names(sorted((project / "tieroff").rglob("*.py"))) - OTHERS
    found = [
        f"{path.relative_to(project)}:{line}: {name}"
        for path in sorted((project / "tests").rglob("*.py"))
        for line, name in reached(path.read_text(), private)
    ]
    assert [line for line in found if line.rpartition(" ")[2] not in OPEN] == []
    assert {line.rpartition(" ")[2] for line in found} == OPEN


@pytest.mark.parametrize(
    "text",
    [
        "executor._room",
        "from tieroff.runtime.engine import _room",
        "monkeypatch.setattr(engine, '_room', 3)",
        "monkeypatch.setattr('tieroff.runtime.engine._room', 3)",
        "getattr(engine, '_room')",
    ],
)
def test_a_private_name_is_found(text: str) -> None:
    assert reached(text, {"_room"}) == [(1, "_room")]


@pytest.mark.parametrize(
    "text", ["executor.room", "self._other", "class Mine:\n    def f(self): self._room = self._room", "from torch import _room"]
)
def test_a_name_of_its_own_or_of_others_is_left_alone(text: str) -> None:
    assert reached(text, {"_room"}) == []
