"""Host time of a training step: what the engine's own work costs the thread that trains, where compute is next to nothing.

Models are so narrow that operators take microseconds; what is left of a step is Python, hooks and bookkeeping. Each model is
trained plain and wrapped in one process, some steps of each in turn, so that both see the machine in the same state. Time is
the CPU time of the threads that train: the one that runs the loop, and on an accelerator the one that autograd runs backward
in. Waits cost none, but for those for a GPU, as CUDA waits by looking. *Wall* is the time until the loss has been read. With a
budget of 100 % nothing moves; at `floor`, the least budget that can be met, everything moves that can.

`--backend cuda` trains on a GPU; `--backend delayed` and `--backend sim` on the test suite's backend of late copies and on its
simulated accelerator.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import tieroff
from harness.pairs import order_of, ratio_of
from harness.results import document, make_parser, progress, save
from tieroff.errors import InfeasiblePlanError
from tieroff.report.terminal import make_console, make_table
from tieroff.runtime.backend.base import Backend
from tieroff.runtime.backend.cpu import settle_vector_math

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("cpu", "cuda", "delayed", "sim")
FLOOR = "floor"
_TINY = 0.05  # a share of a step's peak that no step of these models can do with


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what comes in (batch, length, width), plus attention, plus a multi-layer perceptron."""
        batch, length, width = x.shape
        split = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """A block of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside the identity."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        shapes = ((before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.layers = nn.Sequential(*(_convolution(*shape) for shape in shapes))
        is_same = before == 4 * width and stride == 1
        self.skip: nn.Module = nn.Identity() if is_same else _convolution(before, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns feature maps (batch, 4 width, height, width)."""
        return F.relu(self.layers(x) + self.skip(x))


def _convolution(before: int, after: int, size: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(after), nn.ReLU()
    )


class Recurrent(nn.Module):
    """An LSTM of several layers between an embedding and a head."""

    def __init__(self, width: int = 16, layers: int = 4, symbols: int = 64) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(symbols, width), nn.Linear(width, symbols)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (batch, length, symbols) for symbols (batch, length)."""
        return self.head(self.lstm(self.embedding(x))[0])  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Layers that each add the outputs of all their experts, weighted by a gate."""

    def __init__(self, width: int = 16, layers: int = 6, experts: int = 4) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(nn.ModuleList(_mlp(width) for _ in range(experts)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Returns (batch, width) for (batch, width)."""
        for gate, experts in zip(self.gates, self.experts, strict=True):
            assert isinstance(experts, nn.ModuleList)
            weights = gate(x).softmax(-1)
            x = x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(experts))
        return x


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def gpt(width: int = 16) -> nn.Module:
    """Returns 12 layers of a GPT between an embedding and a head."""
    layers = [Block(width) for _ in range(12)]
    return nn.Sequential(nn.Embedding(256, width), *layers, nn.LayerNorm(width), nn.Linear(width, 256))


def resnet(width: int = 4) -> nn.Module:
    """Returns ResNet-50 with a sixteenth of its channels, for images of 32 x 32."""
    stages: list[nn.Module] = [_convolution(3, width, 3, 1)]
    before = width
    for stage, count in enumerate((3, 4, 6, 3)):
        for index in range(count):
            stages.append(Bottleneck(before, width << stage, 2 if index == 0 and stage else 1))
            before = 4 * width << stage
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


@dataclass(frozen=True)
class Subject:
    """A model, and what makes its inputs and its loss.

    Attributes:
        inputs: returns a batch.
        loss: of the output and the batch.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]


def _next_symbol(out: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), x.flatten())


def _square(out: Tensor, x: Tensor) -> Tensor:
    return out.pow(2).mean()


SUBJECTS = {
    "gpt": Subject(gpt, lambda: torch.randint(256, (2, 16)), _next_symbol),
    "resnet50": Subject(resnet, lambda: torch.randn(2, 3, 32, 32), _square),
    "lstm": Subject(Recurrent, lambda: torch.randint(64, (2, 8)), _next_symbol),
    "experts": Subject(Experts, lambda: torch.randn(4, 16), _square),
}


class Loop:
    """A training loop over one batch.

    Attributes:
        last: the last step's loss.
        wall_s: how long each step took until its loss had been read, in seconds.
    """

    def __init__(self, name: str, device: str) -> None:
        torch.manual_seed(0)
        subject = SUBJECTS[name]
        self.model = subject.make().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        self._batch, self._loss = subject.inputs().to(device), subject.loss
        self.last = float("nan")
        self.wall_s: list[float] = []
        self._backward_thread: int | None = None  # once it is known

    def step(self) -> float:
        """Runs one step; returns the CPU time of the threads that train, in seconds."""
        begun, begun_wall = self._cpu_s(), time.perf_counter()
        loss = self._loss(self.model(self._batch), self._batch)
        if self._backward_thread is None:
            loss.register_hook(self._note_thread)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        took = self._cpu_s() - begun
        self.last = loss.item()
        self.wall_s.append(time.perf_counter() - begun_wall)
        return took

    def _note_thread(self, _gradient: Tensor) -> None:
        self._backward_thread = threading.get_ident()

    def _cpu_s(self) -> float:
        own_s = time.thread_time()
        if self._backward_thread in (None, threading.get_ident()):
            return own_s
        return own_s + time.clock_gettime(time.pthread_getcpuclockid(self._backward_thread))


