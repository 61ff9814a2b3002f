"""The user's config: TOML, a mapping or a `Config`, validated before anything else happens."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from tieroff.device_budget import LIKELY_SHARE, DeviceBudget
from tieroff.errors import ConfigError
from tieroff.units import parse_bytes

CONFIG_VARIABLE = "TIEROFF_CONFIG"
CONFIG_FILE = "tieroff.toml"

_DEVICE = re.compile(r"[a-z][a-z0-9]*(:\d+)?")
_BUDGET = re.compile(r"\s*(min|[0-9]+(\.[0-9]+)?\s*(%|[kmgt]?i?b)?)\s*", re.IGNORECASE)


def _to_size(value: object) -> int:
    try:
        return parse_bytes(value)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _to_device_budget(value: object) -> DeviceBudget:
    try:
        return DeviceBudget.parse(value)  # type: ignore[arg-type]
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _to_path(value: object) -> Path:
    if not isinstance(value, (str, Path)) or not str(value):
        raise ValueError("expected a path")
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise ValueError("expected a path; a config is UTF-8, and the name of this path is not: rename it") from None
    try:
        return Path(value).expanduser()  # no shell has read a config
    except RuntimeError as error:
        raise ValueError(f"expected a path; {error}: write it without ~") from None


def _to_dirs(value: object) -> tuple[Path, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        raise ValueError("expected a list of paths")
    dirs = tuple(_to_path(item) for item in value)
    if len({os.path.abspath(folder) for folder in dirs}) < len(dirs):
        raise ValueError("expected each folder once")
    return dirs


def _to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _to_count(value: object) -> object:
    if not isinstance(value, int):
        raise ValueError("expected true, false or a number of backward passes")
    return int(value)


def _to_device(value: object) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError("expected the name of a device, with or without an index")
    return value


Size = Annotated[int, BeforeValidator(_to_size)]
Share = Annotated[DeviceBudget, BeforeValidator(_to_device_budget), PlainSerializer(DeviceBudget.written)]
FilePath = Annotated[Path, BeforeValidator(_to_path)]

Device = Annotated[str, BeforeValidator(_to_device)]
EngineName = Literal["auto", "gds", "uring", "threads", "aiofiles"]
Checksum = Literal["off", "warmup", "always"]
Effort = Literal["fast", "high"]
Cover = Literal["activations", "parameters", "gradients", "optimizer"]
ComputeType = Literal["bf16"]

_ANY_SIZE = 'bytes like "6GiB" or 4096'


def _key(default: object, expected: str, meaning: str) -> Any:
    """Returns a pydantic field with the text for errors (`expected`) and for the config reference (`meaning`)."""
    return Field(default=default, description=meaning, json_schema_extra={"expected": expected})


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with changed values, which are checked as those of a file.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type.
        """
        try:
            return type(self).model_validate({**dict(self), **(update or {})})
        except ValidationError as error:
            raise ConfigError("\n".join(_describe(error, "model_copy", type(self)))) from None


class Budget(_Table):
    """Limits per tier. Without a key, the limit is what the machine has."""

    device: Share | None = _key(
        None,
        'bytes like "6GiB", a share like "25%" or "min"',
        "Device memory for the tensors of a step. A share refers to the step's peak of live bytes with nothing moved; `min` is "
        "the least that each kind of step runs in. A share that could save less than 32 times `[plan] min_bytes` moves "
        "nothing, with one `BudgetWarning`, unless `strict`. On the CPU backend, bytes are resident bytes: memory that the "
        "process takes apart from tensors is subtracted, as far as the step still runs. Left out: the device's free memory.",
    )
    strict: bool = _key(
        False,
        "true or false",
        "What happens to a device budget below the least that a step runs in: it is raised to that, with one "
        "`BudgetWarning` (`false`), or `InfeasiblePlanError` ends the run (`true`).",
    )
    host: Size | None = _key(
        None,
        _ANY_SIZE,
        "Pinned host memory, a hard limit. Left out: on CUDA half of the memory that this process may still use; on the CPU "
        "backend 0, because the device tier is ordinary memory there.",
    )
    nvme: Size | None = _key(
        None, _ANY_SIZE, "Room in the folders. Left out: 0 without folders, else their free space less a margin."
    )
    keep_freed: bool = _key(
        True,
        "true or false",
        "The CPU backend reuses freed memory within the budget, also that of torch's large tensors, because fresh memory from "
        "the kernel is slow. `false` returns freed memory at once and does not redirect torch's calls into the C library: "
        "needed for memory profilers that are attached to the running process.",
    )


