"""The config: its keys and defaults, where it comes from, and what it says about mistakes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tieroff.config import Config
from tieroff.device_budget import DeviceBudget
from tieroff.errors import ConfigError
from tieroff.units import GIB, KIB, MIB


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_config_defaults_when_nothing_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config.load()
    assert config.device == "auto"
    assert (config.budget.device, config.budget.host, config.budget.nvme) == (None, None, None)
    assert (config.nvme.dirs, config.nvme.engine) == (None, "auto")
    assert (config.nvme.staging, config.nvme.checksum) == (64 * MIB, "warmup")
    assert (config.plan.policy, config.plan.effort) == ("auto", "fast")
    assert config.plan.cover == ("activations", "parameters", "gradients", "optimizer")
    assert (config.plan.recompute, config.plan.exact) == (True, True)
    assert (config.plan.min_bytes, config.plan.machine) == (64 * KIB, None)


def test_config_reads_every_key(tmp_path: Path) -> None:
    config = Config.load(
        write(
            tmp_path / "all.toml",
            """
            device = "cpu"
            [budget]
            device = "25%"
            host = "8GiB"
            nvme = 100
            [nvme]
            dirs = ["/mnt/nvme0", "here"]
            engine = "threads"
            staging = "8 MiB"
            checksum = "always"
            [plan]
            policy = "floor"
            effort = "high"
            cover = ["activations"]
            recompute = false
            exact = false
            min_bytes = 0
            machine = "machine.toml"
            [parallel]
            plan = "partition.json"
            """,
        )
    )
    assert config.device == "cpu"
    assert config.budget.device == DeviceBudget(share=0.25)
    assert (config.budget.host, config.budget.nvme) == (8 * GIB, 100)
    assert config.nvme.dirs == (Path("/mnt/nvme0"), Path("here"))
    assert (config.nvme.engine, config.nvme.staging, config.nvme.checksum) == ("threads", 8 * MIB, "always")
    assert (config.plan.policy, config.plan.effort, config.plan.cover) == ("floor", "high", ("activations",))
    assert (config.plan.recompute, config.plan.exact, config.plan.min_bytes) == (False, False, 0)
    assert (config.plan.machine, config.parallel.plan) == (Path("machine.toml"), Path("partition.json"))


def test_config_source_order_is_argument_variable_file_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "tieroff.toml", "[budget]\nhost = 1")
    named = write(tmp_path / "named.toml", "[budget]\nhost = 2")
    given_file = write(tmp_path / "given.toml", "[budget]\nhost = 3")
    assert Config.load().budget.host == 1
    monkeypatch.setenv("TIEROFF_CONFIG", str(named))
    assert Config.load().budget.host == 2
    assert Config.load(given_file).budget.host == 3
    assert Config.load(str(given_file)).budget.host == 3
    assert Config.load({"budget": {"host": 4}}).budget.host == 4


def test_config_given_as_config_is_returned_as_it_is() -> None:
    config = Config.load({"device": "cpu"})
    assert Config.load(config) is config


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"budget": {"devcie": "25%"}}, "[budget].devcie is not a known key; did you mean [budget].device?"),
        ({"budgte": {}}, "budgte is not a known key; did you mean budget?"),
        ({"plan": {"minbytes": 1}}, "[plan].minbytes is not a known key; did you mean [plan].min_bytes?"),
        ({"staging": 1}, "staging is not a known key; did you mean [nvme].staging?"),
        ({"budget": {"dirs": []}}, "[budget].dirs is not a known key; did you mean [nvme].dirs?"),
        ({"nvme": {"qqqq": 1}}, "[nvme].qqqq is not a known key; known here: dirs, engine, staging, checksum"),
    ],
)
def test_config_unknown_key_names_the_nearest(content: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(content)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            {"device": "cuda 1"},
            "device: expected auto, or a device of PyTorch such as cpu, cuda, \"cuda:1\" or xpu, got 'cuda 1'",
        ),
        ({"budget": 3}, "budget: expected a table, got 3"),
        ({"budget": {"device": "25 x"}}, '[budget].device: expected bytes like "6GiB", a share like "25%" or "min", got'),
        ({"budget": {"device": "0%"}}, "[budget].device: expected"),
        ({"budget": {"device": 2.5}}, "[budget].device: expected"),
        ({"budget": {"host": "25%"}}, "[budget].host: expected bytes like \"6GiB\" or 4096, got '25%'"),
        ({"budget": {"host": -1}}, "[budget].host: expected"),
        ({"budget": {"nvme": True}}, "[budget].nvme: expected"),
        ({"nvme": {"dirs": "/mnt"}}, "[nvme].dirs: expected a list of folders, each named once, got '/mnt'"),
        ({"nvme": {"dirs": ["/mnt", "/mnt"]}}, "[nvme].dirs: expected"),
        ({"nvme": {"dirs": [""]}}, "[nvme].dirs: expected"),
        ({"nvme": {"engine": "aio"}}, "[nvme].engine: expected one of auto, gds, uring, threads, aiofiles"),
        ({"plan": {"recompute": 1}}, "[plan].recompute: expected true or false, got 1"),
        ({"plan": {"cover": ["weights"]}}, "[plan].cover: expected a list out of activations, parameters"),
        ({"plan": {"policy": ""}}, "[plan].policy: expected"),
    ],
)
def test_config_wrong_value_says_what_was_expected_and_found(content: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load(content)
    assert told in str(caught.value)


def test_config_reports_every_mistake_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.load({"device": "cuda 1", "plan": {"exakt": True}})
    assert "device: expected" in str(caught.value)
    assert "did you mean [plan].exact?" in str(caught.value)


def test_config_knows_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    config = Config.load({"nvme": {"dirs": ["~/drive", "here"]}, "plan": {"machine": "~/machine.toml"}})
    assert config.nvme.dirs == (Path("/home/somebody/drive"), Path("here"))
    assert config.plan.machine == Path("/home/somebody/machine.toml")


def test_config_that_is_copied_has_its_tables_read() -> None:
    assert Config().model_copy(update={"budget": {"device": "25%"}}) == Config.load({"budget": {"device": "25%"}})


def test_config_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot read this config file: No such file"):
        Config.load(tmp_path / "none.toml")
    monkeypatch.setenv("TIEROFF_CONFIG", "nowhere.toml")
    with pytest.raises(ConfigError, match=r"nowhere\.toml \(from TIEROFF_CONFIG\)"):
        Config.load()


def test_config_that_is_no_toml_names_the_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        Config.load(write(tmp_path / "bad.toml", "[budget]\ndevice = = 3"))
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid TOML"):
        Config.load(tmp_path / "binary.toml")


def test_config_source_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a path, a mapping or a Config, got int"):
        Config.load(3)  # type: ignore[arg-type]


def test_config_is_immutable() -> None:
    config = Config.load({})
    with pytest.raises(ValidationError):
        config.budget.host = 3  # type: ignore[misc]


def test_device_budget_resolves_bytes_and_shares() -> None:
    assert DeviceBudget.parse("1GiB").resolve(123) == GIB
    assert DeviceBudget.parse("25%").resolve(1000) == 250
    assert DeviceBudget.parse("12.5 %").resolve(1000) == 125
    assert DeviceBudget.parse(700).resolve(1000) == 700
    assert DeviceBudget.parse("0").resolve(1000) == 0
    with pytest.raises(ConfigError, match="expected bytes, a share or"):
        DeviceBudget()


def test_device_budget_is_written_as_it_is_read() -> None:
    assert "device = 4096\n" in Config.load({"budget": {"device": "4KiB"}}).to_toml()
    assert 'device = "12.5%"\n' in Config.load({"budget": {"device": "12.5%"}}).to_toml()


sizes = st.integers(0, 2**50)


@given(
    device=st.none() | sizes | st.decimals(min_value="0.1", max_value="400", places=2).map(lambda share: f"{share}%"),
    host=st.none() | sizes,
    dirs=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1), unique_by=Path),
    min_bytes=sizes,
    exact=st.booleans(),
)
def test_config_survives_its_own_toml(
    device: int | str | None, host: int | None, dirs: list[str], min_bytes: int, exact: bool
) -> None:
    given_config = Config.load(
        {
            "budget": {key: value for key, value in (("device", device), ("host", host)) if value is not None},
            "nvme": {"dirs": dirs},
            "plan": {"min_bytes": min_bytes, "exact": exact},
        }
    )
    assert Config.load(tomllib.loads(given_config.to_toml())) == given_config
