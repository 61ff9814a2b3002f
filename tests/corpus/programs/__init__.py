"""The programs, by what they do."""

from tests.corpus.programs import adapters, functions, loops, optimizers, shapes

__all__ = ["adapters", "functions", "loops", "optimizers", "shapes"]
