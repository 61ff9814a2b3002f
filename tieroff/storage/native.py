"""The native module for this layer: an ImportError where it was not built."""

import tieroff._native as _native

__all__ = ["_native"]
