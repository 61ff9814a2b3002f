"""Engines: what moves bytes between memory and files, and between memory and memory."""

from tieroff.storage.engines.base import Direction, Engine, OpenFile, Transfer
from tieroff.storage.engines.choose import available, choose

__all__ = ["Direction", "Engine", "OpenFile", "Transfer", "available", "choose"]
