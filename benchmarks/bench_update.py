"""How fast the CPU updates parameters in host memory, against copies of memory; and which arithmetic has a device's bits.

    python benchmarks/bench_update.py [--json FILE]
    python benchmarks/bench_update.py --bits cuda [--json FILE]
    python benchmarks/bench_update.py --probe cpu [--json FILE]

The speed is bytes read and written per second, by an update and by a copy of whole buffers (`memmove`), each by one thread and
by all. With `--bits` every optimizer that has a rule is stepped by PyTorch on that device, fused, foreach and op by op, and by
every arithmetic here; the row says which of them had the same bits in all elements of all steps. With `--probe` what the probe
measures on that device is compared with what this measures, in turn: the state that a run's threads update per second.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, astuple
from typing import Any

import torch

from harness.results import document, make_parser, progress, save
from tieroff.core.machine import Machine
from tieroff.probe.calibration.updates import UpdateRates, measure_updates
from tieroff.probe.links import measure_links
from tieroff.report.terminal import make_console, make_table
from tieroff.updates import rule as rules
from tieroff.updates.arithmetic import candidates
from tieroff.updates.native import _native
from tieroff.updates.pool import thread_count
from tieroff.updates.rule import Rule

MIB = 2**20
WAIT_S = 600.0
ADAM: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}, "op by op": {"foreach": False}}
KEYS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum")
MakeRule = Callable[[float], Rule]

# What is stepped: a class with its options, and the rule of its n-th step. The first three are timed, too.
SUBJECTS: dict[str, tuple[type, dict[str, Any], MakeRule]] = {
    "AdamW": (
        torch.optim.AdamW,
        {**ADAM, "weight_decay": 1e-2},
        lambda step: rules.adam(step, **ADAM, weight_decay=1e-2, decouples=True),
    ),
    "SGD, momentum": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9},
        lambda step: rules.sgd(lr=1e-2, momentum=0.9, is_first=step == 1),
    ),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}, lambda step: rules.adagrad(step, lr=1e-2)),
    "AdamW, amsgrad, maximize": (
        torch.optim.AdamW,
        {**ADAM, "weight_decay": 1e-2, "amsgrad": True, "maximize": True},
        lambda step: rules.adam(step, **ADAM, weight_decay=1e-2, decouples=True, amsgrad=True, maximize=True),
    ),
    "Adam, decay": (
        torch.optim.Adam,
        {**ADAM, "weight_decay": 0.1},
        lambda step: rules.adam(step, **ADAM, weight_decay=0.1, decouples=False),
    ),
    "SGD": (torch.optim.SGD, {"lr": 1e-2}, lambda _: rules.sgd(lr=1e-2)),
    "SGD, nesterov, decay": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
        lambda step: rules.sgd(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3, is_first=step == 1),
    ),
    "SGD, dampening, maximize": (
        torch.optim.SGD,
        {"lr": 1e-2, "momentum": 0.9, "dampening": 0.3, "maximize": True},
        lambda step: rules.sgd(lr=1e-2, momentum=0.9, dampening=0.3, maximize=True, is_first=step == 1),
    ),
}
TIMED = ("AdamW", "SGD, momentum", "Adagrad")


def copy_seconds(threads: int, target: torch.Tensor, source: torch.Tensor) -> float:
    """Returns how long so many threads take to copy one buffer to the other, a share each."""
    share = source.nbytes // threads

    def copy(number: int) -> None:
        ctypes.memmove(target.data_ptr() + number * share, source.data_ptr() + number * share, share)

    workers = [threading.Thread(target=copy, args=(number,)) for number in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begin


def speed_row(name: str, type_name: str, arithmetic: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the medians of one rule, in rounds of a copy and an update."""
    rule, dtype = SUBJECTS[name][2](2.0), TYPES[type_name]
    count = options.mib * MIB // dtype.itemsize
    tensors = [torch.full((count,), 0.01, dtype=dtype) for _ in range(rule.tensor_count)]
    source, target = torch.ones(options.mib * 2 * MIB, dtype=torch.uint8), torch.zeros(options.mib * 2 * MIB, dtype=torch.uint8)
    addresses = [tensor.data_ptr() for tensor in tensors]
    part = rule.part(arithmetic, type_name, count, addresses, addresses)
    pool = _native.UpdatePool(threads, [])
    copies: list[float] = []
    updates: list[float] = []
    for index in range(options.rounds + 1):
        copied = 2 * source.nbytes / copy_seconds(threads, target, source)
        begin = time.perf_counter()
        pool.wait(pool.submit([part], [], []), WAIT_S)
        updated = part.moved_bytes / (time.perf_counter() - begin)
        if index:  # the first touches memory and warms up
            copies.append(copied)
            updates.append(updated)
    pool.close()
    rate, copy = statistics.median(updates), statistics.median(copies)
    state_share = (rule.tensor_count - 2) * tensors[0].nbytes / part.moved_bytes
    return {
        "optimizer": name,
        "type": type_name,
        "arithmetic": arithmetic,
        "threads": threads,
        "copy_bytes_per_s": round(copy),
        "update_bytes_per_s": round(rate),
        "of_copy": statistics.median(u / c for u, c in zip(updates, copies, strict=True)),
        "state_bytes_per_s": round(rate * state_share),
    }


