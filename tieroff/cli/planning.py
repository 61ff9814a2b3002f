"""Commands about plans: `plan` and `compare`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tieroff.cli.options import (
    AnyTraceOption,
    AsJson,
    DeviceBudgetOption,
    Effort,
    EffortOption,
    ExecutionTraceOption,
    HostBudgetOption,
    MachineOption,
    ModelOption,
    NvmeBudgetOption,
    TraceOption,
    Wide,
)
from tieroff.cli.output import EXIT_INFEASIBLE, check_out, print_json
from tieroff.cli.recipes import (
    ADVICE_UNTIL_S,
    Autocast,
    BatchOption,
    Checkpointing,
    HfOption,
    RecipeOption,
    TokensOption,
    kernels_of,
    needs_of_recipe,
    step_of_recipe,
)
from tieroff.errors import ConfigError
from tieroff.report.terminal import print_rows, progress
from tieroff.units import NS_PER_S, format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from tieroff.core.machine import Machine
    from tieroff.core.tensor import Tier
    from tieroff.core.trace import Trace
    from tieroff.study.compare.rows import Result

_T = TypeVar("_T")


def plan(
    machine: MachineOption,
    device_budget: DeviceBudgetOption,
    trace: AnyTraceOption = None,
    execution_trace: ExecutionTraceOption = None,
    model: ModelOption = None,
    hf: HfOption = None,
    recipe: RecipeOption = None,
    tokens: TokensOption = None,
    batch: BatchOption = 1,
    is_checkpointed: Checkpointing = True,
    is_autocast: Autocast = False,
    host_budget: HostBudgetOption = None,
    nvme_budget: NvmeBudgetOption = None,
    policy: Annotated[str, typer.Option("--policy", help='"auto" or the name of a policy.')] = "auto",
    effort: EffortOption = Effort.fast,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan as JSON.")] = None,
    as_wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Plans a step for a machine and a budget, and says what would make it faster.

    The step is a traced one, or that of a model that is never materialised, its op times estimated for the machine. With --hf
    it is a common recipe's for a model that transformers carries: its configuration is all that is needed.
    """
    from tieroff.core.io.json_files import save_plan
    from tieroff.core.machine import load_machine
    from tieroff.planner.policies import find_policy
    from tieroff.study.compare.advice import TIME_LIMIT_S, advice, explain, interval_s
    from tieroff.study.compare.rows import plan_row
    from tieroff.study.profiles.files import load_trace

    find_policy(policy)
    check_out(out)
    if [model, trace, hf].count(None) != 2:
        raise typer.BadParameter("give one of --model MODULE:FACTORY, --trace PATH and --hf CONFIG_OR_ID")
    loaded, begin = load_machine(machine), time.monotonic()
    with progress() as report:
        report(f"tracing {model or trace or hf}", None)
        told: list[str] = []
        if hf is not None:
            step, told = step_of_recipe(hf, recipe, (tokens, batch, is_checkpointed, is_autocast), loaded)
        else:
            step = _dry_trace(model, loaded) if model is not None else load_trace(trace or Path(), execution_trace, loaded)
        step = _in_slices(step, loaded, device_budget, host_budget)
        problem = step, loaded, _budget(step, loaded, device_budget, host_budget, nvme_budget)
        report(f"planning and bounding {len(step.ops)} ops and {len(step.tensors)} tensors", None)
        found = plan_row(*problem, policy, effort.value)
        if out is not None and found.plan is not None:
            save_plan(found.plan, out)
        report("planning with more of each resource", None)
        limit_s = TIME_LIMIT_S
        if hf is not None:
            told += needs_of_recipe(*problem, found)
            limit_s = ADVICE_UNTIL_S - (time.monotonic() - begin)
        told += explain(*problem, found)
        if limit_s > 0:
            told += advice(*problem, found, effort.value, time_limit_s=limit_s)
    text = "\n".join(told)
    row = found.row.as_dict()
    if as_json:
        step_s = found.row.step_s
        print_json({**row, "interval_s": interval_s(step, step_s) if step_s is not None else None, "explain": text})
    else:
        print_rows([row], is_wide=as_wide)
        print(text)
        if found.plan is not None:
            print(f"planned in {format_seconds(found.row.plan_s or 0.0)}{f'; the plan is in {out}' if out else ''}")
    if found.plan is None:
        raise typer.Exit(EXIT_INFEASIBLE)


