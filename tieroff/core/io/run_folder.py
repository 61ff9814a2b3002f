"""A Run: what one wrapped training did, as data, and the folder that it is kept in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tieroff.core.history import History, StepFigures
from tieroff.core.io.json_files import (
    load_collectives,
    load_plan,
    load_steps,
    load_timeline,
    load_trace_json,
    save_collectives,
    save_plan,
    save_steps,
    save_timeline,
    save_trace,
    write_whole,
)
from tieroff.core.machine import Machine, load_machine, machine_to_toml
from tieroff.core.plan import Plan
from tieroff.core.ranks.collectives import Collectives
from tieroff.core.timeline import Timeline
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError, InvalidPlanError, StateError, TraceMismatchError

_CONFIG, _EXPLANATION, _RESULT = "config.toml", "explain.txt", "result.json"
_MACHINE = "planned_machine.toml"  # not machine.toml, which may be a person's own measurement
RUN_TRACE = "trace.json"
_PLAN, _TIMELINE, _STEPS = "plan.json", "timeline.json", "steps.json"
_COLLECTIVES = "collectives.json"
_NEEDED = (_CONFIG, RUN_TRACE, _PLAN, _TIMELINE)


@dataclass(frozen=True)
class Run:
    """What one wrapped training did.

    Attributes:
        trace, plan: of the kind of step that ran last.
        timeline: what the last planned step did; without ops when the plan moves nothing.
        config_toml: the config that it ran under.
        steps: figures of the steps, oldest first.
        machine: the one that the plan was made for; None when it is not known (the plan was given).
        explanation: the text of `Engine.explain(detail=True)`.
        result: the content of result.json, which scripts write; {} without one.
        collectives: those that this rank called last; None in a run of one process.
    """

    trace: Trace
    plan: Plan
    timeline: Timeline
    config_toml: str = ""
    steps: tuple[StepFigures, ...] = ()
    machine: Machine | None = None
    explanation: str = ""
    result: dict[str, Any] = field(default_factory=dict)
    collectives: Collectives | None = None

    @property
    def was_timed(self) -> bool:
        """True when there is a measured step."""
        return bool(self.timeline.ops)

    @property
    def last_planned(self) -> StepFigures | None:
        """The figures of the last step that ran as planned."""
        return next((step for step in reversed(self.steps) if step.phase in ("planned", "nothing moved")), None)


def save_run(run: Run, folder: str | Path) -> None:
    """Writes a run into a folder, which is made when it is missing; every file is there whole, or as it was before.

    result.json is left to programs that measure from outside.

    Raises:
        OSError: a file cannot be written.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    write_whole(path / _CONFIG, run.config_toml)
    save_trace(run.trace, path / RUN_TRACE)
    save_plan(run.plan, path / _PLAN)
    save_steps(History(run.steps), path / _STEPS)
    write_whole(path / _EXPLANATION, run.explanation + "\n")
    if run.machine is not None:
        write_whole(path / _MACHINE, machine_to_toml(run.machine))
    if run.collectives is not None:
        save_collectives(run.collectives, path / _COLLECTIVES)
    else:  # those of a run that was saved here before would be taken for its own
        (path / _COLLECTIVES).unlink(missing_ok=True)
    save_timeline(run.timeline, path / _TIMELINE)


def load_run(folder: str | Path) -> Run:
    """Returns the run in a folder.

    Raises:
        ConfigError: there is no such folder, or config.toml, planned_machine.toml, explain.txt or result.json cannot be read.
        StateError: files are missing: the run has not ended.
        CaptureError, InvalidPlanError: a file was cut off or is of another kind.
        TraceMismatchError: the files are of different runs.
    """
    path = Path(folder)
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        raise ConfigError(f"{path}: expected a run folder, as engine.save_run writes it, but found {found}")
    missing = [name for name in _NEEDED if not (path / name).is_file()]
    if missing:
        raise StateError(
            f"{path}: expected {', '.join(_NEEDED)} of a run that has ended, but there is no {', no '.join(missing)}: the "
            "run has not ended, it broke off, or this is another folder; engine.save_run(folder) writes them"
        )
    run = Run(
        trace=load_trace_json(path / RUN_TRACE),
        plan=load_plan(path / _PLAN),
        timeline=load_timeline(path / _TIMELINE),
        config_toml=_text(path / _CONFIG),
        steps=load_steps(path / _STEPS).steps if (path / _STEPS).exists() else (),
        machine=load_machine(path / _MACHINE) if (path / _MACHINE).exists() else None,
        explanation=_text(path / _EXPLANATION).removesuffix("\n") if (path / _EXPLANATION).exists() else "",
        result=_result(path / _RESULT) if (path / _RESULT).exists() else {},
        collectives=load_collectives(path / _COLLECTIVES) if (path / _COLLECTIVES).exists() else None,
    )
    _check_fits(run, path)
    return run


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a text file, but {error}") from error


def _result(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: truncated or not JSON: line {error.lineno}: {error.msg}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _check_fits(run: Run, path: Path) -> None:
    """Returns when plan and timeline are of the trace; whether the plan is a valid one is for `core.check` to say."""
    trace, plan, timeline = run.trace, run.plan, run.timeline
    if plan.trace_digest != trace.digest:
        raise TraceMismatchError(
            f"{path / _PLAN}: expected a plan for the trace beside it, {trace.digest}, got one for {plan.trace_digest}: the "
            "files are of two runs; save the run again"
        )
    op_count, tensor_count = len(trace.ops), len(trace.tensors)
    ticks = [tick for r in plan.residencies for tick in (r.start, r.stop)]
    ticks += [tick for t in plan.transfers for tick in (t.issue_at, t.ready_by)]
    ticks += [tick for r in plan.repeats for tick in (r.op, r.at)] + [u.op for u in plan.host_updates]
    tensors = [r.tensor for r in plan.residencies] + [t.tensor for t in plan.transfers]
    in_range = all(0 <= i < tensor_count for i in tensors) and all(0 <= tick <= 2 * op_count for tick in ticks)
    if plan.op_count != op_count or not in_range:
        raise InvalidPlanError(
            f"{path / _PLAN}: expected ops and tensors of the trace beside it ({op_count} and {tensor_count}), got others",
            rule="range",
        )
    of_timeline = [span.tensor for span in timeline.transfers] + [stall.tensor for stall in timeline.stalls]
    stalls_fit = all(0 <= stall.op <= op_count for stall in timeline.stalls)
    if len(timeline.ops) > op_count or not stalls_fit or not all(-1 <= i < tensor_count for i in of_timeline):
        raise TraceMismatchError(
            f"{path / _TIMELINE}: expected a timeline of the trace beside it ({op_count} ops, {tensor_count} tensors), got "
            "one of another step; save the run again"
        )
