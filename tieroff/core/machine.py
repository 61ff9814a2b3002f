"""A Machine: bytes per tier, and bandwidth and latency per directed link."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError
from tieroff.units import NS_PER_S, parse_bytes

LINK_NAMES = {
    (Tier.DEVICE, Tier.HOST): "d2h",
    (Tier.HOST, Tier.DEVICE): "h2d",
    (Tier.DEVICE, Tier.NVME): "nvme_write",
    (Tier.NVME, Tier.DEVICE): "nvme_read",
    (Tier.HOST, Tier.NVME): "nvme_write",
    (Tier.NVME, Tier.HOST): "nvme_read",
}


_FLAGS = ("nvme_shares_host_link", "has_fp32_matrix_cores")
_COUNTS = ("compute_units", "fp32_lanes_per_unit")
_FIGURES = ("device_power_w", "process_nm")
UPDATE_PASSES = 3.5
"""Bytes that an update reads and writes in memory per byte of state: Adam's reads p, g, m, v and writes p, m, v."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Link:
    """One directed channel between two tiers: a transfer takes `latency_ns` and its bytes over the bandwidth."""

    source: Tier
    target: Tier
    bytes_per_s: int
    latency_ns: int = 0

    @property
    def name(self) -> str:
        """One of d2h, h2d, nvme_write, nvme_read."""
        return LINK_NAMES[self.source, self.target]

    def transfer_ns(self, size_bytes: int) -> int:
        """Returns the time of one transfer that has the link to itself, in ns, rounded up."""
        return self.latency_ns - (-size_bytes * NS_PER_S // self.bytes_per_s)


@dataclass(frozen=True)
class Machine:
    """What was measured of a machine; the fields are the keys of machine.toml.

    Attributes:
        name, measured: which machine; date and method, or "datasheet".
        device_bytes, host_bytes, nvme_bytes: capacity of each tier; 0 for a missing tier.
        *_bytes_per_s: bandwidth of each link alone; 0 for a missing link.
        *_latency_s: seconds that every transfer takes in addition.
        duplex_share: what both directions of the host link move at once, over the sum of each alone.
        nvme_shares_host_link: traffic to the NVMe also fills the host link.
        move_compute_s: seconds of compute that each transfer takes: on the CPU backend the thread that trains starts
            transfers and computes. 0 for other devices, which compute meanwhile, and if unknown.
        move_host_s: seconds of the host that each transfer takes where the device computes meanwhile, 0 if unknown. See
            `counting_moves`.
        cpu_update_bytes_per_s: bytes of optimizer state that the CPU updates per second while nothing is copied, 0 if
            unknown.
        host_memory_bytes_per_s: what the host's memory reads and writes per second for copies and updates together, 0 if
            unknown. See `memory_passes`.
        checksum_bytes_per_s: bytes that one core makes a checksum of per second, 0 if unknown.
        fp32_flops_per_s, bf16_flops_per_s: dense matrix arithmetic of the device in fp32, and in its two-byte types (bf16
            and fp16), in operations per second; 0 if unknown. Op times of a model that never ran come from these.
        device_memory_bytes_per_s: what the device's own memory reads and writes per second, 0 if unknown.
        device_type: such as "cuda"; "" if unknown.
        compute_units: streaming multiprocessors or compute units, 0 if unknown.
        fp32_lanes_per_unit: fp32 operations (multiply and add) that a unit begins per clock, 0 if unknown.
        has_fp32_matrix_cores: its fp32 peak is that of matrix cores.
        device_power_w: what the board may draw, 0 if unknown.
        process_nm: of the chip, 0 if unknown.
        peer_bytes_per_s: what each device sends to others per second, 0 if unknown: one figure, or one per mesh dimension,
            outermost first. See `peer_rates`.
        nvme_endurance_bytes: bytes that may be written to all drives together over their life, 0 if unknown.
        kernel: the system that it was measured under.
        dirs: tables per directory, by absolute path. `engine` is the fastest there; see `FOLDER_TEXTS` for what else is
            checked. Other keys are kept as they are.
        clock: what `tieroff calibrate` measured or a fit found of the device's kernels, by name.
    """

    name: str = ""
    measured: str = ""
    device_bytes: int = 0
    host_bytes: int = 0
    nvme_bytes: int = 0
    d2h_bytes_per_s: int = 0
    h2d_bytes_per_s: int = 0
    nvme_write_bytes_per_s: int = 0
    nvme_read_bytes_per_s: int = 0
    d2h_latency_s: float = 0.0
    h2d_latency_s: float = 0.0
    nvme_write_latency_s: float = 0.0
    nvme_read_latency_s: float = 0.0
    duplex_share: float = 1.0
    nvme_shares_host_link: bool = False
    move_compute_s: float = 0.0
    move_host_s: float = 0.0
    cpu_update_bytes_per_s: int = 0
    host_memory_bytes_per_s: int = 0
    checksum_bytes_per_s: int = 0
    fp32_flops_per_s: float = 0.0
    bf16_flops_per_s: float = 0.0
    device_memory_bytes_per_s: int = 0
    device_type: str = ""
    compute_units: int = 0
    fp32_lanes_per_unit: int = 0
    has_fp32_matrix_cores: bool = False
    device_power_w: float = 0.0
    process_nm: float = 0.0
    peer_bytes_per_s: int | tuple[int, ...] = 0
    nvme_endurance_bytes: int = 0
    kernel: str = ""
    dirs: dict[str, dict[str, Any]] = field(default_factory=dict)
    clock: dict[str, float] = field(default_factory=dict)

    def has_tier(self, tier: Tier) -> bool:
        """True when both links between the device and a lower tier have a bandwidth."""
        names = (LINK_NAMES[Tier.DEVICE, tier], LINK_NAMES[tier, Tier.DEVICE])
        return all(getattr(self, f"{name}_bytes_per_s") > 0 for name in names)

    def capacity_bytes(self, tier: Tier) -> int:
        """Returns the bytes of a tier."""
        return int(getattr(self, f"{tier.value}_bytes"))

    def peer_rates(self, dimensions: int) -> tuple[int, ...]:
        """Returns what each device sends per second along each of so many mesh dimensions, outermost first.

        The last figure is of the devices that are nearest to each other: fewer dimensions take the last figures, more repeat
        the last.

        Raises:
            ConfigError: the machine gives no bandwidth between devices.
        """
        found = self.peer_bytes_per_s if isinstance(self.peer_bytes_per_s, tuple) else (self.peer_bytes_per_s,)
        if not found or not all(found):
            raise ConfigError(
                f"expected peer_bytes_per_s in machine {self.name!r}, the bandwidth between devices, but it is missing: add it"
            )
        return (*found, *found[-1:] * (dimensions - len(found)))[-dimensions:] if dimensions else ()

    def memory_passes(self, source: Tier, target: Tier) -> int:
        """Returns how often the host's memory reads or writes each byte of a copy.

        A copy of the CPU backend has both ends there. What moves between another device and a drive lies there in between,
        unless the two have a path of their own.
        """
        is_host_memory = self.device_type == "cpu"
        ends = {source, target}
        if ends == {Tier.DEVICE, Tier.NVME}:
            return 1 if is_host_memory else 2 * self.nvme_shares_host_link
        return 2 if is_host_memory and ends == {Tier.DEVICE, Tier.HOST} else 1

    @property
    def update_bytes_per_s(self) -> int:
        """Bytes of optimizer state that the CPU updates per second while copies go both ways; 0 if unknown.

        What wants more of the host's memory than there is gets its share of that, copies and updates alike.
        """
        copied = (self.d2h_bytes_per_s + self.h2d_bytes_per_s) * self.duplex_share * self.memory_passes(Tier.DEVICE, Tier.HOST)
        wanted = self.cpu_update_bytes_per_s * UPDATE_PASSES + copied
        if not self.host_memory_bytes_per_s or wanted <= self.host_memory_bytes_per_s:
            return self.cpu_update_bytes_per_s
        return int(self.cpu_update_bytes_per_s * self.host_memory_bytes_per_s / wanted)

    def link(self, source: Tier, target: Tier) -> Link:
        """Returns the link from one tier to another.

        Raises:
            ConfigError: there is no such link, or the machine gives it no bandwidth.
        """
        name = LINK_NAMES.get((source, target))
        if name is None:
            raise ConfigError(f"expected a link between two different tiers, got {source.value} to {target.value}")
        bandwidth = getattr(self, f"{name}_bytes_per_s")
        if bandwidth <= 0:
            raise ConfigError(
                f"machine {self.name!r} gives no bandwidth from {source.value} to {target.value}: "
                f"set {name}_bytes_per_s above 0, or give the {({source, target} - {Tier.DEVICE}).pop().value} "
                "tier a budget of 0"
            )
        return Link(source, target, bandwidth, round(getattr(self, f"{name}_latency_s") * NS_PER_S))

    def best_engine(self, dirs: Iterable[str | os.PathLike[str]]) -> str:
        """Returns the I/O engine that is fastest in each of these directories.

        "" when they do not agree, or one of them was not measured: a store runs on one engine.
        """
        engines = {str(self.dirs.get(os.path.abspath(folder), {}).get("engine", "")) for folder in dirs}
        return engines.pop() if len(engines) == 1 else ""

    def write_rates(self, dirs: Iterable[str | os.PathLike[str]]) -> list[float] | None:
        """Returns the bytes per second written to each of these directories, None when one of them was not measured."""
        rates = [float(self.dirs.get(os.path.abspath(folder), {}).get("write_bytes_per_s", 0)) for folder in dirs]
        return rates if rates and all(rates) else None

    def counting_moves(self) -> Machine:
        """Returns the machine as plans are to be chosen for it: what a transfer takes of the host counts as compute.

        A host that issues a step's work faster than the device does it has time to spare, so no step is predicted with this.
        But of plans that take the device equally long it finds the one of fewer, larger transfers.
        """
        return replace(self, move_compute_s=self.move_host_s) if self.move_host_s and not self.move_compute_s else self

    def with_checksums(self) -> Machine:
        """Returns the machine as it is when every transfer to and from the NVMe also makes a checksum.

        A byte then takes the link's time and one core's time for the checksum, one after the other. That is the most it
        can cost: engines with several threads hide a part of it behind other transfers.
        """
        if not self.checksum_bytes_per_s:
            return self
        rates = {"nvme_write_bytes_per_s": self.nvme_write_bytes_per_s, "nvme_read_bytes_per_s": self.nvme_read_bytes_per_s}
        sums = self.checksum_bytes_per_s
        return replace(self, **{key: rate * sums // (rate + sums) for key, rate in rates.items()})  # type: ignore[arg-type]


def _number(key: str, value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ConfigError(f"{where}: expected {key} as a number >= 0, got {value!r}")
    return float(value)


def _size(key: str, value: object, where: str) -> int:
    if isinstance(value, float):
        return round(_number(key, value, where))
    try:
        return parse_bytes(value)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ConfigError(f"{where}: {key}: {error}") from error


def _convert(key: str, value: object, where: str) -> object:
    if key == "peer_bytes_per_s" and isinstance(value, list):
        rates = tuple(_size(key, rate, where) for rate in value)
        if not rates or not all(rates):
            raise ConfigError(f"{where}: expected {key} as a number, or a list of numbers above 0, got {value!r}")
        return rates
    if key.endswith(("_bytes", "_bytes_per_s")):
        return _size(key, value, where)
    if key.endswith("_s"):
        return _number(key, value, where)
    if key == "duplex_share":
        share = _number(key, value, where)
        if not 0 < share <= 1:
            raise ConfigError(f"{where}: expected duplex_share above 0 and at most 1, got {value!r}")
        return share
    if key in _FLAGS and not isinstance(value, bool):
        raise ConfigError(f"{where}: expected {key} as true or false, got {value!r}")
    if key in _COUNTS:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{where}: expected {key} as a whole number >= 0, got {value!r}")
        return value
    if key in _FIGURES:
        return _number(key, value, where)
    if key in ("name", "measured", "kernel", "device_type"):
        if not hasattr(value, "isoformat") and not isinstance(value, str):
            raise ConfigError(f"{where}: expected {key} as text, got {value!r}")
        return str(value)
    return value


FOLDER_TEXTS = ("engine", "file_system", "drive")
"""Keys of a directory's table that hold text. Keys that start with `is_` hold true or false, and those that end with
`_bytes`, `_bytes_per_s` and `_s` what such a key holds elsewhere."""


def _folder(name: str, table: object, where: str) -> dict[str, Any]:
    where = f"{where}: [dirs.{name!r}]"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table, got {table!r}")
    for key, value in table.items():
        if key in FOLDER_TEXTS and not isinstance(value, str):
            raise ConfigError(f"{where}: expected {key} as text, got {value!r}")
        if key.startswith("is_") and not isinstance(value, bool):
            raise ConfigError(f"{where}: expected {key} as true or false, got {value!r}")
    return {key: _convert(key, value, where) for key, value in table.items()}


def machine_from_mapping(values: dict[str, Any], where: str = "machine") -> Machine:
    """Returns the machine that a mapping with the keys of machine.toml describes. Unknown tables go to `dirs`.

    Raises:
        ConfigError: an unknown key, a wrong type, or a tier that has bytes but a link without bandwidth.
    """
    names = [f.name for f in fields(Machine)]
    known: dict[str, Any] = {}
    dirs: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if key == "clock" and isinstance(value, dict):
            known[key] = {name: _number(f"[clock] {name}", figure, where) for name, figure in value.items()}
        elif isinstance(value, dict):
            tables = value if key == "dirs" else {key: value}
            dirs.update({name: _folder(name, table, where) for name, table in tables.items()})
        elif key not in names:
            nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            raise ConfigError(f"{where}: unknown key {key!r}; the nearest known one is {nearest[0]!r}")
        else:
            known[key] = _convert(key, value, where)
    machine = Machine(**known, dirs=dirs)
    for name in (f"{link}_bytes_per_s" for link in dict.fromkeys(LINK_NAMES.values())):
        if known.get(name) == 0:
            raise ConfigError(f"{where}: {name} is zero or missing: expected bytes per second above 0")
    validate(machine, where)
    return machine


def validate(machine: Machine, where: str = "machine") -> None:
    """Returns when a machine can be planned for.

    Raises:
        ConfigError: a value below 0 or not finite, a `duplex_share` out of range, or a lower tier that has bytes or one
            link, and no bandwidth on one of its links.
    """
    for name, value in ((f.name, getattr(machine, f.name)) for f in fields(machine)):
        figures = value if isinstance(value, tuple) else (value,)
        if any(isinstance(figure, (int, float)) and not 0 <= figure < float("inf") for figure in figures):
            raise ConfigError(f"{where}: expected {name} as a number >= 0, got {value!r}")
    if not 0 < machine.duplex_share <= 1:
        raise ConfigError(f"{where}: expected duplex_share above 0 and at most 1, got {machine.duplex_share!r}")
    for tier in (Tier.HOST, Tier.NVME):
        names = [f"{LINK_NAMES[ends]}_bytes_per_s" for ends in ((Tier.DEVICE, tier), (tier, Tier.DEVICE))]
        zero = [name for name in names if not getattr(machine, name)]
        if zero and (len(zero) == 1 or machine.capacity_bytes(tier)):
            raise ConfigError(f"{where}: {zero[0]} is zero or missing: expected bytes per second above 0")


def load_machine(path: str | Path) -> Machine:
    """Returns the machine that a TOML file describes.

    Raises:
        ConfigError: the file is missing, is no TOML, or `machine_from_mapping` refuses it.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        remedy = "`tieroff probe --dir FOLDER --out FILE` writes one"
        raise ConfigError(f"{path}: expected a machine.toml, but {error}; {remedy}") from error
    return machine_from_mapping(values, str(path))


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in text) + '"'
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    raise ConfigError(f"expected text, a number, true, false or a list of those in a machine, got {value!r}")


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_value(key)


def _is_left_out(key: str) -> bool:
    """True for a key that is not written when its value says "unknown"."""
    return key.endswith("_bytes_per_s") or key in (*_COUNTS, *_FIGURES, "device_type", "has_fp32_matrix_cores")


def machine_to_toml(machine: Machine) -> str:
    """Returns the text of a machine.toml."""
    values = {f.name: getattr(machine, f.name) for f in fields(machine) if f.name not in ("dirs", "clock")}
    present = {key: value for key, value in values.items() if value or not _is_left_out(key)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in present.items()]
    if machine.clock:
        lines += ["", "[clock]", *(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in machine.clock.items())]
    for name, table in machine.dirs.items():
        lines += ["", f"[dirs.{_toml_value(name)}]"]
        lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def save_machine(machine: Machine, path: str | Path) -> None:
    """Writes a machine.toml that `load_machine` reads back as an equal machine."""
    Path(path).write_text(machine_to_toml(machine), encoding="utf-8")
