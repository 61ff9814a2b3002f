"""The native module for this layer; its updates are there on Linux alone."""

import tieroff._native as _native

HAS_UPDATES = hasattr(_native, "UpdatePool")
"""False where the native module was built without threads for updates."""

__all__ = ["HAS_UPDATES", "_native"]
