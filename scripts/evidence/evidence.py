"""Writes docs/evidence.md: what tieroff predicts beside what others measured, the bad errors too.

    python scripts/evidence/evidence.py DATA/gpu

Takes some minutes: every model is traced on fake tensors. Measurements of GPUs that are in data/gpus.toml and were
not fitted are predicted from their makers' figures alone.
"""

from __future__ import annotations

import argparse
import math
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fit_frontier import FULL_GIB, SEQUENCE, STEP_TOKENS, measured_tokens_per_s
from fit_machines import MACHINES, PROJECT, coverage, left_out, multiples, nine_in_ten
from llama_steps import SIZES_8B, evenly, llama
from published_steps import GPUS, Measured, Step, load_gpus, measured_steps, predict_s, step_of
from tieroff.core.machine import Machine, load_machine
from tieroff.core.tensor import Tier
from tieroff.core.trace import Queue, Trace
from tieroff.study.compare.rows import Row, plan_row
from tieroff.study.profiles.files import load_trace
from tieroff.study.profiles.join import load_profile
from tieroff.tracing.clock.interval import DEVIATIONS, interval
from tieroff.tracing.clock.model import Constants
from tieroff.tracing.dry import dry_trace

PAGE = PROJECT / "docs" / "evidence.md"
Kept = tuple[int, int, int]
KEPT_LAYERS: dict[float, tuple[Kept, ...]] = {
    8.8: ((8, 1, 28), (9, 1, 28), (10, 1, 28)),
    18.0: ((11, 1, 29), (12, 1, 29)),
    FULL_GIB: ((24, 0, 31), (28, 0, 31), (28, 1, 31)),
}
"""By GiB of device memory, which layers keep their activations: how many, the first and the last. The fastest is taken."""
UP_BYTES_PER_S, DOWN_BYTES_PER_S = 52_400_000_000, 50_800_000_000  # both directions busy, as the source measured them
HOST_BYTES = 200 << 30

OF_THE_KIT = "## Predicted before, measured after"
HEAD = """# Evidence from real GPUs

Predictions beside what others measured, error by error. Written by
`python scripts/evidence/evidence.py DATA`; the origin of the data is
in its README. A prediction is what `tieroff plan` says before anything ran.
"""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def own_machines() -> dict[str, Machine]:
    """Returns the machine of each GPU, with its own constants where it was fitted."""
    fitted = {load_machine(path).name: load_machine(path) for path in MACHINES.glob("*.toml")}
    return {gpu: fitted.get(machine.name, machine) for gpu, machine in load_gpus(GPUS).items()}


def steps_section(folder: Path) -> str:
    """Returns measured training steps beside the clock's."""
    machines, constants = own_machines(), Constants.shipped()
    measured = [row for row in measured_steps(folder) if row.gpu in machines]
    steps = {name: step_of(name) for name in sorted({row.step for row in measured})}
    rows = [_step_row(row, steps[row.step], machines[row.gpu], constants) for row in measured]
    errors = [math.fabs(predict_s(steps[row.step], machines[row.gpu]) / row.seconds - 1) for row in measured]
    inside = sum(row[-1] == "yes" for row in rows)
    unseen = _unseen(measured, steps, {row.gpu: load_gpus()[row.gpu] for row in measured})
    header = ("GPU", "step", "measured", "predicted", "error", "nine in ten", "inside")
    return f"""## Training steps of NeuSight (fp32, forward and backward)

{table(header, rows)}

Mean absolute error {sum(errors) / len(errors):.1%}, largest {max(errors):.1%}; {inside} of {len(rows)} inside the interval. The
clock was fitted to A100 80GB, L4 and MI210 (`scripts/evidence/fit_machines.py`, which also prints the errors with the model or
the GPU left out: standard deviations {constants.log_error:.1%} and {constants.log_error_unseen:.1%}, from which
intervals come). On the A100 forward passes of five steps took 1.4 to 1.6 times the sum of their own kernels, in the same
source, and on the MI210 of two; where a step fills 70 % of the card the model explains it by the allocator,
elsewhere nothing here does. The Switch Transformer is left out: which expert a word goes to depends on values.

Those steps were fitted, so their intervals prove little. Below, each step is predicted by a fit that has not seen it: no step
of its model, or none of its GPU, of which it then knows the maker's figures alone. It lies inside if its error is at most
{DEVIATIONS} times the root mean square of the others' errors, which is how intervals are made. The last column is what that
multiple would have to be for nine in ten, from these errors (split conformal prediction: of 17, the largest).

{unseen}

Errors of one GPU go together, so three GPUs say less of a fourth one than 17 independent steps would.
"""


