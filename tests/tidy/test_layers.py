"""The arrows between the layers: an import never points up or sideways."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

EDGES = {"config", "device_budget", "errors", "parts", "recomputation", "uncompiled", "units"}
BELOW = {
    "errors": set[str](),
    "parts": set[str](),
    "recomputation": set[str](),
    "uncompiled": set[str](),
    "units": {"errors"},
    "device_budget": {"errors", "units"},
    "config": {"device_budget", "errors", "units"},
    "core": {"errors", "units"},
    "storage": {"core", *EDGES},
    "updates": {"core", *EDGES},
    "tracing": {"core", *EDGES},
    "planner": {"core", *EDGES},
    "report": {"core", *EDGES},
    "probe": {"core", "storage", "updates", *EDGES},
    "runtime": {"core", "storage", "updates", *EDGES},
    "session": {"tracing", "planner", "runtime", "probe", "report", "storage", "updates", "core", *EDGES},
}
BELOW["partition"] = BELOW["session"]
BELOW["api"] = {"session", "partition", *BELOW["session"]}
BELOW["checkpoint"] = {"api", *BELOW["api"]}
BELOW["study"] = {"partition", "tracing", "planner", "report", "core", *EDGES}
BELOW["__init__"] = {"api", "checkpoint", "integrations", *BELOW["api"]}  # what it loads when it is named
BELOW["launch"] = {"api", *BELOW["api"]}
BELOW["rehearsal"] = {"session", *BELOW["session"]}
BELOW["cli"] = {"__init__", "api", "launch", "rehearsal", "study", *BELOW["api"]}
BELOW["__main__"] = {"cli"}
BELOW["integrations"] = {"api", *BELOW["api"]}

WITHOUT_TORCH = {"errors", "units", "device_budget", "config", "core", "planner", "storage", "updates"}
STUDY_WITHOUT_TORCH = ("policies", "compare")  # they run in the planning process, or read what it made
WITH_NATIVE = {"storage", "planner", "updates", "study"}
BY_NAME = "planner/policies.py"
"""The one module that names the room `study` in a text: a config names a published policy, and it is looked up there."""


def layer_of(path: Path, package: Path) -> str:
    return path.relative_to(package).parts[0].removesuffix(".py")


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the full dotted name of every module that a file imports, at any depth.

    `from a import b` yields both `a` and `a.b`, since b may be a module.
    """
    parts = path.relative_to(package.parent).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def imported_layers(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the layer of every import from the package itself."""
    names = {layer_of(found, package) for found in package.iterdir() if not found.name.startswith("_native")}
    for line, module in imported_modules(path, package):
        parts = module.split(".")
        if parts[0] == package.name:
            layer = parts[1] if len(parts) > 1 and parts[1] in names else "__init__"
            # `from tieroff import core` yields `tieroff` too, which says nothing
            if layer != "__init__" or (len(parts) > 1 and parts[1] != "_native"):
                yield line, layer


def is_without_torch(path: Path, package: Path) -> bool:
    layer, *rest = path.relative_to(package).parts
    return layer.removesuffix(".py") in WITHOUT_TORCH or (layer == "study" and rest[0] in STUDY_WITHOUT_TORCH)


def loaded_at_once(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yields what importing a module runs, but what stands under `if TYPE_CHECKING`."""
    for node in tree.body:
        if not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield node


def study_in_training(package: Path) -> list[str]:
    """Returns one line per place that ties the room `study` to training: an import, or its name in a text."""
    found: list[str] = []
    study = f"{package.name}.study"
    for path in sorted(package.rglob("*.py")):
        where, layer, tree = path.relative_to(package), layer_of(path, package), ast.parse(path.read_text())
        if layer == "study":
            continue
        imports = [line for line, module in imported_modules(path, package) if f"{module}.".startswith(f"{study}.")]
        if layer == "cli":
            at_once = {
                line
                for node in loaded_at_once(tree)
                for line in range(node.lineno, (node.end_lineno or 0) + 1)
                if not isinstance(node, ast.FunctionDef)
            }
            imports = [line for line in imports if line in at_once]
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        named = [node.lineno for node in texts if re.fullmatch(rf"{re.escape(study)}(\.\w+)*", str(node.value))]
        lines = sorted({*imports, *(named if str(where) != BY_NAME else ())})
        found += [f"{where}:{line}" for line in lines]
    return found


def broken_arrows(package: Path) -> list[str]:
    """Returns one line per import that the layers do not allow, each once."""
    broken: list[str] = []
    for path in sorted(package.rglob("*.py")):
        layer = layer_of(path, package)
        where = path.relative_to(package.parent)
        if layer not in BELOW:
            broken.append(f"{where}: {layer} is no known layer")
            continue
        for line, target in imported_layers(path, package):
            if target not in BELOW[layer] | {layer}:
                broken.append(f"{where}:{line}: {layer} imports {target}")
        for line, module in imported_modules(path, package):
            if is_without_torch(path, package) and module.split(".")[0] == "torch":
                broken.append(f"{where}:{line}: {layer} imports torch")
            if layer not in WITH_NATIVE and module == f"{package.name}._native":
                broken.append(f"{where}:{line}: {layer} imports the native module")
    return list(dict.fromkeys(broken))


def test_imports_point_down(project: Path) -> None:
    assert broken_arrows(project / "tieroff") == []


def test_nothing_but_the_command_line_imports_what_is_for_study(project: Path) -> None:
    assert study_in_training(project / "tieroff") == []


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("session/a.py", "def f():\n    from tieroff.study.compare import rows", ["session/a.py:2"]),
        ("api.py", "from tieroff import study", ["api.py:1"]),
        ("planner/policy.py", "name = 'tieroff.study.policies'", ["planner/policy.py:1"]),
        ("planner/policies.py", "name = 'tieroff.study.policies'", []),
        ("cli/planning.py", "from tieroff.study.compare import rows", ["cli/planning.py:1"]),
        ("cli/planning.py", "def f():\n    from tieroff.study.compare import rows", []),
        ("cli/planning.py", "if TYPE_CHECKING:\n    from tieroff.study.compare import rows", []),
        ("study/a.py", "from tieroff.study.compare import rows", []),
    ],
)
def test_training_that_is_tied_to_study_is_found(tmp_path: Path, file: str, text: str, told: list[str]) -> None:
    package = tmp_path / "tieroff"
    (package / file).parent.mkdir(parents=True, exist_ok=True)
    (package / file).write_text(text)
    assert study_in_training(package) == told