def compare(
    trace: TraceOption,
    machine: MachineOption,
    device_budget: DeviceBudgetOption,
    execution_trace: ExecutionTraceOption = None,
    host_budget: HostBudgetOption = None,
    nvme_budget: NvmeBudgetOption = None,
    policies: Annotated[str | None, typer.Option("--policies", help="Names, with commas; all when left out.")] = None,
    effort: EffortOption = Effort.fast,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the rows into this .html file.")] = None,
    as_wide: Wide = False,
    as_json: AsJson = False,
) -> None:
    """Plans one traced step with several policies, one row each; `auto` runs last and takes every plan as a candidate."""
    from tieroff.core.machine import load_machine
    from tieroff.planner.policies import all_policies
    from tieroff.report.page import check_page
    from tieroff.study.compare.rows import compare_rows
    from tieroff.study.profiles.files import load_trace

    if plot is not None:
        check_page(plot)
    names = [name.strip() for name in policies.split(",")] if policies else sorted(all_policies(), key=lambda n: n == "auto")
    loaded = load_machine(machine)
    step = load_trace(trace, execution_trace, loaded)
    budget = _budget(step, loaded, device_budget, host_budget, nvme_budget)
    with progress() as report:
        found = compare_rows(step, loaded, budget, names, effort.value, on_progress=report)
    if plot is not None:
        _write_plot(plot, step, loaded, budget, found)
    rows = [result.row.as_dict() for result in found]
    if as_json:
        print_json(rows)
    else:
        print_rows(rows, is_wide=as_wide)
        print(
            "faithful step: under the row's own options; with options it is not compared with auto, whose step is "
            "at most that of every row"
        )
        for row in rows:
            if row["reason"]:
                print(f"{row['policy']}: {row['reason']}")


def _write_plot(path: Path, trace: Trace, machine: Machine, budget: dict[Tier, int], found: Sequence[Result]) -> None:
    from tieroff.core.tensor import Tier
    from tieroff.study.compare.page import Compared, write_comparison

    device_bytes = budget[Tier.DEVICE]
    ideal_s = trace.ideal_ns / NS_PER_S
    rows = [(r.row, r.row.faithful_step_s if r.row.options else None, r.timeline) for r in found]
    compared = [Compared(row.policy, ideal_s, row.step_s, row.bound_s, line, own_s) for row, own_s, line in rows]
    title = f"{trace.name or 'trace'} on {machine.name or 'the machine'}, device budget {format_bytes(device_bytes)}"
    write_comparison(path, title, device_bytes, compared)


def _dry_trace(model: str, machine: Machine) -> Trace:
    """Returns the trace of a model's step; modules in the working directory are found too, as by `python -m`."""
    from tieroff.tracing.dry import dry_trace
    from tieroff.tracing.factory import find_factory

    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    name = model.partition(":")[0]
    print(f"tieroff: importing {name}, which runs what stands outside of its functions", file=sys.stderr)
    return dry_trace(find_factory(model), machine, name=model, kernels=kernels_of(machine))


def _in_slices(step: Trace, machine: Machine, device_budget: str, host_budget: str | None) -> Trace:
    """Returns the step as a run within this budget has it, which updates large parameters in slices."""
    from tieroff.device_budget import DeviceBudget
    from tieroff.planner.extended.slices import in_slices

    given = _option("--device-budget", DeviceBudget.parse, device_budget)
    host_bytes = machine.host_bytes if host_budget is None else _option("--host-budget", parse_bytes, host_budget)
    return step if given.share is not None else in_slices(step, machine, given.size_bytes, host_bytes)


def _budget(
    trace: Trace, machine: Machine, device_budget: str, host_budget: str | None, nvme_budget: str | None
) -> dict[Tier, int]:
    """Returns the budget per tier; a tier that none is given for has the machine's bytes."""
    from tieroff.core.buckets import bytes_below
    from tieroff.core.tensor import Tier
    from tieroff.device_budget import DeviceBudget
    from tieroff.planner.least import least
    from tieroff.planner.make_plan import default_capabilities
    from tieroff.planner.problem.problem import make_problem

    given = _option("--device-budget", DeviceBudget.parse, device_budget)
    lower = {Tier.HOST: ("--host-budget", host_budget), Tier.NVME: ("--nvme-budget", nvme_budget)}
    budget = {tier: _option(name, parse_bytes, text) for tier, (name, text) in lower.items() if text is not None}
    for tier, taken_bytes in bytes_below(trace.meta).items():
        of_machine = machine.host_bytes if tier is Tier.HOST else machine.nvme_bytes
        budget[tier] = max(budget.get(tier, of_machine) - taken_bytes, 0)
    if given.is_least:
        problem = make_problem(trace, machine, {**budget, Tier.DEVICE: 0}, default_capabilities(trace))
        return {**budget, Tier.DEVICE: least(problem).enough_bytes}
    return {**budget, Tier.DEVICE: given.resolve(trace.peak_bytes)}


def _option(name: str, parse: Callable[[str], _T], text: str) -> _T:
    """Returns what an option's text stands for; an error names the option."""
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
