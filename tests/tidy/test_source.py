"""Rules on the source text, for what no linter knows."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LINES_MAX = 450
FUNCTION_LINES_MAX = 80
BROAD = {"Exception", "BaseException"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
UNWANTED_WORDS = {"manager", "handler", "helper", "helpers", "utils", "util", "swapper", "info"}
ENVIRONMENT = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CONFIG_VARIABLE"}
MARKS = ("TO" + "DO", "FIX" + "ME", "X" * 3)

Rule = Callable[[ast.AST, Path], str]


def sources(project: Path, *folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((project / folder).rglob("*.py"))


def called_name(node: ast.AST) -> str:
    """Returns the dotted name of what is called, or an empty text."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def is_silent(statement: ast.stmt) -> bool:
    """True for `pass`, `...` and a bare call of a log method."""
    if isinstance(statement, ast.Pass):
        return True
    if not isinstance(statement, ast.Expr):
        return False
    return isinstance(statement.value, ast.Constant) or called_name(statement.value).split(".")[-1] in LOG_METHODS


def swallows_errors(node: ast.AST, path: Path) -> str:
    if not isinstance(node, ast.ExceptHandler) or not all(is_silent(statement) for statement in node.body):
        return ""
    return "an error is swallowed" if node.type is None or ast.unparse(node.type) in BROAD else ""


def pickles(node: ast.AST, path: Path) -> str:
    if isinstance(node, ast.Import) and any(alias.name == "pickle" for alias in node.names):
        return "imports pickle"
    if isinstance(node, ast.ImportFrom) and node.module == "pickle":
        return "imports pickle"
    if isinstance(node, ast.Call) and called_name(node) == "torch.load":
        safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
        return "" if safe else "torch.load without weights_only=True"
    return ""


def deletes_trees(node: ast.AST, path: Path) -> str:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "uses rmtree" if name == "rmtree" else ""


def guards_by_python(node: ast.AST, path: Path) -> str:
    """Ctrl-C between its entry in Python and the block leaves a guard that changes modes when it dies."""
    is_guard = path.parts[:2] == ("tieroff", "runtime") and called_name(node) == "torch.inference_mode"
    return "calls torch.inference_mode, where outside_inference is" if is_guard else ""


def prints(node: ast.AST, path: Path) -> str:
    is_edge = "cli" in path.parts or path.parts[0] in {"scripts", "benchmarks"}
    return "prints" if called_name(node) == "print" and not is_edge else ""


def reads_environment(node: ast.AST, path: Path) -> str:
    if path.parts[0] != "tieroff":
        return ""
    if isinstance(node, ast.Call) and called_name(node) in {"os.environ.get", "os.getenv"}:
        name = ast.unparse(node.args[0]).strip("'\"")
        return "" if name in ENVIRONMENT else f"reads the environment variable {name}"
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
        name = ast.unparse(node.slice).strip("'\"")
        return "" if name in ENVIRONMENT else f"uses the environment variable {name}"
    return ""


def has_unwanted_word(node: ast.AST, path: Path) -> str:
    if not isinstance(node, ast.ClassDef):
        return ""
    word = next((word for word in UNWANTED_WORDS if node.name.lower().endswith(word)), "")
    return f"class {node.name} is a {word}" if word else ""


def is_long_function(node: ast.AST, path: Path) -> str:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return ""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return f"function {node.name} has {lines} lines" if lines > FUNCTION_LINES_MAX else ""


RULES: tuple[Rule, ...] = (
    swallows_errors,
    pickles,
    deletes_trees,
    guards_by_python,
    prints,
    reads_environment,
    has_unwanted_word,
    is_long_function,
)


def violations(text: str, path: Path) -> list[str]:
    """Returns one line per broken rule; `path` is relative to the project."""
    found = [
        f"{path}:{getattr(node, 'lineno', 0)}: {why}"
        for node in ast.walk(ast.parse(text))
        for rule in RULES
        if (why := rule(node, path))
    ]
    lines = text.count("\n")
    if lines > LINES_MAX:
        found.append(f"{path}: {lines} lines")
    if path.stem in UNWANTED_WORDS:
        found.append(f"{path}: the file's name says nothing")
    return found


def test_source_keeps_the_rules(project: Path) -> None:
    found = [
        line
        for path in sources(project, "tieroff", "scripts", "benchmarks")
        for line in violations(path.read_text(), path.relative_to(project))
    ]
    assert found == []


def test_no_open_marks_are_left(project: Path) -> None:
    paths = [*sources(project, "tieroff", "scripts", "benchmarks", "tests"), project / "setup.py"]
    paths += [path for path in (project / "native").rglob("*") if path.suffix in {".cpp", ".hpp"}]
    found = [
        f"{path.relative_to(project)}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(mark in line for mark in MARKS)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("try:\n    f()\nexcept:\n    pass", "an error is swallowed"),
        ("try:\n    f()\nexcept Exception:\n    ...", "an error is swallowed"),
        ("try:\n    f()\nexcept Exception as error:\n    log.warning(error)", "an error is swallowed"),
        ("import pickle", "imports pickle"),
        ("from pickle import loads", "imports pickle"),
        ("torch.load(path)", "torch.load without weights_only=True"),
        ("torch.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("shutil.rmtree(path)", "uses rmtree"),
        ("print(3)", "prints"),
        ("os.environ.get('HOME')", "reads the environment variable HOME"),
        ("os.environ['OMP_NUM_THREADS'] = '1'", "uses the environment variable OMP_NUM_THREADS"),
        ("class TensorManager:\n    pass", "class TensorManager is a manager"),
        ("def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX, f"function f has {FUNCTION_LINES_MAX + 1} lines"),
        ("x = 1\n" * (LINES_MAX + 1), f"{LINES_MAX + 1} lines"),
    ],
)
def test_a_broken_rule_is_found(text: str, told: str) -> None:
    found = violations(text, Path("tieroff/core/plan.py"))
    assert [line.split(": ", 1)[1] for line in found] == [told]


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    f()\nexcept OSError:\n    pass",
        "try:\n    f()\nexcept Exception:\n    raise",
        "torch.load(path, weights_only=True)",
        "os.environ.get('LOCAL_RANK')",
        "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1),
    ],
)
def test_what_the_rules_allow_is_left_alone(text: str) -> None:
    assert violations(text, Path("tieroff/core/plan.py")) == []


def test_the_runtime_enters_no_inference_mode_by_python() -> None:
    text = "with torch.inference_mode(False):\n    f()"
    assert len(violations(text, Path("tieroff/runtime/engine.py"))) == 1
    assert violations(text, Path("tieroff/study/plots.py")) == []