class Nvme(_Table):
    """The NVMe tier. Without folders there is none, and the other keys have no effect."""

    dirs: Annotated[tuple[Path, ...] | None, BeforeValidator(_to_dirs)] = _key(
        None,
        "a list of folders, each named once",
        "Folders on local drives, relative to the working directory. Extents are striped over them in proportion to their "
        "measured speed. Nothing remains in them after a run, however it ends. Left out: none, but on the CPU backend, where a "
        "device budget has no other tier below it, the folder for temporary files, which is said; `[]`: none.",
    )
    engine: EngineName = _key(
        "auto",
        f"one of {', '.join(get_args(EngineName))}",
        "The I/O engine. `auto` takes `threads`, or the engine that the machine file names as faster in these folders.",
    )
    staging: Size = _key(
        64 * 2**20,
        _ANY_SIZE,
        "Bounce buffers between device and drive, part of the host budget and at most half of it; with `host = 0` the only "
        "host memory in use. Models under one `tieroff.Budget` have such buffers each, those of the first one within `host`.",
    )
    checksum: Checksum = _key(
        "warmup",
        f"one of {', '.join(get_args(Checksum))}",
        "Which reads are compared with the checksum of the written bytes: none, those of the first steps, or all.",
    )


class Planning(_Table):
    """How the plan is made, and what it may do."""

    policy: Annotated[str, Field(min_length=1)] = _key(
        "auto", '"auto" or the name of a policy', "`auto`, or the name of a published policy."
    )
    effort: Effort = _key(
        "fast", f"one of {', '.join(get_args(Effort))}", "How long planning may take: seconds (`fast`) or minutes (`high`)."
    )
    cover: Annotated[tuple[Cover, ...], BeforeValidator(_to_tuple)] = _key(
        get_args(Cover), f"a list out of {', '.join(get_args(Cover))}", "The classes of tensors that may move."
    )
    recompute: bool = _key(
        True, "true or false", "Whether a plan may run modules of `recompute_layers` again instead of moving their outputs."
    )
    recompute_layers: Annotated[tuple[str, ...], BeforeValidator(_to_tuple)] = _key(
        (),
        'a list of names such as "blocks.0" or patterns such as "blocks.*"',
        "Modules that may run again in backward if `auto` finds that faster. Their forward must compute the same again and "
        "change nothing outside of them, as for torch.utils.checkpoint. tieroff checks this as far as it can observe it.",
    )
    update_in_backward: Annotated[int, Field(ge=0), BeforeValidator(_to_count)] = _key(
        0,
        "true, false, or the number of backward passes per update",
        "Updates parameters in backward as soon as the gradients of a bucket are final. Gradients need not be kept, and the "
        "optimizer's transfers overlap with backward. Only for loops with nothing between backward and the optimizer's step: "
        "no clipping, no GradScaler, no change of options. `true` is for one backward per update, `4` for four whose gradients "
        "add up; the last of them updates. Any other loop gets an error, after some parameters have been updated.",
    )
    update_on_host: bool = _key(
        True,
        "true or false",
        "Whether a plan may have the CPU update parameters in host memory, so that optimizer state does not cross the link. "
        "`false` keeps the CPU's cores for data loading, and shows what the device's updates cost.",
    )
    exact: bool = _key(
        True,
        "true or false",
        "Whether numbers must equal those of the plain run. `false` lets the CPU update parameters in host memory also where "
        "it rounds otherwise than the device does; `explain()` says in how many elements.",
    )
    min_bytes: Size = _key(64 * 2**10, _ANY_SIZE, "Smaller tensors never move; 0 moves everything that can.")
    background: bool = _key(
        True,
        "true or false",
        "Whether plans are made in a process of low priority while steps go on; those run with transfers on demand until the "
        "first plan is there, for which they wait two seconds at most. `false`: the training process plans, and its step "
        "waits. So does a policy of your own. Several ranks wait in any case, so that all take the same steps by plan.",
    )
    machine: FilePath | None = _key(
        None,
        "the path of a file written by `tieroff probe`",
        "Measurements of this machine. Left out: links and folders, and on an accelerator what the CPU updates, are measured "
        "for two seconds at the start.",
    )


