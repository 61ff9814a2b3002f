"""The wheel: built by one command, it installs and runs where there is no compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tieroff
from tests.unit.report.browser import BROWSER, body_of, check_scripts, dom_of

_STEP = """
import sys, tempfile, torch, tieroff
from tieroff import _native
assert sys.argv[1] in tieroff.__file__, tieroff.__file__
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with tempfile.TemporaryDirectory() as folder:
    config = {"budget": {"device": "60%"}, "nvme": {"dirs": [folder]}, "plan": {"min_bytes": 0}}
    tieroff.wrap(model, optimizer, config)
    for _ in range(4):
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert sum(tieroff.engine(model).stats().moved_bytes.values()) > 0
    tieroff.unwrap(model)
print("a step ran")
"""


@pytest.mark.long
@pytest.mark.timeout(1800)  # it compiles everything once more
def test_the_wheel_runs_where_there_is_no_compiler(project: Path, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    build = subprocess.run(
        [sys.executable, project / "scripts/build_wheel.py", "--out", out], capture_output=True, text=True, timeout=1500
    )
    assert build.returncode == 0, build.stderr[-3000:]
    archive, wheel = map(Path, build.stdout.split())
    assert "manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert {"tieroff/py.typed", "tieroff/_native.pyi", "tieroff/report/page.css"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "native/"))]
    with tarfile.open(archive) as packed:
        assert any(name.endswith("native/src/simulate/simulate.cpp") for name in packed.getnames())

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=200)
    python = tmp_path / "venv/bin/python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    installed = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, timeout=200)
    assert installed.returncode == 0, installed.stderr
    # Torch and the rest come from here; an editable install of this project does not, since it is found by a .pth file.
    dependencies = Path(pytest.__file__).parent.parent
    environment = {"PATH": "/nonexistent", "PYTHONPATH": str(dependencies), "HOME": os.environ.get("HOME", "/")}
    step = tmp_path / "step.py"
    step.write_text(_STEP)
    run = subprocess.run(
        [python, step, tmp_path / "venv"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.stdout == "a step ran\n", run.stderr
    version = subprocess.run(
        [tmp_path / "venv/bin/tieroff", "--version"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert version.stdout.strip().endswith(tieroff.__version__), version.stderr
    first_session(project, tmp_path, environment)


def first_session(project: Path, folder: Path, environment: dict[str, str]) -> None:
    """Does what a newcomer does after the installation: the example of the README, and a page of what it did."""
    [example] = re.findall(r"^```python title=\"quickstart.py\"\n(.*?)^```$", (project / "README.md").read_text(), re.M | re.S)
    session = folder / "session"
    session.mkdir()
    (session / "quickstart.py").write_text(example + 'tieroff.engine(model).save_run("run")\n')
    train, report = ["python", "quickstart.py"], ["tieroff", "report", "run", "-o", "report.html"]
    for command in (train, report):
        command[0] = str(folder / "venv/bin" / command[0])
        done = subprocess.run(command, cwd=session, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    page = (session / "report.html").read_text(encoding="utf-8")
    assert "It fits" in page and "bit for bit" in page
    assert check_scripts(session / "report.html") > 0
    if BROWSER is not None:
        assert body_of(dom_of(session / "report.html")) == {"errors": "0", "drawn": "4"}