def probe_row(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the medians of rounds of the probe and of AdamW here, by as many threads, and what a machine makes of them."""
    probed: list[UpdateRates] = []
    own: list[float] = []
    with progress(options.rounds) as report:
        for index in range(options.rounds):
            report(f"round {index + 1}")
            probed.append(measure_updates(options.probe, 1.0))
            single = argparse.Namespace(mib=options.mib, rounds=3)
            own.append(speed_row("AdamW", "float32", "contracted", thread_count(), single)["state_bytes_per_s"])
    links = measure_links(options.probe, 1.0)
    rates = UpdateRates(*(int(statistics.median(column)) for column in zip(*map(astuple, probed), strict=True)))
    machine = rates.of(
        Machine(
            device_type=options.probe,
            d2h_bytes_per_s=links.d2h_bytes_per_s,
            h2d_bytes_per_s=links.h2d_bytes_per_s,
            duplex_share=links.duplex_share,
        )
    )
    return {
        "device": options.probe,
        "threads": thread_count(),
        "state_bytes_per_s": round(statistics.median(own)),
        **{f"probed_{key}": value for key, value in asdict(rates).items()},
        "of_probe": statistics.median(a / b.state_bytes_per_s for a, b in zip(own, probed, strict=True)),
        "host_memory_bytes_per_s": machine.host_memory_bytes_per_s,
        "predicted_beside_bytes_per_s": machine.update_bytes_per_s,
    }


def bits_row(name: str, mode: str, type_name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns which arithmetics had PyTorch's bits on the device, and by which update the others were found out."""
    make_optimizer, own_options, make_rule = SUBJECTS[name]
    dtype, count = TYPES[type_name], options.elements
    row: dict[str, Any] = {"optimizer": name, "mode": mode, "type": type_name}
    seeded = torch.Generator().manual_seed(0)
    start = (torch.randn(count, generator=seeded) * 0.02).to(dtype)
    spread = torch.exp(2 * torch.randn(count, generator=seeded)) * 1e-3
    gradient = (torch.randn(count, generator=seeded) * spread).to(dtype)
    parameter = torch.nn.Parameter(start.to(options.bits, copy=True))
    states = make_rule(1.0).tensor_count - 2
    left = {a: [start.clone(), *(torch.zeros_like(start) for _ in range(states))] for a in candidates(make_rule(1.0))}
    found: dict[str, list[float]] = {}
    try:
        optimizer = make_optimizer([parameter], **own_options, **MODES[mode])
        for step in range(1, options.steps + 1):
            rolled = torch.roll(gradient, step * 7919).contiguous()
            parameter.grad = rolled.to(options.bits, copy=True)
            optimizer.step()
            state = optimizer.state[parameter]
            theirs = [t.cpu() for t in (parameter.detach(), *(state[key] for key in KEYS if torch.is_tensor(state.get(key))))]
            for arithmetic, own in list(left.items()):
                addresses = [own[0].data_ptr(), rolled.data_ptr(), *(t.data_ptr() for t in own[1:])]
                make_rule(float(step)).part(arithmetic, type_name, count, addresses, addresses).run()
                share = max((_bits(a) != _bits(b)).double().mean().item() for a, b in zip(own, theirs, strict=True))
                if share:
                    found[arithmetic] = [step, share]
                    del left[arithmetic]
    except RuntimeError as error:  # no such kernel on this device
        return {**row, "equal": [], "refused": str(error).splitlines()[0][:80]}
    return {**row, "equal": list(left), "found_out": found}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def show_speed(rows: list[dict[str, Any]]) -> None:
    """Prints the table of speeds."""
    heads = ("optimizer", "type", "arithmetic", "threads", "copy", "update", "of copy", "state")
    table = make_table("Bytes read and written per second", heads, text_columns=3)
    for row in rows:
        rates = [f"{row[key] / 1e9:.1f} GB/s" for key in ("copy_bytes_per_s", "update_bytes_per_s")]
        state = f"{row['state_bytes_per_s'] / 1e9:.1f} GB/s"
        table.add_row(
            row["optimizer"], row["type"], row["arithmetic"], str(row["threads"]), *rates, f"{row['of_copy']:.2f}", state
        )
    make_console().print(table)


def show_bits(rows: list[dict[str, Any]]) -> None:
    """Prints the table of arithmetics."""
    table = make_table("Arithmetics with the same bits", ("optimizer", "mode", "type", "equal"), text_columns=4)
    for row in rows:
        nearest = min(row.get("found_out", {}).items(), key=lambda item: item[1][1], default=None)
        none = f"none; nearest {nearest[0]}: {nearest[1][1]:.1e}" if nearest else row.get("refused", "none")
        table.add_row(row["optimizer"], row["mode"], row["type"], ", ".join(row["equal"]) or none)
    make_console().print(table)


def show_probe(row: dict[str, Any]) -> None:
    """Prints what the probe measures beside what this does."""
    keys = ("state", "probed_state", "probed_beside", "predicted_beside", "probed_copied", "host_memory")
    table = make_table(f"State updated by {row['threads']} threads", ("of probe", *keys), text_columns=0)
    table.add_row(f"{row['of_probe']:.3f}", *(f"{row[f'{key}_bytes_per_s'] / 1e9:.2f} GB/s" for key in keys))
    make_console().print(table)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints a table and writes the file that was asked for."""
    parser = make_parser(__doc__, mib=64, rounds=7, elements=1_000_000, steps=20)
    parser.add_argument("--bits", default="", metavar="DEVICE", help="compare bits with PyTorch's on this device instead")
    parser.add_argument("--probe", default="", metavar="DEVICE", help="compare with what the probe measures there instead")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of all; default: one per processor")
    options = parser.parse_args(arguments)
    if options.bits:
        work = [(name, mode, type_name) for name in SUBJECTS for mode in MODES for type_name in TYPES]
        with progress(len(work)) as report:
            rows = []
            for name, mode, type_name in work:
                report(f"{name}, {mode}, {type_name}")
                rows.append(bits_row(name, mode, type_name, options))
        show_bits(rows)
    elif options.probe:
        rows = [probe_row(options)]
        show_probe(rows[0])
    else:
        counts = sorted({1, options.threads})
        rows = [
            speed_row(name, type_name, arithmetic, count, options)
            for name in TIMED
            for type_name in TYPES
            for arithmetic in ("contracted", "device-ops")  # which rounds once and most often in bf16
            for count in counts
        ]
        show_speed(rows)
    save(options.json, document(rows, torch=torch.__version__, instructions=_native.update_instructions()[0]))


if __name__ == "__main__":
    main()