class Parallel(_Table):
    """Several ranks that hold one model together. Without `plan` each rank holds what its script gives it."""

    plan: FilePath | None = _key(
        None,
        "the path of a file written by `tieroff partition --out`",
        "`wrap` splits the model over the ranks as this file says, as `tieroff.parallelize` does, and moves the optimizer's "
        "state of each part. `tieroff launch` starts as many ranks as the file has devices.",
    )


class Config(_Table):
    """All settings of a run. Immutable; `model_copy(update=...)` returns a changed copy."""

    device: Device = _key(
        "auto",
        'auto, or a device of PyTorch such as cpu, cuda, "cuda:1" or xpu',
        "Where to compute; `auto` is where the model's parameters are.",
    )
    compute_dtype: ComputeType | None = _key(
        None,
        f"one of {', '.join(get_args(ComputeType))}",
        "Forward casts parameters and floating inputs to this type. Parameters, gradients and optimizer state keep theirs. It "
        "equals FSDP2's mixed precision with `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` on "
        "the root. Left out: no cast.",
    )
    budget: Budget = _key(Budget(), "a table", Budget.__doc__ or "")
    nvme: Nvme = _key(Nvme(), "a table", Nvme.__doc__ or "")
    plan: Planning = _key(Planning(), "a table", Planning.__doc__ or "")
    parallel: Parallel = _key(Parallel(), "a table", Parallel.__doc__ or "")

    if not TYPE_CHECKING:  # whose checkers know the keys by the fields

        def __init__(self, **values: Any) -> None:
            """Takes the keys of the TOML file.

            Raises:
                ConfigError: a key is unknown, or a value has the wrong type.
            """
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigError("\n".join(_describe(error, "Config"))) from None

        # Validating makes no call of this, so an error of a file names the file.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | Path | None = None) -> Config:
        """Returns the config from a source.

        Args:
            source: a `Config`, a mapping with the keys of the TOML file, the path of such a file, or None: then the
                file named by the environment variable TIEROFF_CONFIG, else `tieroff.toml` in the working directory,
                else the defaults.

        Raises:
            ConfigError: the file is missing or not TOML, a key is unknown, or a value has the wrong type.
        """
        if isinstance(source, Config):
            return source
        if isinstance(source, Mapping):
            return cls._from_mapping(source, origin="config")
        if source is not None and not isinstance(source, (str, Path)):
            hint = "a budget is wrap(model, optimizer, budget=...)" if isinstance(source, (int, float)) else "{} is the default"
            raise ConfigError(f"config: expected a path, a mapping or a Config, got {type(source).__name__}; {hint}")
        if isinstance(source, str) and not Path(source).exists() and _BUDGET.fullmatch(source):
            budget = source.strip() + ("%" if LIKELY_SHARE.fullmatch(source) else "")
            raise ConfigError(
                f"config: expected the path of a config file, got {source!r}, which is a budget; "
                f'write tieroff.wrap(model, optimizer, budget="{budget}")'
            )
        if source is not None:
            return cls._from_file(Path(source), origin=str(source))
        if named := os.environ.get(CONFIG_VARIABLE):
            return cls._from_file(Path(named), origin=f"{named} (from {CONFIG_VARIABLE})")
        if Path(CONFIG_FILE).is_file():
            return cls._from_file(Path(CONFIG_FILE), origin=CONFIG_FILE)
        return cls()

    def with_device_budget(self, value: int | str | DeviceBudget) -> Config:
        """Returns the config with another device budget: bytes, "6GiB", "25%" or "min".

        Raises:
            ConfigError: the value has another form.
        """
        try:
            device = DeviceBudget.parse(value)
        except ConfigError as error:
            raise ConfigError(f"budget: {error}") from None
        return self.model_copy(update={"budget": self.budget.model_copy(update={"device": device})})

    def to_toml(self) -> str:
        """Returns TOML text that loads as an equal config. Values that are None are left out."""
        content = self.model_dump(mode="json", exclude_none=True)
        tables = {key: value for key, value in content.items() if isinstance(value, dict)}
        lines = [f"{key} = {_toml_value(value)}" for key, value in content.items() if key not in tables]
        for name, table in tables.items():
            if table:
                lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items())]
        return "\n".join(lines) + "\n"

    @classmethod
    def _from_file(cls, path: Path, origin: str) -> Config:
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = 'name a TOML file, give a mapping such as {"budget": {"device": "50%"}}, or leave it out'
            raise ConfigError(f"{origin}: cannot read this config file: {reason}; {remedy}") from error
        except ValueError as error:  # TOMLDecodeError, with line and column, or UnicodeDecodeError
            raise ConfigError(f'{origin}: not valid TOML: {error}; tables are [budget], keys device = "50%"') from error
        return cls._from_mapping(content, origin)

    @classmethod
    def _from_mapping(cls, content: Mapping[str, Any], origin: str) -> Config:
        try:
            return cls.model_validate(dict(content))
        except ValidationError as error:
            raise ConfigError("\n".join(_describe(error, origin))) from None