def test_every_layer_is_there(project: Path) -> None:
    found = {layer_of(path, project / "tieroff") for path in (project / "tieroff").rglob("*.py")}
    assert found <= set(BELOW)
    assert {"core", "storage", "tracing", "planner", "runtime", "probe", "study"} <= found


@pytest.mark.parametrize(
    ("file", "line", "told"),
    [
        ("core/plan.py", "from tieroff.planner import auto", "core imports planner"),
        ("core/plan.py", "import torch.nn", "core imports torch"),
        ("planner/make_plan.py", "def f():\n    from torch import nn", "planner imports torch"),
        ("planner/make_plan.py", "from ..runtime import executor", "planner imports runtime"),
        ("runtime/execution/executor.py", "import tieroff.planner.make_plan", "runtime imports planner"),
        ("runtime/execution/executor.py", "from tieroff import _native", "runtime imports the native module"),
        ("runtime/execution/executor.py", "from tieroff import wrap", "runtime imports __init__"),
        ("tracing/dry.py", "from tieroff.api import wrap", "tracing imports api"),
        ("handy.py", "", "handy is no known layer"),
    ],
)
def test_an_arrow_that_points_up_is_found(tmp_path: Path, file: str, line: str, told: str) -> None:
    package = tmp_path / "tieroff"
    for name in ("core/plan.py", "planner/make_plan.py", "runtime/execution/executor.py", "tracing/dry.py", "api.py", file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (package / file).write_text(line)
    assert [found.split(": ", 1)[1] for found in broken_arrows(package)] == [told]


def test_arrows_that_point_down_are_left_alone(tmp_path: Path) -> None:
    package = tmp_path / "tieroff"
    for name in ("core", "storage", "runtime"):
        (package / name).mkdir(parents=True)
    (package / "core/plan.py").write_text("from tieroff.core.plan import Plan\nfrom tieroff import errors")
    (package / "errors.py").write_text("")
    (package / "storage/store.py").write_text("from tieroff import _native\nfrom tieroff.core import plan")
    (package / "runtime/executor.py").write_text("import torch\nfrom tieroff.storage.store import Store")
    assert broken_arrows(package) == []
