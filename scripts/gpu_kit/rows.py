"""The rows of the kit: what is trained, in which way, within which memory; cases stand in order of worth."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """One run of a case.

    Attributes:
        case: the case's name.
        subject: the model's name in `subjects.py`.
        way: the way's name in `ways.py`.
        budget: of the device, for tieroff; None: all that is free.
        steps: updates to run; the last quarter is what is told of.
        limit_s: after which the run is ended.
        is_on_drive: what leaves goes to the drive and none of it to host memory.
    """

    case: str
    subject: str
    way: str
    budget: str | None = None
    steps: int = 16
    limit_s: int = 90
    is_on_drive: bool = False

    @property
    def key(self) -> str:
        """Name of the row, the same in every file."""
        return "/".join(filter(None, (self.case, self.subject, self.way, self.budget)))


@dataclass(frozen=True)
class Case:
    """Several runs, or one program that is no training.

    Attributes:
        name: as on the command line.
        limit_s: of the whole case.
        rows: its runs; () for a program of its own (`programs.py`).
        about: what it shows.
    """

    name: str
    limit_s: int
    about: str
    rows: tuple[Row, ...] = ()


def _curve() -> tuple[Row, ...]:
    """Returns the rows at 8.8 and 67.3 GiB first: their quotient is what is asked."""
    few, many = "8b-{}-few", "8b-{}-many"
    sizes: list[tuple[int, str, str]] = []
    for budgets in ((("8.8GiB", few), ("67.3GiB", many)), (("12GiB", few), ("25GiB", few))):
        sizes += [(length, name, budget) for length in (4096, 1024) for budget, name in budgets]
    return tuple(Row("curve", name.format(length), "tieroff", budget, steps=7, limit_s=150) for length, name, budget in sizes)


_FULL = (
    Row("full", "3b-full", "plain"),
    Row("full", "3b-full", "tieroff", "25%"),
    Row("full", "3b-full", "tieroff-host", "25%"),
    Row("full", "3b-full", "trainstream"),
    Row("full", "3b-full", "fsdp2"),
    Row("full", "3b-full", "save_on_cpu", steps=8),
    Row("full", "3b-full", "tieroff", "50%"),
    Row("full", "3b-full", "tieroff", "min"),
    Row("full", "3b-full", "tieroff-host", "50%"),
    Row("full", "3b-full", "tieroff-host", "min"),
    Row("full", "3b-full", "deepspeed", steps=8, limit_s=150),
)
_LORA = (
    Row("lora", "8b-nf4", "plain"),
    Row("lora", "8b-nf4", "tieroff", "25%"),
    Row("lora", "8b-lora", "plain"),
    Row("lora", "8b-lora", "tieroff", "25%"),
    Row("lora", "8b-nf4", "tieroff", "min"),
    Row("lora", "8b-lora", "tieroff", "min"),
)
_DRIVE = (
    Row("drive", "1b-drive", "plain"),
    Row("drive", "1b-drive", "tieroff", "50%", steps=10, limit_s=150, is_on_drive=True),
)

CASES = (
    Case("smoke", 120, "parity cases on the device, planned and bit-equal; the GDS engine"),
    Case("curve", 480, "Llama-3-8B in bf16, 65,536 tokens an update, by device memory", _curve()),
    Case("full", 480, "3B Llama, float32 with bf16 autocast, checkpointing, 1 x 4,096, beside other ways", _FULL),
    Case("lora", 240, "LoRA of an 8B Llama in NF4 and in bf16, checkpointing, 1 x 4,096", _LORA),
    Case("host", 180, "host time of steps of small models, per step and per transfer"),
    Case("exact", 120, "whether updates on the CPU give the GPU's bits, by optimizer and variant"),
    Case("drive", 240, "1B Llama, optimizer state on the drive, 1 x 2,048", _DRIVE),
    Case("tests", 300, "the accelerator's tests on the device"),
)
ROWS = {row.key: row for case in CASES for row in case.rows}
