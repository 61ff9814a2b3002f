"""A Machine: bytes per tier, and bandwidth and latency per directed link."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, field, fields
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
        device_bytes, host_bytes, nvme_bytes: capacity of each tier; 0 where there is none.
        *_bytes_per_s: bandwidth of each link alone; 0 where there is none.
        *_latency_s: seconds that every transfer takes besides.
        duplex_share: what both directions of the host link move at once, over the sum of each alone.
        nvme_shares_host_link: traffic to the NVMe also fills the host link.
        cpu_update_bytes_per_s: bytes of optimizer state that the CPU updates per second, 0 if unknown.
        dirs: tables per directory, kept as they are.
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
    cpu_update_bytes_per_s: int = 0
    dirs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def has_tier(self, tier: Tier) -> bool:
        """True when both links between the device and a lower tier have a bandwidth."""
        names = (LINK_NAMES[Tier.DEVICE, tier], LINK_NAMES[tier, Tier.DEVICE])
        return all(getattr(self, f"{name}_bytes_per_s") > 0 for name in names)

    def capacity_bytes(self, tier: Tier) -> int:
        """Returns the bytes of a tier."""
        return int(getattr(self, f"{tier.value}_bytes"))

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
    if key.endswith(("_bytes", "_bytes_per_s")):
        return _size(key, value, where)
    if key.endswith("_s"):
        return _number(key, value, where)
    if key == "duplex_share":
        share = _number(key, value, where)
        if not 0 < share <= 1:
            raise ConfigError(f"{where}: expected duplex_share above 0 and at most 1, got {value!r}")
        return share
    if key == "nvme_shares_host_link" and not isinstance(value, bool):
        raise ConfigError(f"{where}: expected {key} as true or false, got {value!r}")
    if key in ("name", "measured"):
        if not hasattr(value, "isoformat") and not isinstance(value, str):
            raise ConfigError(f"{where}: expected {key} as text, got {value!r}")
        return str(value)
    return value


def machine_from_mapping(values: dict[str, Any], where: str = "machine") -> Machine:
    """Returns the machine that a mapping with the keys of machine.toml describes. Unknown tables go to `dirs`.

    Raises:
        ConfigError: an unknown key, a wrong type, or a tier that has bytes but a link without bandwidth.
    """
    names = [f.name for f in fields(Machine)]
    known: dict[str, Any] = {}
    dirs: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            dirs.update(value if key == "dirs" else {key: value})
        elif key not in names:
            nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            raise ConfigError(f"{where}: unknown key {key!r}; the nearest known one is {nearest[0]!r}")
        else:
            known[key] = _convert(key, value, where)
    machine = Machine(**known, dirs=dirs)
    for tier in (Tier.HOST, Tier.NVME):
        for source, target in ((Tier.DEVICE, tier), (tier, Tier.DEVICE)):
            name = f"{LINK_NAMES[source, target]}_bytes_per_s"
            is_zero = known.get(name) == 0
            if is_zero or (machine.capacity_bytes(tier) and not getattr(machine, name)):
                raise ConfigError(f"{where}: {name} is zero or missing: expected bytes per second above 0")
    return machine


def load_machine(path: str | Path) -> Machine:
    """Returns the machine that a TOML file describes.

    Raises:
        ConfigError: the file is missing, is no TOML, or `machine_from_mapping` refuses it.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: expected a machine.toml, but {error}") from error
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


def machine_to_toml(machine: Machine) -> str:
    """Returns the text of a machine.toml."""
    values = {f.name: getattr(machine, f.name) for f in fields(machine) if f.name != "dirs"}
    present = {key: value for key, value in values.items() if value or not key.endswith("_bytes_per_s")}
    lines = [f"{key} = {_toml_value(value)}" for key, value in present.items()]
    for name, table in machine.dirs.items():
        lines += ["", f"[dirs.{_toml_value(name)}]"]
        lines += [f"{_toml_value(key)} = {_toml_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def save_machine(machine: Machine, path: str | Path) -> None:
    """Writes a machine.toml that `load_machine` reads back as an equal machine."""
    Path(path).write_text(machine_to_toml(machine), encoding="utf-8")
