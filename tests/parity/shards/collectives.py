"""A small transformer under FSDP2 whose collectives are over when they return, or go on beside compute.

Run in every rank, as `torchrun … -m tests.parity.shards.collectives DEVICE FOLDER KIND…`; rank 0 prints what each rank found as
a JSON list, and rank N's run of a kind is saved in FOLDER/rank-N/KIND.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tieroff
from tests.parity.shards.program import (
    STEPS,
    Case,
    Transformer,
    adam,
    begin,
    config_of,
    groups_of,
    local,
    look,
    one_dim,
    shard,
    tell,
    usual,
)

TAKES_S = 0.02


class Late(dist.Work):
    """A gather over a network that takes this long, and no time of any core."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work, self._over_s = work, time.monotonic() + TAKES_S

    def wait(self, *args: Any) -> bool:
        self._work.wait()
        time.sleep(max(self._over_s - time.monotonic(), 0))
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed() and time.monotonic() >= self._over_s


class Gathers:
    """A user's own all-gather."""

    def __init__(self) -> None:
        self.count = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.count += 1
        work = Late(dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True))
        return work if async_op else work.wait() and None


def made(is_beside: bool, gathers: Gathers | None) -> nn.Module:
    torch.manual_seed(0)
    model: Any = shard(Transformer(), one_dim())
    for module in model.modules():
        if hasattr(module, "set_custom_all_gather") and gathers is not None:
            module.set_custom_all_gather(gathers)
    if is_beside:
        model._set_unshard_async_op(True)
    return model


def gathers_of(model: nn.Module) -> list[Any]:
    """Returns what FSDP2 gathers with."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    return [group._all_gather_comm for module in modules for group in groups_of(module)]


KINDS: dict[str, tuple[bool, bool]] = {"at once": (False, False), "beside": (True, False), "beside, late": (True, True)}
"""Do gathers go on beside compute; are they a user's own?"""


def run(kind: str, own: Path) -> dict[str, Any]:
    is_beside, is_own = KINDS[kind]
    seen: list[dict[str, torch.Tensor]] = []
    for wraps in (False, True):
        gathers = Gathers() if is_own else None
        model = made(is_beside, gathers)
        before = gathers_of(model)
        optimizer = adam(model.parameters())
        if wraps:
            tieroff.wrap(model, optimizer, config_of(Case(made_never), own))
        for index in range(STEPS):
            torch.manual_seed(100 * index + dist.get_rank())
            usual(model, optimizer, index, 2)
        seen.append(dict(look(model, optimizer)))
    engine = tieroff.engine(model)
    stats = engine.stats()
    engine.save_run(own / kind)
    found = {"phase": stats.phase, "fallbacks": stats.fallbacks, "stood in": gathers_of(model) != before}
    tieroff.unwrap(model)
    found |= {"given back": gathers_of(model) == before, "own": gathers.count if gathers is not None else 0}
    return found | {"differ": [name for name in seen[0] if not torch.equal(local(seen[0][name]), local(seen[1][name]))]}


def made_never() -> nn.Module:
    """Stands where a case has its model."""
    raise NotImplementedError


def main() -> None:
    """Runs `DEVICE FOLDER KIND…` of the command line."""
    own, names = begin()
    for name in names:
        tell(run(name, own))
    gc.collect()  # as the other programs do
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