def _unseen(measured: Sequence[Measured], steps: dict[str, Step], gpus: dict[str, Machine]) -> str:
    """Returns a table of errors and coverage where the fit has not seen the step's model, or its GPU."""
    rows = []
    for group in ("model", "gpu"):
        errors = left_out(measured, steps, gpus, group)
        inside = coverage(errors, steps, group)
        multiple = nine_in_ten(multiples(errors, steps, group))
        name = "its model" if group == "model" else "its GPU"
        rows.append((name, *_errors(errors.values()), f"{inside} of {len(measured)}", f"{multiple:.2f}"))
        for gpu in gpus if group == "gpu" else ():
            own = {row: error for row, error in errors.items() if row.gpu == gpu}
            rows.append((f"of these, steps on {gpu}", *_errors(own.values()), "", ""))
    header = ("not seen", "mean absolute error", "from", "to", "inside the interval", "nine in ten within")
    return table(header, rows)


def _errors(logarithms: Collection[float]) -> tuple[str, str, str]:
    """Returns the mean absolute error, the lowest and the highest."""
    shares = [math.expm1(error) for error in logarithms]
    return f"{sum(map(abs, shares)) / len(shares):.1%}", f"{min(shares):+.1%}", f"{max(shares):+.1%}"


def _step_row(row: Measured, step: Step, machine: Machine, constants: Constants) -> tuple[str, ...]:
    predicted_s = predict_s(step, machine, constants)
    low, high = (factor * predicted_s for factor in interval(machine, constants))
    error = predicted_s / row.seconds - 1
    inside = "yes" if low <= row.seconds <= high else "no"
    return (
        row.gpu,
        row.step,
        f"{row.seconds:.3f} s",
        f"{predicted_s:.3f} s",
        f"{error:+.1%}",
        f"{low:.3f}-{high:.3f} s",
        inside,
    )


def import_section(folder: Path) -> str:
    """Returns the imported trace of ResNet-50 beside the join made by hand."""
    imported = load_profile(folder / "kineto/nccl_data.json.gz", folder / "kineto/resnet_1gpu_et.json.gz")
    by_hand = load_trace(folder / "trace_resnet50_a100")

    def figures(trace: Trace) -> tuple[str, ...]:
        persistent = sum(tensor.size_bytes for tensor in trace.tensors if tensor.is_persistent)
        own = (op for op in trace.ops if op.queue is Queue.COMPUTE and op.name != "record_param_comms")
        compute_ns = sum(op.duration_ns for op in own)
        return (
            str(len(trace.ops)),
            str(len(trace.tensors)),
            f"{trace.peak_bytes:,}",
            f"{persistent:,}",
            f"{compute_ns / 1e6:.3f} ms",
        )

    header = ("trace", "ops", "tensors", "peak bytes", "persistent bytes", "kernels without NCCL")
    rows = [("ResNet-50 on an A100, imported", *figures(imported)), ("the same, joined by hand", *figures(by_hand))]
    rows.append(("DLRM on eight V100, rank 0, imported", *figures(_dlrm(folder / "kineto"))))
    gpt2 = load_trace(folder / "kineto/hf_GPT2_et.json.tar.gz", machine=load_machine(MACHINES / "a100_40gb.toml"))
    rows.append(("GPT-2 large with Adam, execution trace alone", *figures(gpt2)[:-1], "estimated for an A100"))
    return f"""## Imported traces

{table(header, rows)}

Of ResNet-50 reads, sizes and durations are equal op by op. Its peak is higher by what a collective holds until it is awaited.
Writes differ in 164 ops, where the schema is followed here: `mul.out` writes `out` alone, and foreach updates write all of
their list. DLRM's files are of 2023, without record-function numbers: they are joined by the order of calls, and nobody joined
them by hand to compare with. Of GPT-2 large there is no profile: its op times are the clock's. Its peak is in the update, which
the program makes at once: parameters, gradients, two moments and a root of one of them, 774,030,080 numbers each, and a mask
of 1 MiB in each of 36 layers are 15,518,350,336 bytes. Up to the update it is the peak of the same model on fake tensors,
within 0.03 % (`tests/unit/tracing/test_import_alone.py`).
"""


def _dlrm(folder: Path) -> Trace:
    """Returns the first rank's step of DLRM."""
    with tempfile.TemporaryDirectory() as place:
        for name in ("dlrm_kineto.tar.gz", "dlrm_pytorch_et.tar.gz"):
            with tarfile.open(folder / name) as archive:
                archive.extractall(place, filter="data")
        profile = next(Path(place).glob("dlrm_kineto/worker0_*"))
        return load_profile(profile, Path(place) / "dlrm_pytorch_et" / "dlrm_eg_0.json")


