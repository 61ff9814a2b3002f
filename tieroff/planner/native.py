"""The native module for this layer: without it, importing a planner raises ImportError."""

import tieroff._native as _native

__all__ = ["_native"]
