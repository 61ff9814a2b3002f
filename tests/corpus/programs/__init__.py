"""The programs, by what they do."""

from tests.corpus.programs import adapters, functions, lives, loops, optimizers, peers, shapes

__all__ = ["adapters", "functions", "lives", "loops", "optimizers", "peers", "shapes"]
