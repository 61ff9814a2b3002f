"""Steps that never repeat: paging on demand against the correlation predictor, on the real engine with a slowed store.

Three models take another path, or another length, in every step: a mixture of experts with changing routing, layers that are
dropped at random, and sequences of random length. Each is trained plain, with `policy = "demand"` (least recently used pages
out, nothing ahead of its use) and with `policy = "auto"`, which foresees. Copies take the time of a drive with the rate that
is given, each way: they run on the real files of the NVMe tier, and end no sooner than such a drive would.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness.where import when_and_where
from rich.table import Table
from torch import Tensor, nn

import tieroff
from progress import make_console
from tieroff.runtime.backend.cpu import CpuBackend, settle_vector_math
from tieroff.runtime.items.place import Place
from tieroff.storage.completion import Completion
from tieroff.units import NS_PER_S, parse_bytes

POLICIES = ("demand", "auto")


class _Due:
    """A copy that ends no sooner than a slow link would end it."""

    def __init__(self, inner: Completion, due_ns: int) -> None:
        self._inner, self._due_ns = inner, due_ns

    @property
    def start_ns(self) -> int:
        return self._inner.start_ns

    @property
    def stop_ns(self) -> int:
        return max(self._inner.stop_ns, self._due_ns) if self._inner.stop_ns else 0

    def done(self) -> bool:
        return time.monotonic_ns() >= self._due_ns and self._inner.done()

    def wait(self, timeout_s: float | None = None) -> None:
        time.sleep(max(self._due_ns - time.monotonic_ns(), 0) / NS_PER_S)
        self._inner.wait(timeout_s)


class SlowBackend(CpuBackend):
    """A CpuBackend behind two links, one each way, that move one copy after another at a given rate."""

    name = "slow"

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self._bytes_per_s = bytes_per_s
        self._free_ns = {"out": 0, "in": 0}
        self._lock = threading.Lock()

    def _due(self, inner: Completion, link: str, size_bytes: int) -> Completion:
        with self._lock:
            begin_ns = max(self._free_ns[link], time.monotonic_ns())
            self._free_ns[link] = begin_ns + int(size_bytes / self._bytes_per_s * NS_PER_S)
            return _Due(inner, self._free_ns[link])

    def copy_out(self, source: Tensor, place: Place) -> Completion:
        return self._due(super().copy_out(source, place), "out", source.numel())

    def copy_in(self, place: Place, target: Tensor) -> Completion:
        return self._due(super().copy_in(place, target), "in", target.numel())


class Experts(nn.Module):
    """Layers that each send the batch to one of their experts, drawn anew in every step."""

    def __init__(self, width: int, layers: int, experts: int = 4) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.experts = nn.ModuleList(nn.ModuleList(_mlp(width) for _ in range(experts)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for mixer, experts in zip(self.mixers, self.experts, strict=True):
            assert isinstance(experts, nn.ModuleList)
            x = x + torch.tanh(mixer(x))
            x = x + experts[int(torch.randint(len(experts), ()))](x)
        return x


class Plain(nn.Module):
    """Layers in a row, each left out of a step with a probability of `skips`."""

    def __init__(self, width: int, layers: int, skips: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_mlp(width) for _ in range(2 * layers))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.skips or torch.rand(()) > self.skips:
                x = x + layer(x)
        return x


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


MODELS: dict[str, tuple[Callable[[int, int], nn.Module], bool]] = {  # and whether lengths vary
    "experts": (Experts, False),
    "random depth": (functools.partial(Plain, skips=1 / 3), False),
    "random lengths": (Plain, True),
}


def train(
    name: str, policy: str | None, folder: Path, *, steps: int, width: int, layers: int, rows: int, budget: str, backend: Any
) -> tuple[list[float], list[tieroff.Stats]]:
    """Trains one of `MODELS`; returns its losses and, of a wrapped one, the figures of every step.

    Args:
        policy: None trains plain.
        rows: of the largest batch; where lengths vary, a step has between half and all of them.
    """
    make, varies = MODELS[name]
    torch.manual_seed(0)
    model = make(width, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if policy is not None:
        config = {
            "device": "cpu",
            "budget": {"device": budget, "nvme": "1GiB"},
            "nvme": {"dirs": [str(folder)]},
            "plan": {"policy": policy, "min_bytes": "1KiB"},
        }
        tieroff.wrap(model, optimizer, config=config, backend=backend)
    losses, figures = [], []
    for step in range(steps):
        torch.manual_seed(step)
        count = rows - int(torch.randint(rows // 2, ())) if varies and step else rows
        loss = model(torch.randn(count, width)).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if policy is not None:
            figures.append(tieroff.engine(model).stats())
    if policy is not None:
        tieroff.unwrap(model)
    return losses, figures


def measure(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the row of one model: medians over the steps without a plan, by policy."""
    sizes = {key: getattr(options, key) for key in ("steps", "width", "layers", "rows", "budget")}
    plain, _ = train(name, None, folder, backend=None, **sizes)
    row: dict[str, Any] = {"model": name}
    for policy in POLICIES:
        losses, figures = train(name, policy, folder, backend=SlowBackend(options.rate), **sizes)
        free = [seen for seen in figures if seen.phase == "on demand"]
        row[policy] = {
            "steps": len(free),
            "step_s": statistics.median(seen.step_s for seen in free),
            "stall_s": statistics.median(seen.stall_s for seen in free),
            "faults": statistics.median(seen.faults for seen in free),
            "moved_bytes": statistics.median(sum(seen.moved_bytes.values()) for seen in free),
            "losses_equal": losses == plain,
        }
    return row


def show(rows: list[dict[str, Any]]) -> Table:
    """Returns the rows as a table."""
    table = Table(title="Steps that never repeat, medians per step")
    for column in ("model", "policy", "step", "stalls", "faults", "moved", "losses equal"):
        table.add_column(column, justify="left" if column in ("model", "policy") else "right")
    for row in rows:
        for policy in POLICIES:
            seen = row[policy]
            table.add_row(
                row["model"], policy, f"{seen['step_s']:.3f} s", f"{seen['stall_s']:.3f} s", f"{seen['faults']:g}",
                f"{seen['moved_bytes'] / 2**20:.0f} MiB", "yes" if seen["losses_equal"] else "NO",
            )  # fmt: skip
    return table


def main() -> int:
    """Runs every model under both policies; returns the exit status: 1 where a loss differs from the plain run's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256, help="of the largest batch")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--rate", type=parse_bytes, default=parse_bytes("200MB"), help="bytes per second of the slow drive")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    settle_vector_math()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = [measure(name, options, Path(folder)) for name in options.models]
    make_console().print(show(rows))
    if options.json is not None:
        head = when_and_where(shlex.join(["python", *sys.argv]))
        found = {**head, "torch": torch.__version__, "rate_bytes_per_s": options.rate, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(row[policy]["losses_equal"] for row in rows for policy in POLICIES) else 1


if __name__ == "__main__":
    sys.exit(main())
