"""A page in a real browser, where Chromium is on PATH; and what can be said of its scripts without one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=10000",
)


def dom_of(page: Path, fragment: str = "") -> str:
    """Returns the page's DOM after its scripts have run."""
    assert BROWSER is not None
    arguments = [BROWSER, *FLAGS, f"--user-data-dir={page.parent / 'profile'}", "--dump-dom", f"{page.as_uri()}{fragment}"]
    return subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=300).stdout


def body_of(dom: str) -> dict[str, str]:
    """Returns the attributes of the page's body."""
    [attributes] = re.findall(r"<body([^>]*)>", dom)
    return dict(re.findall(r'data-([a-z-]+)="([^"]*)"', attributes))


def check_scripts(page: Path) -> int:
    """Reads a page's data as JSON, and has Node parse each of its scripts where it is on PATH; returns how many rows there are.

    Raises:
        AssertionError: a script is no program, or the page has none.
    """
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page.read_text(encoding="utf-8"), re.DOTALL)
    [rows] = [json.loads(text) for attributes, text in scripts if 'id="decision-rows"' in attributes]
    programs = [text for attributes, text in scripts if "application/json" not in attributes]
    assert len(programs) >= 3  # the page's two, and plotly
    for number, text in enumerate(programs if NODE is not None else ()):
        file = page.with_name(f"script-{number}.js")
        file.write_text(text, encoding="utf-8")
        done = subprocess.run([str(NODE), "--check", file], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    return len(rows)