def backend_for(name: str) -> tuple[str, Callable[[], Backend | None]]:
    """Returns the device of a backend's name, and what makes one; None stands for the device's own."""
    if name in ("cpu", "cuda"):
        return name, lambda: None
    sys.path.insert(0, str(ROOT))  # the test suite is no part of what is installed
    if name == "delayed":
        from tests.support.delayed import DelayedBackend

        return "cpu", DelayedBackend
    from tests.accelerator import sim, target, vendor

    sim.load()
    vendor.install()
    return str(target.device()), target.backend


def wrapped(name: str, budget: str, device: str, backend: Backend | None, min_bytes: str) -> Loop:
    """Returns a loop over a wrapped model."""
    loop = Loop(name, device)
    config = {"device": device, "budget": {"device": budget, "host": "64MiB", "strict": True}, "plan": {"min_bytes": min_bytes}}
    tieroff.wrap(loop.model, loop.optimizer, config, backend=backend)
    return loop


def floor_of(name: str, device: str, backend: Backend | None, min_bytes: str = "0") -> str:
    """Returns the least share of the step's peak that can be met, as text of a config."""
    loop = wrapped(name, f"{_TINY:.0%}", device, backend, min_bytes)
    try:
        for _ in range(4):
            loop.step()
    except InfeasiblePlanError as error:
        share = _TINY * error.needed_bytes / error.available_bytes
        return f"{share * 100 + 0.1:.1f}%"
    finally:
        tieroff.unwrap(loop.model)
    return f"{_TINY:.0%}"


def measure(name: str, budget: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one model under one budget."""
    device, make_backend = backend_for(options.backend)
    wanted = floor_of(name, device, make_backend(), options.min_bytes) if budget == FLOOR else budget
    loops = {"plain": Loop(name, device), "wrapped": wrapped(name, wanted, device, make_backend(), options.min_bytes)}
    for loop in loops.values():
        for _ in range(options.warmup):
            loop.step()
    gc.collect()
    seconds: dict[str, list[list[float]]] = {key: [] for key in loops}
    for loop in loops.values():
        loop.wall_s.clear()
    for turn in range(options.turns):
        for key in order_of(list(loops), turn):
            seconds[key].append([loops[key].step() for _ in range(options.steps)])
    engine = tieroff.engine(loops["wrapped"].model)
    stats, plans = engine.stats(), engine.plan
    medians = {key: [statistics.median(turn) for turn in turns] for key, turns in seconds.items()}
    ratio = ratio_of(medians["wrapped"], medians["plain"])
    wall_s = {key: statistics.median(loop.wall_s) for key, loop in loops.items()}
    all_steps = [value for turn in seconds["wrapped"] for value in turn]
    row = {
        "model": name,
        "backend": options.backend,
        "budget": budget,
        "plain_s": statistics.median(medians["plain"]),
        "step_s": statistics.median(all_steps),
        "mean_s": statistics.fmean(all_steps),
        "of_plain": [ratio.median, ratio.low, ratio.high],
        "wall_s": wall_s["wrapped"],
        "wall_of_plain": wall_s["wrapped"] / wall_s["plain"],
        "phase": stats.phase,
        "transfers": len(plans.transfers),
        "moved_tensors": len({transfer.tensor for transfer in plans.transfers}),
        "losses_equal": loops["plain"].last == loops["wrapped"].last,
    }
    tieroff.unwrap(loops["wrapped"].model)
    return row


def show(rows: list[dict[str, Any]]) -> Table:
    """Returns the rows as a table."""
    heads = (
        "model",
        "backend",
        "budget",
        "plain",
        "step",
        "mean",
        "of plain",
        "95 % interval",
        "wall",
        "moves",
        "phase",
        "losses equal",
    )
    table = make_table("CPU time of the training threads per step", heads, text_columns=3)
    for row in rows:
        ratio, low, high = row["of_plain"]
        table.add_row(
            row["model"],
            row["backend"],
            row["budget"],
            *(f"{row[key] * 1e3:.2f} ms" for key in ("plain_s", "step_s", "mean_s")),
            f"{ratio:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row['wall_of_plain']:.2f}",
            f"{row['moved_tensors']} in {row['transfers']}",
            row["phase"],
            "yes" if row["losses_equal"] else "NO",
        )
    return table


def main() -> int:
    """Measures every model under every budget; returns the exit status: 1 where a loss differs from the plain run's."""
    parser = make_parser(__doc__, steps=6, turns=12, warmup=40)
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--budgets", nargs="+", default=["100%", "60%", "40%", FLOOR], help="shares of the peak, or floor")
    parser.add_argument("--min-bytes", default="0", help="[plan] min_bytes: smaller tensors never move")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu")
    options = parser.parse_args()
    settle_vector_math()
    torch.set_num_threads(1)
    cases = [(name, budget) for name in options.models for budget in options.budgets]
    rows = []
    with progress(len(cases)) as report:
        for name, budget in cases:
            report(f"{name} at {budget}")
            rows.append(measure(name, budget, options))
    make_console().print(show(rows))
    save(options.json, document(rows, torch=torch.__version__))
    return 0 if all(row["losses_equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
