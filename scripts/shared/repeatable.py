"""Kernels that give the same bits in every run, where PyTorch has such."""

from __future__ import annotations

import os

import torch


def repeat_kernels() -> None:
    """Chooses kernels that repeat, for this process and from now on.

    PyTorch's default ones for a GPU may add in any order, so two plain runs can differ in the last bits. To be called before
    the first operation on a GPU.

    Source: https://docs.pytorch.org/docs/stable/notes/randomness.html
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # What searches for reads of unset memory is slow; its module is not typed.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
