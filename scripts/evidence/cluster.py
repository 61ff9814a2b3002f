"""What nodes of 8 x H100 train under FSDP2 with shards in the tiers, on paper: the planner's plans and its simulator's times.

Each row is one plan of one rank's step (`node_steps.py` says what that holds), for a whole cluster of equal ranks.
`--page` puts the tables into a page, between its two marks.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from node_steps import GPUS_PER_NODE, MODELS, Job, Model, step_trace
from tieroff.core.machine import Machine, load_machine
from tieroff.core.plan import RUNTIME_EXECUTOR
from tieroff.core.tensor import Tier
from tieroff.errors import InfeasiblePlanError
from tieroff.planner.make_plan import plan_with_timeline
from tieroff.tracing.clock.model import Constants
from tieroff.units import NS_PER_S

ROOT = Path(__file__).resolve().parents[2]
NODES = (1, 4, 16, 64)
SEQUENCES = (1, 2, 4)
_GB, _TB = 10**9, 10**12
_USABLE = 0.9
"""Share of each tier that tensors may take; the rest is the allocator's, the program's and the system's."""

_HOST_PER_NODE, _DRIVES_PER_NODE, _DRIVE_BYTES = _TB, 4, 7.68 * _TB
_DRIVE_READ, _DRIVE_WRITE = 7 * _GB, 5 * _GB
_PEERS = (40 * _GB, 360 * _GB)
ASSUMED = (
    f"Assumed: {_USABLE:.0%} of each tier for tensors; drives of 7.68 TB that read {_DRIVE_READ // _GB} and write "
    f"{_DRIVE_WRITE // _GB} GB/s, shared by the node's ranks; a network card of {_PEERS[0] // _GB} GB/s for each GPU and "
    f"{_PEERS[1] // _GB} GB/s between the GPUs of a node (80 % of nominal); all else as in configs/machines/h100_80gb.toml."
)
START, STOP = "<!-- made by scripts/evidence/cluster.py -->", "<!-- end of what scripts/evidence/cluster.py made -->"
STATE_BYTES = 3 * 4
"""Of a parameter: itself and two moments in fp32."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan. Times are 0 where none is feasible; bytes are of one rank and step."""

    model: str
    nodes: int
    ranks: int
    sequences: int
    is_feasible: bool
    step_s: float = 0.0
    compute_s: float = 0.0
    ideal_s: float = 0.0
    tokens_per_s: float = 0.0
    share: float = 0.0
    host_bytes: int = 0
    nvme_bytes: int = 0
    d2h_bytes: int = 0
    h2d_bytes: int = 0
    nvme_write_bytes: int = 0
    nvme_read_bytes: int = 0


def rank_machine() -> Machine:
    """Returns a rank's share of a node."""
    machine = load_machine(ROOT / "configs/machines/h100_80gb.toml")
    return replace(
        machine,
        host_bytes=_HOST_PER_NODE // GPUS_PER_NODE,
        nvme_bytes=round(_DRIVES_PER_NODE * _DRIVE_BYTES / GPUS_PER_NODE),
        nvme_read_bytes_per_s=_DRIVES_PER_NODE * _DRIVE_READ // GPUS_PER_NODE,
        nvme_write_bytes_per_s=_DRIVES_PER_NODE * _DRIVE_WRITE // GPUS_PER_NODE,
        nvme_shares_host_link=True,
        peer_bytes_per_s=_PEERS,
        clock=asdict(Constants.shipped().of(machine.clock)),
    )


def plan_row(job: Job, machine: Machine, policy: str, *, with_host: bool = True) -> Row:
    """Returns the row of one job."""
    budget = {tier: int(_USABLE * machine.capacity_bytes(tier)) for tier in Tier}
    if not with_host:
        budget[Tier.HOST] = 0
    trace = step_trace(job, machine)
    row = Row(job.model.name, job.nodes, job.ranks, job.sequences, False)
    try:
        plan, timeline = plan_with_timeline(trace, machine, budget, policy, capabilities=RUNTIME_EXECUTOR)
    except InfeasiblePlanError:
        return row
    step_s, compute_s = plan.step_ns / NS_PER_S, sum(trace.compute_ns) / NS_PER_S
    return replace(
        row,
        is_feasible=True,
        step_s=step_s,
        compute_s=compute_s,
        ideal_s=trace.ideal_ns / NS_PER_S,
        tokens_per_s=job.rank_tokens * job.ranks / step_s,
        share=compute_s / step_s,
        host_bytes=plan.peak_bytes[Tier.HOST],
        nvme_bytes=plan.peak_bytes[Tier.NVME],
        d2h_bytes=timeline.moved_bytes["d2h"],
        h2d_bytes=timeline.moved_bytes["h2d"],
        nvme_write_bytes=timeline.moved_bytes["nvme_write"],
        nvme_read_bytes=timeline.moved_bytes["nvme_read"],
    )


