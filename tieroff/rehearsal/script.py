"""Runs a script as `python script.py` would, on the rehearsed device, and notes where its steps end."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.optim.optimizer import register_optimizer_step_post_hook

from tieroff.rehearsal.build import Native
from tieroff.runtime.engine import Engine
from tieroff.session.ranks import on_wrap


@dataclass
class Performance:
    """What a script did.

    Attributes:
        marks: the device's counters when the script began, and at the end of each `optimizer.step`.
        engines: of the models that it wrapped.
        status: what it ended with, as a process would.
    """

    marks: list[dict[str, int]] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    status: int = 0


def perform(script: Path, arguments: Sequence[str], native: Native, *, is_quiet: bool) -> Performance:
    """Returns what the script did; its errors are printed.

    Args:
        script: the file.
        arguments: its own.
        native: the device, which is registered.
        is_quiet: sends its standard output to standard error.
    """
    done = Performance([_mark(native)])

    def note_step(*_: object) -> None:
        done.marks.append(_mark(native))
        native.restart_step_peak()

    token = on_wrap.set(done.engines.append)
    hooks = [register_optimizer_step_post_hook(note_step), _register_parameters()]
    torch.compiler.set_stance("force_eager")  # no compiler makes kernels of this device
    try:
        with _as_main(script, arguments), _quiet(is_quiet):
            done.status = _run(script)
    finally:
        on_wrap.reset(token)
        for hook in hooks:
            hook.remove()
    return done


def _mark(native: Native) -> dict[str, int]:
    return {**native.counters(), "cpu_ns": time.process_time_ns()}


def _run(script: Path) -> int:
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    except Exception:  # noqa: BLE001  whatever it is, it ends the script and not this command
        traceback.print_exc()
        return 1
    return 0


def _register_parameters() -> Any:
    """Has every parameter that a module gets lie on the device from its beginning: on the host it would take real memory.

    Modules allocate a parameter, register it and fill it then; what is allocated and not filled takes no memory.
    """

    def moved(_module: torch.nn.Module, _name: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter | None:
        if type(parameter) is not torch.nn.Parameter or parameter.device.type != "cpu" or parameter.is_sparse:
            return None
        return torch.nn.Parameter(torch.empty_like(parameter, device="cuda"), parameter.requires_grad)

    hook: Any = moved  # PyTorch declares that it returns nothing, and takes what it returns
    return torch_module.register_module_parameter_registration_hook(hook)


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _quiet(is_on: bool) -> Iterator[None]:
    if not is_on:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
