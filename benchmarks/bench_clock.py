"""Steps on an accelerator by its own clock: what the plan predicted, and what the device's events say.

    python benchmarks/bench_clock.py [--device cuda] [--budget 50%] [--json FILE]

Figures are medians of the last quarter of the steps, in which plans have settled. *Ahead* is the
median, over the ops, of the time from the host's call to the op's begin on the GPU: next to nothing where the GPU waits for
the host.

`--device sim --machine configs/machines/h100_80gb.toml` (with the project's folder in PYTHONPATH) takes the simulated device of
the tests with the rates of that machine, on whose clock the host takes no time. Its kernels compute, so sizes are small there;
`--slower N` divides the rates of its arithmetic and of its memory by N, so that few tokens take as long as N times as many.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import tieroff
from harness.results import document, save
from tieroff.core.machine import Machine, load_machine, save_machine
from tieroff.core.tensor import Tier
from tieroff.core.timeline import Timeline
from tieroff.planner.predict import forecast
from tieroff.units import NS_PER_S, format_bytes, format_seconds

KINDS = ("gpt2", "llama")
"""Blocks of a decoder; twelve of "gpt2" at width 768 have GPT-2's 85 million parameters without its embeddings."""


class Attention(nn.Module):
    """Causal attention, turned by position (`is_rotary`) or not."""

    def __init__(self, width: int, heads: int, *, is_rotary: bool) -> None:
        super().__init__()
        self.heads, self.is_rotary = heads, is_rotary
        self.inward, self.outward = nn.Linear(width, 3 * width, not is_rotary), nn.Linear(width, width, not is_rotary)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.inward(x).chunk(3, dim=-1))
        if self.is_rotary:
            q, k = turned(q), turned(k)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.outward(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


def turned(x: Tensor) -> Tensor:
    """Returns queries or keys (batch, heads, length, size) turned by their positions."""
    length, half = x.shape[-2], x.shape[-1] // 2
    rates = torch.pow(10_000.0, -torch.arange(half, device=x.device) / half)
    angles = torch.arange(length, device=x.device)[:, None] * rates
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1)


class Gated(nn.Module):
    """Llama's feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = 8 * width // 3
        self.gate, self.up, self.down = (nn.Linear(*sizes, False) for sizes in ((width, inner), (width, inner), (inner, width)))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """One block, of GPT-2 or of Llama."""

    def __init__(self, kind: str, width: int, heads: int) -> None:
        super().__init__()
        is_llama = kind == "llama"
        norm = nn.RMSNorm if is_llama else nn.LayerNorm
        self.before, self.after = norm(width), norm(width)
        self.attention = Attention(width, heads, is_rotary=is_llama)
        plain = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.forward_part: nn.Module = Gated(width) if is_llama else plain

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        output: Tensor = x + self.forward_part(self.after(x))
        return output


def stack(kind: str, layers: int, width: int, heads: int) -> nn.Module:
    """Returns a stack of blocks over hidden states (batch, length, width)."""
    return nn.Sequential(*[Block(kind, width, heads) for _ in range(layers)])


@dataclass(frozen=True, slots=True)
class Subject:
    """A stack of blocks and its batch."""

    kind: str
    layers: int
    width: int
    heads: int
    batch: int
    length: int


def main(
    device: Annotated[str, typer.Option(help="The accelerator.")] = "cuda",
    budget: Annotated[list[str], typer.Option(help="Device budgets.")] = ["75%", "50%"],  # noqa: B006  typer copies it
    kind: Annotated[list[str], typer.Option(help="gpt2, llama.")] = list(KINDS),  # noqa: B006  as above
    width: Annotated[int, typer.Option(help="Of the blocks.")] = 768,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    steps: Annotated[int, typer.Option(help="Steps; the last quarter is shown.")] = 40,
    machine: Annotated[Path | None, typer.Option(help="The machine's file; measured where it is left out.")] = None,
    slower: Annotated[float, typer.Option(help="Divides the simulated device's rates but those of its links.")] = 1.0,
    out: Annotated[Path | None, typer.Option("--json", help="Where the rows are written.")] = None,
) -> None:
    """Trains stacks of blocks, 12 of GPT-2 and 8 of Llama, and shows the planned steps of each."""
    with tempfile.TemporaryDirectory() as folder:
        known = simulate(machine, slower, Path(folder)) if device == "sim" else machine
        subjects = [Subject(one, 12 if one == "gpt2" else 8, width, width // 64, batch, length) for one in kind]
        rows = [measure(subject, share, device, known, steps) for subject in subjects for share in budget]
    gpu = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__} if device == "cuda" else {}
    save(out, document(rows, slower=slower, **gpu))
    table = Table(title=f"{device}; the device's clock")
    for name in rows[0]:
        table.add_column(name)
    for row in rows:
        table.add_row(*(shown(name, value) for name, value in row.items()))
    Console(width=160).print(table)


def simulate(machine: Path | None, slower: float, folder: Path) -> Path:
    """Registers the simulated device with a machine's rates; returns the file of the machine that it is."""
    from tests.accelerator import sim, vendor

    if machine is None:
        raise typer.BadParameter("--device sim needs --machine")
    sim.load()
    vendor.install()
    torch.set_num_threads(1)  # its kernels sum as the host does then
    made: Machine = load_machine(machine)
    if slower != 1:
        made = replace(
            made,
            fp32_flops_per_s=made.fp32_flops_per_s / slower,
            bf16_flops_per_s=made.bf16_flops_per_s / slower,
            device_memory_bytes_per_s=round(made.device_memory_bytes_per_s / slower),
        )
    sim.set_machine(made)
    save_machine(made, folder / "machine.toml")
    return folder / "machine.toml"


