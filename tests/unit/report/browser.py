"""A page in a real browser, where Chromium is on PATH."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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
