"""Trains a byte-level GPT on a text: an ordinary PyTorch script.

With `--config` one line is added to it, `tieroff.wrap`; nothing else changes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tieroff
from shared.peak import PeakMemory
from shared.progress import Progress
from shared.repeatable import repeat_kernels
from tieroff.runtime.backend.cpu import settle_vector_math

OnStep = Callable[[int, float, float], None]

VOCABULARY = 256
WARMUP_STEPS = 5
UNTIMED_STEPS = 10  # recorded, timed and planned, and until the plan settles
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
TEXT_BYTES_MAX = 2**20  # of a folder of sources; the same bytes in every run with the same Python


@dataclass(frozen=True)
class Options:
    """What one training run is made of; every field is an option of the command line."""

    data: Path = STANDARD_LIBRARY
    steps: int = 20
    layers: int = 6
    width: int = 512
    heads: int = 8
    batch: int = 8
    length: int = 512
    lr: float = 1e-3
    clip: float = 1.0
    seed: int = 0
    device: str = "auto"
    sample: int = 0
    deterministic: bool = False
    config: Path | None = None
    out: Path | None = None


@dataclass(frozen=True)
class Result:
    """What a training run measured.

    Attributes:
        losses: of every step, exact (`float.hex`).
        step_s: of every step, in seconds.
        tokens_per_s: from the median step after the first five (of all steps when there are no more).
        peak_bytes: CUDA's most allocated bytes; on the CPU the peak resident set above its level after the imports.
        parameters: their number.
        stats: the engine's account of the last step; None for a plain run.
        sample: generated text.
    """

    losses: list[str]
    step_s: list[float]
    tokens_per_s: float
    peak_bytes: int
    parameters: int
    stats: dict[str, Any] | None = None
    sample: str = ""
    options: dict[str, str] = field(default_factory=dict)


class Attention(nn.Module):
    """Causal self-attention over (batch, length, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm_attention(x)))
        x = x + self.drop(self.mlp(self.norm_mlp(x)))
        return x


