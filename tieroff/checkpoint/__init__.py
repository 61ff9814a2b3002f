"""Weights of a model to and from safetensors files, one tensor at a time: models larger than memory."""

from __future__ import annotations

from tieroff.checkpoint.load import LoadedWeights, load_weights
from tieroff.checkpoint.save import save_weights

__all__ = ["LoadedWeights", "load_weights", "save_weights"]