def frontier_section(folder: Path) -> str:
    """Returns Llama-3-8B within budgets of an H100's memory beside another system's measured speeds."""
    machine = replace(
        load_machine(MACHINES / "h100_80gb.toml"),
        duplex_share=1.0,
        host_bytes=HOST_BYTES,
        h2d_bytes_per_s=UP_BYTES_PER_S,
        d2h_bytes_per_s=DOWN_BYTES_PER_S,
    )
    traces = {
        kept: dry_trace(llama(SEQUENCE, step_tokens=STEP_TOKENS, kept_layers=evenly(*kept)), machine, kernels="cuda")
        for kept in sorted({kept for choices in KEPT_LAYERS.values() for kept in choices})
    }
    best = {gib: _fastest({kept: traces[kept] for kept in choices}, machine, gib) for gib, choices in KEPT_LAYERS.items()}
    theirs = {gib: measured_tokens_per_s(folder, SEQUENCE, gib) for gib in KEPT_LAYERS}
    full_speed = STEP_TOKENS / (best[FULL_GIB][1].step_s or math.inf)
    their_speed = sum(theirs[FULL_GIB]) / len(theirs[FULL_GIB])
    op_count = len(traces[best[FULL_GIB][0]].ops)
    header = (
        *("GPU memory", "layers kept", "predicted tokens/s", "of 67.3 GiB", "no plan above"),
        *("measured tokens/s", "of 67.3 GiB", "moved down, up", "CPU time to plan"),
    )
    cells = []
    for gib, (kept, row, cpu_s) in best.items():
        speed, bound, low, high = (
            *(STEP_TOKENS / (seconds or math.inf) for seconds in (row.step_s, row.bound_s)),
            *(min(theirs[gib]), max(theirs[gib])),
        )
        cells.append(
            (
                f"{gib} GiB",
                f"{kept[0]} of {SIZES_8B.layers}, {kept[1]}-{kept[2]}",
                f"{speed:,.0f}",
                f"{speed / full_speed:.2f}",
                f"{bound:,.0f}",
                f"{low:,.0f}-{high:,.0f}",
                f"{low / their_speed:.2f}-{high / their_speed:.2f}",
                f"{(row.d2h_bytes or 0) / 1e9:.0f}, {(row.h2d_bytes or 0) / 1e9:.0f} GB",
                f"{cpu_s:.1f} s",
            )
        )
    return f"""## Llama-3-8B on an H100, by device memory

Sequences of {SEQUENCE}, {STEP_TOKENS:,} tokens a step in rounds of 32,768 ({op_count:,} ops), AdamW in bf16
with its updates in backward, two tiers. The model (`scripts/evidence/llama_steps.py`) computes its perceptrons in tiles of
tokens and keeps no outputs of norms or silu; some layers, evenly spread from one to another, keep the rest, the others run
again in backward, and of a few such choices the fastest is shown. All plans pass the checker for this project's runtime. The
other system is als244/dataflow; with 67.3 GiB its steps have 131,072 tokens and more, over which an update weighs less. One
number of the clock, the share of their peak that bf16 products reach, was fitted to its speed at 67.3 GiB alone
(`scripts/evidence/fit_frontier.py`).

{table(header, cells)}

The goal is 0.90 of the full speed at 8.8 GiB. What forward keeps has to leave while forward runs, and there the link is the
limit: in a layer's forward it takes less than half of what the layer would keep, so the others run again. A round also begins
with the transfers of the one before, so where the kept layers lie matters by a hundredth. The embedding's state, 2 GiB, is
written by the last update and leaves while the next step's forward begins. Most of the waits that are left are for its weight,
1 GiB, which leaves after that update and comes back at once: parameters do not move across the end of a step. The bound
knows the step's kernels, with those that run again, and each link's bytes; it does not know these limits.
"""


def _fastest(traces: dict[Kept, Trace], machine: Machine, gib: float) -> tuple[Kept, Row, float]:
    """Returns the layers kept whose plan is fastest within a budget, its row, and the processor time that it took."""
    budget = {Tier.DEVICE: int(gib * 2**30), Tier.HOST: HOST_BYTES}
    found: list[tuple[Kept, Row, float]] = []
    for kept, trace in traces.items():
        begin_s = time.process_time()
        row = plan_row(trace, machine, budget).row
        found.append((kept, row, time.process_time() - begin_s))
    return min(found, key=lambda each: each[1].step_s or math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of measurements: neusight/, kineto/, llama3_8b_h100.csv")
    folder = parser.parse_args().folder
    sections = (HEAD, steps_section(folder / "neusight"), import_section(folder), frontier_section(folder))
    measured = PAGE.read_text().partition(f"\n{OF_THE_KIT}")  # which scripts/gpu_kit/page.py writes
    PAGE.write_text("\n".join(sections) + "".join(measured[1:]))
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
