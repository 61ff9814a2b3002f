"""Ranks of which the last is slow in the last step: what a report on all of them has to find.

Run in every rank, as `torchrun … -m tests.parity.shards.slow DEVICE FOLDER KIND…`; rank N's run of a kind is saved in
FOLDER/KIND/rank-N.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tieroff
from tests.parity.shards.program import STEPS, Block, Case, adam, begin, config_of, one_dim, shard, usual

SLEEP_S = 0.5


class Slow(Block):
    """Computes as any block, and sleeps first when told to."""

    sleep_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.sleep_s)
        return super().forward(x)


def blocks() -> nn.Sequential:
    return nn.Sequential(Block(65), Slow(66), Block(67))


def replicated() -> nn.Module:
    return DistributedDataParallel(blocks())


KINDS: dict[str, Callable[[], Case]] = {
    "moved": lambda: Case(lambda: shard(blocks(), one_dim())),
    "nothing moved": lambda: Case(lambda: shard(blocks(), one_dim()), planning={"policy": "auto"}),
    "replicated": lambda: Case(replicated),
}


def run(case: Case, own: Path, out: Path) -> None:
    """Trains; the last rank sleeps inside the second block's forward, in the last step alone."""
    torch.manual_seed(0)
    model = case.make()
    optimizer = adam(model.parameters())
    tieroff.wrap(model, optimizer, config_of(case, own))
    for index in range(STEPS):
        if index == STEPS - 1 and dist.get_rank() == dist.get_world_size() - 1:
            Slow.sleep_s = SLEEP_S
        usual(model, optimizer, index, case.width)
    Slow.sleep_s = 0.0
    tieroff.engine(model).save_run(out)
    tieroff.unwrap(model)


def main() -> None:
    """Runs `DEVICE FOLDER KIND…` of the command line."""
    own, names = begin()
    for name in names:
        run(KINDS[name](), own, own.parent / name / own.name)
    gc.collect()  # as the other programs do
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
