"""Machines and their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tieroff.core.machine import Link, Machine, load_machine, machine_from_mapping, save_machine, validate
from tieroff.core.tensor import Tier
from tieroff.errors import ConfigError

_VALUES = {
    "name": "box",
    "measured": "datasheet",
    "device_bytes": "40GiB",
    "host_bytes": "128GiB",
    "d2h_bytes_per_s": "15.754GiB",
    "h2d_bytes_per_s": 16e9,
    "d2h_latency_s": 1e-5,
}


def test_machine_takes_numbers_and_text_with_units() -> None:
    machine = machine_from_mapping(_VALUES)
    assert machine.device_bytes == 40 * 2**30
    assert machine.d2h_bytes_per_s == round(15.754 * 2**30)
    assert machine.link(Tier.HOST, Tier.DEVICE) == Link(Tier.HOST, Tier.DEVICE, 16_000_000_000, 0)
    assert machine.link(Tier.DEVICE, Tier.HOST).latency_ns == 10_000
    assert machine.duplex_share == 1.0
    assert machine.has_tier(Tier.HOST)
    assert not machine.has_tier(Tier.NVME)


def test_transfer_time_is_latency_and_bytes_over_bandwidth_rounded_up() -> None:
    assert Link(Tier.DEVICE, Tier.HOST, 3_000_000_000, 7).transfer_ns(4) == 7 + 2


def test_machine_file_gives_back_an_equal_machine(tmp_path: Path) -> None:
    values = {
        **_VALUES,
        "name": 'a "b" \\ \n',
        "kernel": "Linux 6.8",
        "checksum_bytes_per_s": "10GB",
        "dirs": {
            "/mnt/x y": {"engine": "uring", "is_direct": True, "ra te.s": [1, 2], "uring_read_bytes_per_s": "5GB"},
            "/b": {"engine": "threads", "drive": 'nvme0n1 ("Fast")', "file_system": "ext4", "read_latency_s": 1e-4},
        },
    }
    machine = machine_from_mapping(values)
    assert machine.dirs["/mnt/x y"]["uring_read_bytes_per_s"] == 5 * 10**9
    assert machine.checksum_bytes_per_s == 10**10
    save_machine(machine, tmp_path / "machine.toml")
    assert load_machine(tmp_path / "machine.toml") == machine


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"d2h_bytes": 1}, "'d2h_bytes_per_s'"),
        ({"d2h_bytes_per_s": 0}, "d2h_bytes_per_s is zero or missing"),
        ({"nvme_read_bytes_per_s": 5}, "nvme_write_bytes_per_s is zero or missing"),
        ({"nvme_bytes": 5}, "nvme_write_bytes_per_s is zero or missing"),
        ({"d2h_bytes_per_s": True}, "d2h_bytes_per_s"),
        ({"host_bytes": "many"}, "host_bytes"),
        ({"d2h_latency_s": "soon"}, "d2h_latency_s"),
        ({"d2h_latency_s": -1}, "d2h_latency_s"),
        ({"d2h_bytes_per_s": float("nan")}, "d2h_bytes_per_s"),
        ({"duplex_share": 0}, "duplex_share"),
        ({"nvme_shares_host_link": 1}, "nvme_shares_host_link"),
        ({"name": 3}, "name"),
        ({"kernel": 6.1}, "kernel"),
        ({"checksum_bytes_per_s": "fast"}, "checksum_bytes_per_s"),
        ({"dirs": {"/a": 3}}, "'/a'.*expected a table"),
        ({"dirs": {"/a": {"engine": 3}}}, "'/a'.*engine as text"),
        ({"dirs": {"/a": {"is_direct": "yes"}}}, "is_direct as true or false"),
        ({"dirs": {"/a": {"write_bytes_per_s": True}}}, "write_bytes_per_s"),
        ({"/a": {"read_latency_s": -1}}, "read_latency_s"),
    ],
)
def test_machine_refuses_what_it_cannot_use(change: dict[str, object], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        machine_from_mapping({**_VALUES, **change})


def test_load_machine_refuses_a_file_that_is_no_toml(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("device_bytes = ")
    with pytest.raises(ConfigError, match=r"m\.toml"):
        load_machine(tmp_path / "m.toml")
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_machine(tmp_path / "none.toml")


def test_link_that_the_machine_lacks_is_an_error_that_names_its_key() -> None:
    with pytest.raises(ConfigError, match="nvme_write_bytes_per_s"):
        machine_from_mapping(_VALUES).link(Tier.DEVICE, Tier.NVME)
    with pytest.raises(ConfigError, match="two different tiers"):
        Machine().link(Tier.HOST, Tier.HOST)


def test_best_engine_is_the_one_that_all_directories_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"/a": {"engine": "uring"}, "/b": {"engine": "uring"}, "/c": {"engine": "threads"}, "/d": {"drive": "x"}}
    tables[str(tmp_path / "e")] = {"engine": "uring"}
    machine = machine_from_mapping({**_VALUES, "dirs": tables})
    assert machine.best_engine(["/a"]) == machine.best_engine([Path("/a"), "/b/"]) == "uring"
    monkeypatch.chdir(tmp_path)
    assert machine.best_engine(["e", "/a"]) == "uring"
    assert [machine.best_engine(dirs) for dirs in (["/a", "/c"], ["/a", "/d"], ["/a", "/nowhere"], [])] == [""] * 4


def test_write_rates_are_those_of_every_directory_or_none() -> None:
    tables = {"/a": {"write_bytes_per_s": "2GB"}, "/b": {"write_bytes_per_s": 10**9}, "/c": {"engine": "threads"}}
    machine = machine_from_mapping({**_VALUES, "dirs": tables})
    assert machine.write_rates(["/b", Path("/a")]) == [1e9, 2e9]
    assert [machine.write_rates(dirs) for dirs in (["/a", "/c"], ["/a", "/nowhere"], [])] == [None] * 3


def test_checksums_take_their_time_after_the_transfer() -> None:
    nvme = {"nvme_write_bytes_per_s": 3 * 10**9, "nvme_read_bytes_per_s": 6 * 10**9}
    machine = machine_from_mapping({**_VALUES, **nvme, "checksum_bytes_per_s": 6 * 10**9}).with_checksums()
    assert (machine.nvme_write_bytes_per_s, machine.nvme_read_bytes_per_s) == (2 * 10**9, 3 * 10**9)
    assert machine.d2h_bytes_per_s == round(15.754 * 2**30)
    unknown = machine_from_mapping({**_VALUES, **nvme})
    assert unknown.with_checksums() == unknown


@pytest.mark.parametrize(
    ("machine", "part"),
    [
        (Machine(h2d_bytes_per_s=1), "box: d2h_bytes_per_s is zero or missing"),
        (Machine(host_bytes=1), "d2h_bytes_per_s is zero or missing"),
        (Machine(nvme_write_bytes_per_s=1, nvme_bytes=1), "nvme_read_bytes_per_s is zero or missing"),
        (Machine(d2h_bytes_per_s=-1, h2d_bytes_per_s=1), "d2h_bytes_per_s as a number >= 0, got -1"),
        (Machine(d2h_latency_s=float("nan")), "d2h_latency_s as a number >= 0, got nan"),
        (Machine(duplex_share=1.5), "duplex_share above 0 and at most 1, got 1.5"),
    ],
)
def test_machine_without_a_link_or_with_a_wrong_value_is_refused(machine: Machine, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        validate(machine, "box")


def test_machine_without_lower_tiers_is_sound() -> None:
    validate(Machine(device_bytes=1))


def test_bandwidth_between_devices_may_be_given_by_mesh_dimension(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text('peer_bytes_per_s = ["1GiB", 25000000000]\n')
    found = load_machine(path)
    assert found.peer_bytes_per_s == (2**30, 25 * 10**9)
    assert found.peer_rates(0) == ()
    assert found.peer_rates(1) == (25 * 10**9,)
    assert found.peer_rates(3) == (2**30, 25 * 10**9, 25 * 10**9)
    assert Machine(peer_bytes_per_s=7).peer_rates(2) == (7, 7)
    save_machine(found, path)
    assert load_machine(path) == found
    with pytest.raises(ConfigError, match="the bandwidth between devices, but it is missing"):
        Machine(name="x").peer_rates(1)


@pytest.mark.parametrize("value", ["[]", "[0, 1]", '["fast"]', "[[1]]", "-1"])
def test_bandwidth_between_devices_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    (tmp_path / "machine.toml").write_text(f"peer_bytes_per_s = {value}\n")
    with pytest.raises(ConfigError, match="peer_bytes_per_s"):
        load_machine(tmp_path / "machine.toml")


def test_a_bandwidth_below_zero_in_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match="peer_bytes_per_s"):
        validate(Machine(peer_bytes_per_s=(1, -1)))
