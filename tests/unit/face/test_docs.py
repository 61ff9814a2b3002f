"""The documentation: it builds, its blocks run, and what is generated is current."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.main import get_command

import tieroff
from config_reference import PAGE, config_reference
from tieroff.cli import app
from tieroff.config import Config
from tieroff.core.io.json_files import load_plan

README_WORDS_MAX = 900
_BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it stands for if any, and its text."""

    language: str
    title: str
    text: str


def blocks(path: Path) -> list[Block]:
    return [Block(*match.groups(default="")) for match in _BLOCK.finditer(path.read_text(encoding="utf-8"))]


def environment(project: Path) -> dict[str, str]:
    """Returns one in which `python` and `tieroff` are those of this project."""
    binaries = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": str(project), "COLUMNS": "120"}


@pytest.mark.long
def test_every_block_of_the_tutorial_runs(project: Path, tmp_path: Path) -> None:
    install, *others = blocks(project / "docs/tutorial.md")
    assert "pip install" in install.text  # tests/unit/face/test_packaging.py installs
    said = ""
    for block in others:
        if block.title:
            (tmp_path / block.title).write_text(block.text)
            continue
        assert block.language == "bash"
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=tmp_path,
            env=environment(project),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, f"{block.text}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}"
        said += run.stdout + run.stderr
    assert "equal, bit for bit" in said
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"train.py", "tieroff.toml", "machine.toml", "plain.txt", "wrapped.txt", "runs", "report.html"}
    assert load_plan(tmp_path / "runs/first/plan.json").transfers


def python_blocks_of_the_readme(project: Path) -> tuple[Block, Block]:
    first, quickstart = [block for block in blocks(project / "README.md") if block.language == "python"]
    return first, quickstart


def test_the_first_block_of_the_readme_wraps_a_model(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block, _ = python_blocks_of_the_readme(project)
    monkeypatch.chdir(project)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.clone() for p in model.parameters()]
    exec(block.text, {"model": model, "optimizer": optimizer})
    try:
        for _ in range(4):
            model(torch.randn(64, 512)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert sum(tieroff.engine(model).stats().moved_bytes.values()) > 0
    finally:
        tieroff.unwrap(model)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_quick_start_of_the_readme_prints_what_it_shows(project: Path, tmp_path: Path) -> None:
    _, quickstart = python_blocks_of_the_readme(project)
    (shown,) = [block for block in blocks(project / "README.md") if block.language == "text"]
    (tmp_path / quickstart.title).write_text(quickstart.text)
    run = subprocess.run(
        [sys.executable, quickstart.title], cwd=tmp_path, env=environment(project), capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    # Durations differ from run to run, and so does what a plan moves; the sentences and the peak without a plan do not.
    assert sentences(run.stdout) == sentences(shown.text)
    assert "with nothing moved it would be 137.13 MiB" in run.stdout


def sentences(text: str) -> list[str]:
    """Returns the first word of each line, and the other words of those without a figure."""
    return [line if not re.search(r"\d", line) else line.split()[0] for line in text.splitlines()]


def test_the_readme_is_short(project: Path) -> None:
    words = (project / "README.md").read_text(encoding="utf-8").split()
    assert len(words) <= README_WORDS_MAX


def test_files_that_the_documentation_names_exist(project: Path) -> None:
    named = re.compile(r"`((?:tieroff|native|tests|scripts|benchmarks|configs|docs|examples)/[\w./-]+)`")
    pages = [project / "README.md", *sorted((project / "docs").glob("*.md"))]
    missing = [
        f"{page.name}: {path}"
        for page in pages
        for path in named.findall(page.read_text(encoding="utf-8"))
        if not (project / path).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_toml_blocks_are_configs(project: Path, tmp_path: Path, page: str) -> None:
    found = [block for block in blocks(project / page) if block.language == "toml"]
    assert found
    for index, block in enumerate(found):
        path = tmp_path / f"{index}.toml"
        path.write_text(block.text)
        Config.load(path)


def test_commands_in_the_documentation_exist_with_their_options(project: Path) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    seen = set()
    for page in (project / "README.md", *sorted((project / "docs").glob("*.md"))):
        for block in blocks(page):
            for line in re.findall(r"^tieroff (\w+)(.*?)(?:   .*)?$", block.text, re.MULTILINE):
                name, rest = line
                assert name in commands, f"{page.name}: tieroff {name}"
                options = {option for parameter in commands[name].params for option in parameter.opts}
                unknown = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", rest)) - options
                assert not unknown, f"{page.name}: tieroff {name} has no {unknown}"
                seen.add(name)
    assert seen == set(commands)


def test_the_config_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(config_reference()), "python scripts/config_reference.py"


def test_the_pages_build_strictly(project: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", project / "mkdocs.yml", "-d", tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "site/tutorial/index.html").is_file()


def test_links_inside_the_repository_lead_somewhere(project: Path) -> None:
    for page in (project / "README.md", project / "NOTICE", project / "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
