"""Whether updates on the CPU give the GPU's bits: which share of the elements is equal after each of the first updates.

    cd scripts && python -m gpu_kit.exact [--device cuda] [--elements N] [--json FILE]

From zero state most ways of rounding give the same first update, so the second and third are what tells them apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

UPDATES = 4
VARIANTS = {"for-loop": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params, **how: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), **how),
    "Adam": lambda params, **how: torch.optim.Adam(params, lr=1e-3, weight_decay=0.1, **how),
    "SGD": lambda params, **how: torch.optim.SGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1, **how),
    "Adagrad": lambda params, **how: torch.optim.Adagrad(params, lr=1e-2, **how),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def updated(name: str, variant: str, dtype: torch.dtype, device: str, elements: int) -> list[Tensor]:
    """Returns a parameter after each update, on the CPU; values and gradients are the same on every device."""
    numbers = torch.Generator().manual_seed(0)
    parameter = torch.randn(elements, generator=numbers).to(dtype).to(device)
    optimizer = OPTIMIZERS[name]([parameter], **VARIANTS[variant])
    after = []
    for _ in range(UPDATES):
        parameter.grad = (torch.randn(elements, generator=numbers) * 0.1).to(dtype).to(device)
        optimizer.step()
        after.append(parameter.detach().cpu().clone())
    return after


def rows(device: str, elements: int) -> Iterator[dict[str, Any]]:
    """Yields a row per optimizer, type, the device's variant and the CPU's."""
    for name in OPTIMIZERS:
        for label, dtype in DTYPES.items():
            on_cpu = {variant: updated(name, variant, dtype, "cpu", elements) for variant in VARIANTS}
            for variant in VARIANTS:
                wanted = updated(name, variant, dtype, device, elements)
                for other, found in on_cpu.items():
                    shares = [float((a == b).double().mean()) for a, b in zip(wanted, found, strict=True)]
                    yield {"optimizer": name, "dtype": label, "device": variant, "cpu": other, "equal_shares": shares}


def main(given: Sequence[str] | None = None) -> int:
    """Compares, prints a line per optimizer and type, and writes all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(given)
    found = list(rows(options.device, options.elements))
    for row in found:
        if row["equal_shares"][-1] == 1.0:
            print(f"{row['optimizer']} {row['dtype']}: {options.device} {row['device']} equals cpu {row['cpu']}")
    if options.json is not None:
        options.json.write_text(json.dumps({"updates": UPDATES, "elements": options.elements, "rows": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