def _describe(error: ValidationError, origin: str, root: type[_Table] = Config) -> Iterator[str]:
    """Yields one line per wrong key or value of a table and those in it: its place, the expected and the given value."""
    above = [name for name, info in Config.model_fields.items() if info.annotation is root]
    for problem in error.errors():
        *tables, key = above + [str(part) for part in problem["loc"] if isinstance(part, str)] or ["config"]
        table = _table_at(tables)
        where = f"{origin}: {_dotted(tables, key)}"
        if problem["type"] == "extra_forbidden":
            yield f"{where} is not a known key{_nearest(key, tables)}"
        elif table is None or key not in table.model_fields:
            yield f"{where}: {problem['msg']}"
        else:
            told = problem["msg"].partition("; ")[2]  # by what parsed the value
            hint = told or f"write {key} = {_instead(table, key, problem['input'])}"
            yield f"{where}: expected {_expected(table, key)}, got {problem['input']!r}; {hint}"


def _instead(table: type[_Table], key: str, given: object) -> str:
    """Returns the value, as TOML, that a wrong one was probably meant to be; else one that the key takes."""
    expected, text = _expected(table, key), given if isinstance(given, str) else ""
    if expected == "true or false":
        return _toml_value(str(given).strip().lower() in ("1", "yes", "on", "true"))
    if table is Config and (inner := _table_at([key])) is not None:
        first = next(iter(inner.model_fields))
        is_budget = first == "device" and _BUDGET.fullmatch(text)
        return f"{{ {first} = {_toml_value(text) if is_budget else _instead(inner, first, given)} }}"
    if table is Config and key == "device":
        return _toml_value(found if _DEVICE.fullmatch(found := str(given).strip().lower()) else "auto")
    words = re.findall(r"[\w-]+", expected.partition("out of ")[2] or expected.partition("one of ")[2])
    near = difflib.get_close_matches(text.lower(), words, n=1, cutoff=0.4) or words[:1]
    example = re.search(r'"[^"]+"', expected)
    if expected.startswith("a list"):
        if words:
            return _toml_value(near)
        items = given if isinstance(given, (list, tuple)) else [given]
        names = [str(item) for item in items if isinstance(item, (str, Path)) and str(item)]
        names = list(dict.fromkeys(map(os.path.normpath, names) if key == "dirs" else names))
        return _toml_value(names) if names else f"[{example[0] if example else _toml_value('/mnt/nvme0')}]"
    if near:
        return _toml_value(near[0])
    return example[0] if example else f"... ({expected})"


def _expected(table: type[_Table], key: str) -> str:
    """Returns the text for errors of what a key takes."""
    extra = table.model_fields[key].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["expected"])


def _table_at(tables: list[str]) -> type[_Table] | None:
    """Returns the model of a table, by the path of keys that leads to it."""
    model: type[_Table] = Config
    for name in tables:
        found = model.model_fields[name].annotation if name in model.model_fields else None
        if not (isinstance(found, type) and issubclass(found, _Table)):
            return None
        model = found
    return model


def _dotted(tables: list[str], key: str) -> str:
    return f"[{'.'.join(tables)}].{key}" if tables else key


def _nearest(key: str, tables: list[str]) -> str:
    """Returns text that names the known key nearest to a wrong one, in its own table first."""
    known = {_dotted([], name): name for name in Config.model_fields}
    for name, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, _Table):
            known |= {_dotted([name], inner): inner for inner in info.annotation.model_fields}
    elsewhere = [place for place, name in known.items() if name == key]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    here = [place for place in known if place == _dotted(tables, known[place])]
    for places in (here, list(known)):
        names = {known[place]: place for place in reversed(places)}
        if match := difflib.get_close_matches(key.lower(), names, n=1, cutoff=0.6):
            return f"; did you mean {names[match[0]]}?"
    return f"; known here: {', '.join(known[place] for place in here)}"


def _toml_value(value: object) -> str:
    """Returns a string, integer, boolean or list of strings as TOML."""
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