def measure(subject: Subject, budget: str, device: str, machine: Path | None, steps: int) -> dict[str, Any]:
    """Returns one row: times in seconds on the device's clock, sizes in bytes."""
    torch.manual_seed(0)
    place = torch.device(device, 0)
    model = stack(subject.kind, subject.layers, subject.width, subject.heads).to(place)
    count = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(subject.batch, subject.length, subject.width).to(place)
    plan_options = {"background": False} | ({"machine": str(machine)} if machine is not None else {})
    host = 4 * 4 * count + 16 * x.nbytes * subject.layers * 4
    tieroff.wrap(model, optimizer, {"budget": {"device": budget, "host": host}, "plan": plan_options})
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = tieroff.engine(model)
    stats, plan, last = engine.stats(), engine.plan, engine.history.steps[-max(steps // 4, 1) :]
    step_s = median_s(step.step_ns for step in last)
    predicted_ns = forecast(plan, engine.trace, load_machine(machine))[0] if machine is not None else plan.step_ns
    row = {
        "model": f"{subject.kind}, {subject.layers} blocks, {count / 1e6:.3g} M",
        "budget": budget,
        "phase": stats.phase,
        "peak": plan.peak_bytes[Tier.DEVICE],
        "predicted": predicted_ns / NS_PER_S,
        "measured": step_s,
        "measured/predicted": step_s * NS_PER_S / predicted_ns,
        "compute": median_s(step.compute_ns for step in last),
        "waits": median_s(step.stall_ns for step in last),
        "moved": sum(stats.moved_bytes.values()),
        **({"ahead": ahead_s(engine.timeline)} if device != "sim" else {}),
    }
    tieroff.unwrap(model)
    return row


def median_s(times_ns: Iterable[int]) -> float:
    """Returns the median in seconds."""
    return statistics.median(times_ns) / NS_PER_S


def ahead_s(ran: Timeline) -> float:
    """Returns by how much the host was ahead of the device where it issued an op; the median of the ops."""
    issued_ns = ran.host_ns[::2]  # ops begin and end in turn
    return median_s(op.start_ns - begun_ns for op, begun_ns in zip(ran.ops, issued_ns, strict=True))


def shown(name: str, value: Any) -> str:
    """Returns a cell of the table."""
    if name in ("peak", "moved"):
        return format_bytes(value)
    if name in ("predicted", "measured", "compute", "waits", "ahead"):
        return format_seconds(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    typer.run(main)
