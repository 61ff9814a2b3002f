"""The programs of docs/recipes.md: taken from the page, run plain and wrapped, compared bit for bit.

    python -m tests.parity.recipes.page [ROW ...]

prints what each row needs at least, as a share of its peak with nothing moved.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: nothing is downloaded

import torch
from transformers import TrainerCallback

import tieroff
from tieroff.core.tensor import Tier
from tieroff.integrations import transformers as integration
from tieroff.runtime.movable import plain_parts

PAGE = Path(__file__).resolve().parents[3] / "docs/recipes.md"
CONFIG = 'device = "cpu"\n[budget]\nhost = "256MiB"\n[plan]\nmin_bytes = 0\nbackground = false\n'
"""`tieroff.toml` beside each program: its tensors are small, and all of them may move."""
_CHECKPOINTING = 'model.gradient_checkpointing_enable({"use_reentrant": False})'
_BLOCK = re.compile(r"^```python title=\"([\w.]+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Ran:
    """What a program left.

    Attributes:
        values: losses, what was trained, and the optimizer's state.
        peak_bytes, budget_bytes: of its last planned steps; 0 of a plain run.
        plain_bytes: what the trace takes with nothing moved.
        moved: bytes per class in the last step.
    """

    values: dict[str, Any]
    peak_bytes: int = 0
    budget_bytes: int = 0
    plain_bytes: int = 0
    moved: dict[str, int] | None = None


def programs() -> dict[str, str]:
    """Returns the text of each program of the page, by its file's name."""
    return dict(_BLOCK.findall(PAGE.read_text(encoding="utf-8")))


CHECKPOINTS = {"none": "pass", "reentrant": _CHECKPOINTING.replace("False", "True"), "non-reentrant": _CHECKPOINTING}
"""What `checkpointed` of `tiny.py` does to a model."""


def run(
    name: str,
    folder: Path,
    *,
    is_plain: bool = False,
    is_resumed: bool = False,
    budget: str | None = None,
    checkpoints: str = "non-reentrant",
) -> Ran:
    """Runs a program in a folder, where a run before it may have left a checkpoint.

    Args:
        name: its file's.
        folder: the one.
        is_plain: without tieroff.
        is_resumed: it goes on from the middle.
        budget: replaces the program's own.
        checkpoints: of `CHECKPOINTS`.
    """
    texts = programs()
    assert _CHECKPOINTING in texts["tiny.py"]
    (folder / "tiny.py").write_text(texts["tiny.py"].replace(_CHECKPOINTING, CHECKPOINTS[checkpoints]))
    (folder / "tieroff.toml").write_text(CONFIG)
    (folder / name).write_text(texts[name])
    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    with _inside(folder), _wrapping(is_plain=is_plain, budget=budget):
        exec(compile(texts[name], str(folder / name), "exec"), namespace)
    model = namespace["model"]
    trained = {key: _local(p) for key, p in model.named_parameters() if p.requires_grad}
    state = dict(_state_of(namespace["optimizer"]))
    values = {"losses": torch.tensor(namespace["losses"], dtype=torch.float64), **trained, **state}
    if is_plain:
        return Ran(values)
    if is_resumed:  # half of the steps, too few for a plan where the first ones differ
        tieroff.unwrap(model)
        return Ran(values)
    engine = tieroff.engine(model)
    stats, plan, trace, steps = engine.stats(), engine.plan, engine.trace, engine.history.steps
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    moved = {kind: count for kind, count in stats.moved_bytes_by_class.items() if count}
    tieroff.unwrap(model)
    # Of the last three steps the least: now and then one of them holds what was to be freed a moment longer.
    peak_bytes = min(step.peak_device_bytes for step in steps[-3:] if step.phase == "planned")
    return Ran(values, peak_bytes, plan.budget_bytes[Tier.DEVICE], trace.peak_bytes, moved)


def _state_of(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the plain tensors of an optimizer's state dict, by name."""
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                yield from ((f"state {index} {key} {n}", part.clone()) for n, part in enumerate(plain_parts(value.detach())))


def _local(param: torch.Tensor) -> torch.Tensor:
    value: Any = param.detach()
    local: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return local.clone()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Runs what follows in a folder, from which it imports."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("tiny", None)
        os.chdir(before)


@contextlib.contextmanager
def _wrapping(*, is_plain: bool, budget: str | None) -> Iterator[None]:
    """Takes tieroff out of a program, or gives it another budget."""
    wrap, callback = tieroff.wrap, integration.TieroffCallback

    def wrap_otherwise(model: Any, optimizer: Any = None, **others: Any) -> Any:
        return model if is_plain else wrap(model, optimizer, **{**others, **({"budget": budget} if budget else {})})

    def call_otherwise(**others: Any) -> Any:
        return TrainerCallback() if is_plain else callback(**{**others, **({"budget": budget} if budget else {})})

    tieroff.wrap, integration.TieroffCallback = wrap_otherwise, call_otherwise  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        tieroff.wrap, integration.TieroffCallback = wrap, callback  # type: ignore[misc]


def main(names: list[str]) -> None:
    """Prints the least budget of each program."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names or sorted(name for name in programs() if name.startswith("row")):
        with tempfile.TemporaryDirectory() as folder:
            ran = run(name, Path(folder), budget="min")
        print(f"{name}: {ran.peak_bytes / ran.plain_bytes:.0%} of {ran.plain_bytes} bytes; moved {ran.moved}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
