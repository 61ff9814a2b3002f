"""Measures folders and links: the same as `tieroff probe`, with the same options."""

from __future__ import annotations

import sys

from tieroff.cli import app

if __name__ == "__main__":
    app(["probe", *sys.argv[1:]])
