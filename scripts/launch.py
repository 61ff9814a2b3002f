"""Runs a script in several ranks within their budgets: the same as `tieroff launch`, with the same options."""

from __future__ import annotations

import sys

from tieroff.cli import app

if __name__ == "__main__":
    app(["launch", *sys.argv[1:]])
