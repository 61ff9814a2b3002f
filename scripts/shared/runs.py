"""Training runs in processes of their own, and the budget that a plain run's peak gives a wrapped one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from tieroff.config import Config
from tieroff.device_budget import DeviceBudget
from train_gpt import Options, Result

SHAPES: dict[str, dict[str, int]] = {"demo": {}, "gpt2": {"layers": 12, "width": 768, "heads": 12, "batch": 4, "length": 512}}
SCRIPTS = Path(__file__).resolve().parents[1]
HOST_SHARE = 0.1
STAGING_SHARE = 0.025
MESSAGE_CHARACTERS = 4000
# Torch's own switch, for both runs alike: large CPU tensors lie on huge pages. Memory that leaves the process when it is
# freed has to be faulted in again, page by page, and huge pages make that 512 times fewer.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}


class RunFailed(Exception):
    """A training process that ended with an error.

    Attributes:
        kind: name of the error's type, or "" when the process left no word.
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def run(
    options: Options,
    *,
    is_quiet: bool = False,
    script: Path = SCRIPTS / "train_gpt.py",
    more: Sequence[str] = (),
    limit_s: float | None = None,
    ranks: int = 1,
) -> Result:
    """Runs a script in a new process, where it can import those of `scripts`, and returns what it measured.

    Args:
        options: of the run, passed on the command line.
        is_quiet: keeps its messages for the error that it may end with.
        script: it takes the options, and writes a `Result` or an error to `metrics.json` in their folder.
        more: arguments that it takes besides them.
        ranks: processes that train together, under torchrun; the first one writes the result.
        limit_s: seconds after which the process is ended; None: it may take as long as it needs.

    Raises:
        RunFailed: the process ended with an error, or was ended.
    """
    if options.out is None:
        raise ValueError("expected a folder for the run's results")
    options.out.mkdir(parents=True, exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    arguments = [sys.executable, *torchrun, str(script), *more]
    for field in fields(Options):
        value = getattr(options, field.name)
        if isinstance(value, bool):
            arguments.append(f"--{field.name}" if value else f"--no-{field.name}")
        elif value is not None:
            arguments += [f"--{field.name}", str(value)]
    metrics = options.out / "metrics.json"
    metrics.unlink(missing_ok=True)
    # Standard error has progress and messages, standard output the sample, which is in the result too.
    messages = subprocess.PIPE if is_quiet else None
    paths = os.pathsep.join(filter(None, (str(SCRIPTS), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths}
    try:
        done = subprocess.run(
            arguments, stdout=subprocess.DEVNULL, stderr=messages, text=True, check=False, env=environment, timeout=limit_s
        )
    except subprocess.TimeoutExpired as expired:
        raise RunFailed(f"expected {' '.join(arguments)} to end within {expired.timeout:g} s; it was ended") from None
    content = json.loads(metrics.read_text()) if metrics.is_file() else {}
    if "error" in content:
        raise RunFailed(content["error"]["message"], content["error"]["type"])
    if done.returncode != 0 or not content:
        said = f":\n{done.stderr[-MESSAGE_CHARACTERS:]}" if done.stderr else ""
        raise RunFailed(f"expected exit status 0 from {' '.join(arguments)}, got {done.returncode}{said}")
    return Result(**content)


def fit_budget(config: Config, total_bytes: int, device: str, nvme_dir: Path) -> tuple[Config, int]:
    """Returns the config with its budget cut to `total_bytes`, and the bytes that a run is held to.

    On CUDA those are device memory. On the CPU the host tier and the staging buffers lie in the same RAM, so all three
    together make up the total; a config without folders has no staging.

    Args:
        config: where everything else is taken from.
        total_bytes: the budget.
        device: "cuda" or "cpu".
        nvme_dir: folder that takes the place of the config's folders, when it has any.
    """
    nvme = config.nvme
    if nvme.dirs:
        nvme = nvme.model_copy(update={"dirs": (nvme_dir.resolve(),)})
    if device == "cuda":
        budget = config.budget.model_copy(update={"device": DeviceBudget(size_bytes=total_bytes)})
        return config.model_copy(update={"device": "cuda", "budget": budget, "nvme": nvme}), total_bytes
    host = min(config.budget.host or 0, int(total_bytes * HOST_SHARE))
    staging = 0
    if nvme.dirs:
        staging = min(nvme.staging, max(2**20, int(total_bytes * STAGING_SHARE)))
        nvme = nvme.model_copy(update={"staging": staging})
    sizes = {"device": DeviceBudget(size_bytes=total_bytes - host - staging), "host": host}
    budget = config.budget.model_copy(update=sizes)
    return config.model_copy(update={"device": "cpu", "budget": budget, "nvme": nvme}), total_bytes


def wrapped(options: Options, config: Config) -> Options:
    """Returns the options of the same run under a config, which is written to the run's folder."""
    if options.out is None:
        raise ValueError("expected a folder for the run's results")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "config.toml"
    path.write_text(config.to_toml())
    return replace(options, config=path)