def published(machine: Machine, policy: str) -> list[str]:
    """Returns what the same arithmetic says where others published figures."""
    giant = 32 * _TB
    per_node = giant * (STATE_BYTES + 4) / 32
    here = (machine.device_bytes + machine.host_bytes + machine.nvme_bytes) * GPUS_PER_NODE * _USABLE
    row = plan_row(Job(MODELS[2], 32, 1), machine, policy, with_host=False)
    state = MODELS[2].parameters * STATE_BYTES / row.ranks
    needed = -(-giant * (STATE_BYTES + 4) // round(here))
    kept = int(machine.device_bytes * _USABLE) // _GB
    return [
        "ZeRO-Infinity trained 32 T parameters on 32 nodes of 16 V100 (arXiv 2104.07857). By the same count, parameters, "
        f"moments and gradients in fp32, that is {per_node / _TB:.1f} TB a node, within the 28 TB of NVMe that such "
        f"a node has. Of the nodes here, which hold {here / _TB:.1f} TB each, it takes {needed} for their room alone. "
        "A layer of that model has to be computed in tiles, which this page does not plan.",
        "radixark/Megatron-LM#63 keeps optimizer state (12 bytes a parameter) on drives and reports 46 GB each way per "
        f"rank and step: {46 * _GB / STATE_BYTES / 1e9:.2f} B parameters a rank. Here 1 T on {row.ranks} ranks has "
        f"{state / _GB:.1f} GB of it a rank. With no host memory the plan writes {row.nvme_write_bytes / _GB:.1f} GB "
        f"and reads {row.nvme_read_bytes / _GB:.1f} GB a step: gradients and activations move too, parameters are "
        f"read for each pass, and the {kept} GB of the device hold some of it. The step takes {row.step_s:.1f} s, "
        f"{row.share:.0%} of compute-bound.",
    ]


def tables(rows: Sequence[Row], notes: Sequence[str], command: str) -> str:
    """Returns everything as Markdown."""
    lines = [f"`{command}`", "", ASSUMED, ""]
    for model in MODELS:
        lines += [f"### {model.name}", "", *_table([row for row in rows if row.model == model.name], model), ""]
    return "\n".join([*lines, "### Beside published figures", "", *(f"- {note}" for note in notes)])


def _table(rows: Sequence[Row], model: Model) -> list[str]:
    head = (
        "nodes = DP degree",
        "micro-batch",
        "step",
        "tokens/s",
        "of compute-bound",
        "waits for peers, nothing moved",
        "host, NVMe of a rank",
        "out, in by host link",
        "written, read on NVMe",
    )
    lines = [f"{model.parameters / 1e9:.1f} B parameters.", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        place = f"{row.nodes} = {row.ranks}"
        if not row.is_feasible:
            lines.append(f"| {place} | {row.sequences} | does not fit |" + " |" * (len(head) - 3))
            continue
        pairs = ((row.host_bytes, row.nvme_bytes), (row.d2h_bytes, row.h2d_bytes), (row.nvme_write_bytes, row.nvme_read_bytes))
        moved = (f"{a / _GB:.0f}, {b / _GB:.0f} GB" for a, b in pairs)
        waits = (row.ideal_s - row.compute_s) / row.ideal_s
        cells = (
            place,
            str(row.sequences),
            f"{row.step_s:.1f} s",
            f"{row.tokens_per_s:,.0f}",
            f"{row.share:.0%}",
            f"{waits:.1%}",
        )
        lines.append(f"| {' | '.join((*cells, *moved))} |")
    return lines


def with_tables(page: str, text: str) -> str:
    """Returns a page with other text between its marks."""
    before, rest = page.split(START)
    return f"{before}{START}\n{text}\n{STOP}{rest.split(STOP)[1]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Plans all rows and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=None, help="a page to put the tables into")
    parser.add_argument("--policy", default="auto", help="default: auto")
    given = parser.parse_args(arguments)
    machine = rank_machine()
    jobs = [Job(model, nodes, count) for model in MODELS for nodes in NODES for count in SEQUENCES]
    rows: list[Row] = []
    for number, job in enumerate(jobs, 1):
        print(f"{number} of {len(jobs)}: {job.model.name}, {job.nodes} nodes, {job.sequences}", file=sys.stderr, flush=True)
        rows.append(plan_row(job, machine, given.policy))
    notes = published(machine, given.policy)
    own = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "scripts/evidence/cluster.py", *own])
    text = tables(rows, notes, command)
    print(text)
    if given.page is not None:
        given.page.write_text(with_tables(given.page.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