class GPT(nn.Module):
    """A byte-level language model with learned positions and a head tied to the token embedding."""

    def __init__(self, layers: int, width: int, heads: int, length: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.length = length
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("attention.out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_residual else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits (batch, length, 256) for bytes (batch, length)."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def load_text(path: Path) -> Tensor:
    """Returns the bytes (count,) to train on.

    Args:
        path: a file, taken whole; or a folder, of which the `*.py` files that lie directly in it are joined in the order
            of their names, up to 1 MiB. The default folder is Python's standard library, so that no text is shipped.

    Raises:
        SystemExit: there is no such file, or no Python source in the folder.
    """
    if not path.is_dir():
        if not path.is_file():
            raise SystemExit(f"--data {path}: no such file or folder")
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    text = bytearray()
    for source in sorted(path.glob("*.py")):
        text += source.read_bytes()
        if len(text) >= TEXT_BYTES_MAX:
            break
    if not text:
        raise SystemExit(f"--data {path}: no *.py file in this folder; give a text file")
    return torch.frombuffer(text[:TEXT_BYTES_MAX], dtype=torch.uint8)


def draw_batch(text: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns random windows (batch, length) and the same windows one byte later."""
    if len(text) <= length:
        raise SystemExit(f"--data: the text has {len(text)} bytes, but --length {length} needs more than {length}")
    starts = torch.randint(len(text) - length, (batch,), generator=generator).tolist()
    windows = torch.stack([text[start : start + length + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def cosine_with_warmup(steps: int) -> Callable[[int], float]:
    """Returns the factor on the learning rate at each step: linear warm-up, then a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < WARMUP_STEPS:
            return (step + 1) / WARMUP_STEPS
        progress = min(1.0, (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


@torch.no_grad()
def generate(model: nn.Module, prompt: bytes, count: int, length: int, seed: int, device: torch.device) -> str:
    """Returns the prompt continued by `count` sampled bytes."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)], device=device)
    for _ in range(count):
        logits = model(text[:, -length:])[:, -1].float().cpu()
        chosen = torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1, generator=generator)
        text = torch.cat([text, chosen.to(device)], dim=1)
    model.train()
    written = bytes(text[0].tolist()).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in written)


def train(options: Options, on_step: OnStep) -> Result:
    """Trains as the options say and returns what was measured.

    Args:
        options: the run.
        on_step: called after every step with the steps done, the loss and tokens per second.
    """
    if options.deterministic:
        repeat_kernels()
    device = torch.device(choose_device(options.device))
    memory = PeakMemory(device)
    settle_vector_math()  # or two plain runs can differ in the last bit
    torch.manual_seed(options.seed)
    text = load_text(options.data)
    batches = torch.Generator().manual_seed(options.seed + 1)

    model: nn.Module = GPT(options.layers, options.width, options.heads, options.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine_with_warmup(options.steps))
    if options.config is not None:
        model = tieroff.wrap(model, optimizer, config=options.config)

    losses: list[str] = []
    step_s: list[float] = []
    for step in range(options.steps):
        start = time.perf_counter()
        x, y = draw_batch(text, options.batch, options.length, batches)
        logits = model(x.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
        del logits
        loss.backward()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        value = float(loss.item())
        losses.append(value.hex())
        step_s.append(time.perf_counter() - start)
        on_step(step + 1, value, options.batch * options.length / step_s[-1])

    peak_bytes = memory.peak_bytes()
    timed = step_s[UNTIMED_STEPS:] or step_s
    return Result(
        losses=losses,
        step_s=step_s,
        tokens_per_s=options.batch * options.length / statistics.median(timed),
        peak_bytes=peak_bytes,
        parameters=sum(p.numel() for p in model.parameters()),
        stats=finish_wrapped(model, options) if options.config is not None else None,
        sample=generate(model, b"\n", options.sample, options.length, options.seed, device) if options.sample else "",
        options={key: str(value) for key, value in asdict(options).items()},
    )


def finish_wrapped(model: nn.Module, options: Options) -> dict[str, Any]:
    """Returns the engine's account of the last step, and saves its trace, plan and timeline with the run."""
    engine = tieroff.engine(model)
    if options.out is not None:
        engine.save_run(options.out)
    return asdict(engine.stats())


def choose_device(name: str) -> str:
    """Returns "cuda" or "cpu"; "auto" takes CUDA where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def parse_options() -> Options:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_options(parser)
    chosen = vars(parser.parse_args())
    return Options(**{f.name: chosen[f.name] for f in fields(Options)})


def add_options(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """Adds an option for each field of `Options` but those left out."""
    described = {
        "data": "text file to train on, or a folder of Python sources; the default is the standard library",
        "steps": "optimizer steps",
        "lr": "peak learning rate",
        "clip": "norm that all gradients together are clipped to; 0: they are not",
        "device": "auto, cuda or cpu",
        "sample": "bytes to generate at the end",
        "deterministic": "kernels that give the same bits in every run; the default ones of a GPU do not",
        "config": "train within this budget, through tieroff",
        "out": "folder for metrics.json and what the engine saves",
    }
    for f in fields(Options):
        if f.name in leave_out:
            continue
        text = described.get(f.name, f"the model's {f.name}")
        if isinstance(f.default, bool):
            parser.add_argument(f"--{f.name}", action=argparse.BooleanOptionalAction, default=f.default, help=text)
            continue
        kind = Path if "Path" in str(f.type) else type(f.default)
        parser.add_argument(f"--{f.name}", type=kind, default=f.default, help=text)


def main() -> int:
    """Runs one training and writes `metrics.json`; an error of tieroff is written there too."""
    options = parse_options()
    try:
        with Progress("plain" if options.config is None else "tieroff", options.steps) as progress:
            result = train(options, progress.advance)
        content = asdict(result)
    except tieroff.TieroffError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        content = {"error": {"type": type(error).__name__, "message": str(error)}}
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "metrics.json").write_text(json.dumps(content, indent=1))
    if content.get("sample"):
        print(content["sample"])
    return 1 if "error" in content else 0


if __name__ == "__main__":
    sys.exit(main())
