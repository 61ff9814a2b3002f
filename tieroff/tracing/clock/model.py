"""The clock: how long a kernel takes on a GPU, from what its maker says of it and constants that hold for all.

A product of matrices runs at a share of the peak that depends on what the peak is made of, never faster than the board's
power allows, in tiles of 128 x 128 of which the last of each row and column are filled up, with a prologue per tile and
a tail while units run out of tiles. Everything else takes its memory traffic at a share of the memory's bandwidth, and
every kernel takes a floor. Constants come from measured steps (`scripts/evidence/fit_machines.py`); what `tieroff calibrate`
measured on a machine, the `[clock]` table of its file, comes first.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from typing import Any, ClassVar

from tieroff.core.machine import Machine
from tieroff.tracing.clock.work import Work, work_of
from tieroff.tracing.op_costs import expect_rates
from tieroff.units import NS_PER_S

TILE = 128
_DEPTH_OF_PROLOGUE = 10
_UNITS = 100
_MANY_LANES = 128
_REFERENCE_NM = 5
_NODE_EXPONENT = 1.2


@dataclass(frozen=True, slots=True)
class Constants:
    """What holds for every GPU until one is measured: shares of its maker's figures, and times.

    Attributes:
        matmul_fp32: share of peak of fp32 products, where each unit has 64 lanes.
        matmul_fp32_wide: where it has 128, which cannot all be fed at once.
        matmul_fp32_matrix: on matrix cores (CDNA).
        matmul_short: share of the two-byte peak that products reach on tensor cores.
        attention: share of the peak of its type that fused attention reaches.
        convolution: share of the fp32 peak that convolutions reach.
        memory: share of the memory's bandwidth.
        fp32_joule_per_flop: energy per operation in fp32 on a 5 nm process, with which the board's power bounds the rate.
        tail_tiles_per_unit: tiles that a product takes besides, per unit, until the last one is done.
        kernel_s: floor of every kernel.
        refill_s_per_byte: what an allocation costs in a step that nearly fills the card, see `refill_ns`.
        log_error: standard deviation of the logarithm of predicted over measured steps.
        log_error_unseen: the same for GPUs that the fit has not seen.
    """

    matmul_fp32: float
    matmul_fp32_wide: float
    matmul_fp32_matrix: float
    matmul_short: float
    attention: float
    convolution: float
    memory: float
    fp32_joule_per_flop: float
    tail_tiles_per_unit: float
    kernel_s: float
    refill_s_per_byte: float
    log_error: float
    log_error_unseen: float

    @classmethod
    def shipped(cls) -> Constants:
        """Returns the constants that `scripts/evidence/fit_machines.py` found."""
        text = files("tieroff.tracing.clock").joinpath("constants.toml").read_text(encoding="utf-8")
        return cls(**tomllib.loads(text))

    def of(self, measured: Mapping[str, float]) -> Constants:
        """Returns the constants with those that were measured on a machine in place of the common ones."""
        names = {f.name for f in fields(self)}
        return replace(self, **{key: value for key, value in measured.items() if key in names})


@dataclass(frozen=True, slots=True)
class Clock:
    """Prices kernels on one GPU.

    Attributes:
        machine: peaks, bandwidth, units, power.
        constants: its own, or those of all GPUs.
    """

    machine: Machine
    constants: Constants
    is_repeatable: ClassVar[bool] = True

    @classmethod
    def of(cls, machine: Machine, constants: Constants | None = None) -> Clock:
        """Returns the clock of a machine; `constants` replaces those that are shipped.

        Raises:
            ConfigError: the machine says nothing of its arithmetic or its memory.
        """
        expect_rates(machine)
        return cls(machine, (constants or Constants.shipped()).of(machine.clock))

    def duration_ns(self, func: Any, args: Any, kwargs: Any, out: Any) -> int:
        """Returns the estimated time of one call of an aten op, in ns."""
        work = work_of(func, args, kwargs, out)
        return 0 if work is None else round(self.work_s(work) * NS_PER_S)

    def work_s(self, work: Work) -> float:
        """Returns the time of one kernel's work in seconds."""
        c = self.constants
        memory_s = work.traffic_bytes / (self.machine.device_memory_bytes_per_s * c.memory)
        if work.kind == "memory":
            return c.kernel_s + memory_s
        if work.kind == "matmul":
            flops_per_s = self._product_flops_per_s(work.is_short)
            flops = self._product_flops(work)
        elif work.kind == "attention":
            flops_per_s, flops = c.attention * self._peak(work.is_short), work.flops
        else:
            flops_per_s, flops = c.convolution * self._peak(work.is_short), work.flops
        return c.kernel_s + max(flops / flops_per_s, memory_s)

    def _peak(self, is_short: bool) -> float:
        peak = self.machine.bf16_flops_per_s if is_short else 0.0
        return peak or self.machine.fp32_flops_per_s

    def _product_flops_per_s(self, is_short: bool) -> float:
        """Returns what large products reach: a share of the peak, and in fp32 no more than the board's power allows."""
        c, machine = self.constants, self.machine
        if is_short and machine.bf16_flops_per_s:
            return c.matmul_short * machine.bf16_flops_per_s
        share = c.matmul_fp32_wide if machine.fp32_lanes_per_unit >= _MANY_LANES else c.matmul_fp32
        if machine.has_fp32_matrix_cores:
            share = c.matmul_fp32_matrix
        reached = share * machine.fp32_flops_per_s
        if not machine.device_power_w or not machine.process_nm:
            return reached
        joule_per_flop: float = c.fp32_joule_per_flop * (machine.process_nm / _REFERENCE_NM) ** _NODE_EXPONENT
        return min(reached, machine.device_power_w / joule_per_flop)

    def _product_flops(self, work: Work) -> float:
        """Returns the operations of whole tiles, with each tile's prologue and the tail in which units run dry."""
        batch, rows, columns, depth = work.product
        if not depth:
            return float(work.flops)
        tiles = batch * math.ceil(rows / TILE) * math.ceil(columns / TILE)
        tail = self.constants.tail_tiles_per_unit * (self.machine.compute_units or _UNITS)
        return 2 * (tiles + tail) * TILE * TILE * (depth + _DEPTH_OF_PROLOGUE)
