"""Ten ops that show every policy's rule, and what a plan of them is in one line of text.

Forward takes 5 ms an op, the rest 10 ms; sizes are in MiB:

    tick      0     1     2     3     4      5      6      7      8       9
    op        conv  relu  conv  relu  loss'  relu'  conv'  conv'  update  update
    reads     w     a     b v   c     d      c g    b v g  a w g  w m G   v n H
    writes    a     b     c     d     g      g      g H    G      w m     v n
    live      16    24    28    38    33     29     27     21     16      14

w and v (2 each) are parameters, m (3) and n (5) the optimizer's state: these persist. a, c and d (4), b (8) and g (1) are
activations, G and H (2) gradients. Op 3 has 6 of scratch, which is part of its 38.

Two problems. A: 33 MiB, so that op 3 alone is over, by 5; 1 GB/s to the host and 0.5 GB/s to the NVMe, so that a MiB takes
1.0 and 2.1 ms. B: 31 MiB, so that op 3 is over by 7 and op 4 by 2; 0.2 and 0.4 GB/s, so that a MiB takes 5.2 and 2.6 ms.

In the line of a plan, `m>h 9-13` is a copy of m out to the host that is issued at tick 9 and awaited at tick 13, which is
tick 3 of the next step; `m<h` is one back in, `s` stands for the NVMe; `repeat 1@6` is op 1 run again before op 6, and
`cpu 9@9-10` op 9 run by the CPU from tick 9 to 10.
"""

from __future__ import annotations

from tieroff.core.machine import Machine
from tieroff.core.plan import IDEAL_EXECUTOR, Plan
from tieroff.core.tensor import Tensor, TensorClass, Tier
from tieroff.core.trace import Op, Trace
from tieroff.planner.problem.problem import Problem, make_problem
from tieroff.units import MIB

_SIZES = {"w": 2, "v": 2, "m": 3, "n": 5, "a": 4, "b": 8, "c": 4, "d": 4, "g": 1, "G": 2, "H": 2}
_KINDS = {
    **dict.fromkeys("wv", TensorClass.PARAMETER),
    **dict.fromkeys("mn", TensorClass.OPTIMIZER),
    **dict.fromkeys("GH", TensorClass.GRADIENT),
}
_OWNERS = {"G": 0, "H": 1}
_NAMES = "".join(_SIZES)
_OPS = (
    ("conv_forward", "w", "a"),
    ("relu_forward", "a", "b"),
    ("conv_forward", "vb", "c"),
    ("relu_forward", "c", "d"),
    ("loss_backward", "d", "g"),
    ("relu_backward", "cg", "g"),
    ("conv_backward", "bvg", "gH"),
    ("conv_backward", "awg", "G"),
    ("apply_grad", "wGm", "wm"),
    ("apply_grad", "vHn", "vn"),
)
_FIRST_UPDATE = 8
_ARROWS = {
    (Tier.DEVICE, Tier.HOST): ">h",
    (Tier.HOST, Tier.DEVICE): "<h",
    (Tier.DEVICE, Tier.NVME): ">s",
    (Tier.NVME, Tier.DEVICE): "<s",
}


def ten_ops() -> Trace:
    """Returns the trace of the module's table."""
    tensors = tuple(
        Tensor(
            name,
            size * MIB,
            _KINDS.get(name, TensorClass.ACTIVATION),
            is_persistent=name in "wvmn",
            owner=_OWNERS.get(name, -1),
        )
        for name, size in _SIZES.items()
    )
    ops = tuple(
        Op(
            name,
            (5 if index < 5 else 10) * 10**6,
            tuple(map(_NAMES.index, reads)),
            tuple(map(_NAMES.index, writes)),
            transient_bytes=6 * MIB * (index == 3),
            phase="optimizer" if index >= _FIRST_UPDATE else "",
        )
        for index, (name, reads, writes) in enumerate(_OPS)
    )
    return Trace(ops, tensors, name="ten ops")


def problems() -> dict[str, Problem]:
    """Returns the problems A and B."""
    return {"A": _problem(33, 1000, 500), "B": _problem(31, 200, 400)}


def _problem(device_mib: int, host_mb_per_s: int, nvme_mb_per_s: int) -> Problem:
    machine = Machine(
        name="ten ops",
        d2h_bytes_per_s=host_mb_per_s * 10**6,
        h2d_bytes_per_s=host_mb_per_s * 10**6,
        nvme_write_bytes_per_s=nvme_mb_per_s * 10**6,
        nvme_read_bytes_per_s=nvme_mb_per_s * 10**6,
        cpu_update_bytes_per_s=10**9,
    )
    budget = {Tier.DEVICE: device_mib * MIB, Tier.HOST: 64 * MIB, Tier.NVME: 64 * MIB}
    return make_problem(ten_ops(), machine, budget, IDEAL_EXECUTOR)


def line_of(plan: Plan) -> str:
    """Returns what a plan of the ten ops does, in the module's words, in order of tensor and issue."""
    moves = sorted((_NAMES[t.tensor], t.issue_at, t.ready_by, _ARROWS[t.source, t.target]) for t in plan.transfers)
    return ", ".join(
        [
            *(f"{name}{arrow} {issue}-{ready}" for name, issue, ready, arrow in moves),
            *(f"repeat {repeat.op}@{repeat.at}" for repeat in plan.repeats),
            *(f"cpu {update.op}@{update.issue_at}-{update.ready_by}" for update in plan.host_updates),
        ]
    )
