"""A rank of several nodes: FSDP2 plain and wrapped with the node's own config, and what the rank may use of its node."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import tieroff
from tests.parity.shards.program import CASES, Case, train
from tieroff.config import Config
from tieroff.core.tensor import Tier
from tieroff.runtime.backend.cpu import settle_vector_math
from tieroff.session.ranks import on_wrap


def main() -> None:
    """Runs `DEVICE FOLDER` of the command line; each rank writes what it found there."""
    torch.set_num_threads(1)
    settle_vector_math()
    dist.init_process_group("gloo")
    case: Case = CASES["bf16"]
    shares: dict[str, int] = {}
    tell = on_wrap.get()

    def note(engine: tieroff.Engine) -> None:
        shares.update({tier.value: store.capacity_bytes for tier, store in engine.stores.items()})
        if tell is not None:
            tell(engine)

    on_wrap.set(note)
    plain, _ = train(case, None)
    config = Config.load()
    wrapped, found = train(case, config.model_dump(mode="json", exclude_none=True))
    found["differ"] += [
        name for a, b in zip(plain, wrapped, strict=True) for name in a if name not in b or not torch.equal(a[name], b[name])
    ]
    found |= {"shares": shares, "dirs": [str(path) for path in config.nvme.dirs or ()], "tiers": [tier.value for tier in Tier]}
    (Path(sys.argv[2]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    gc.collect()  # torch's gloo thread may still hold the last collective's tensors, and would die in freeing them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
