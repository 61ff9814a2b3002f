"""`plan --hf`: the step of a common recipe, from a configuration of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tieroff.tracing.recipes.kinds import Recipe
from tieroff.units import format_bytes

if TYPE_CHECKING:
    from tieroff.core.machine import Machine
    from tieroff.core.tensor import Tier
    from tieroff.core.trace import Trace
    from tieroff.study.compare.rows import Result
    from tieroff.tracing.recipes.recipe import Built, Settings

ADVICE_UNTIL_S = 12.0
"""After so long no plan with more of a resource begins: the answer for a model of 8 billion parameters comes within 30 s."""

HfOption = Annotated[
    str | None,
    typer.Option(
        "--hf",
        metavar="CONFIG_OR_ID",
        help="A config.json of transformers, its folder, or an id in the local cache; nothing is downloaded.",
    ),
]
RecipeOption = Annotated[Recipe | None, typer.Option("--recipe", help="With --hf: what is trained, in which types.")]
TokensOption = Annotated[int | None, typer.Option("--tokens", min=1, help="With --hf: tokens of each sequence.")]
BatchOption = Annotated[int, typer.Option("--batch", min=1, help="With --hf: sequences of one forward and backward.")]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing/--no-checkpointing", help="With --hf: layers run again in backward.")
]
Autocast = Annotated[bool, typer.Option("--autocast", help="With --hf: compute under torch.autocast in bfloat16.")]


def kernels_of(machine: Machine) -> str:
    """Returns the type of device whose kernels a model that never ran takes on a machine."""
    # Figures of a datasheet are peaks of an accelerator, of which the clock knows what is reached.
    return machine.device_type or ("cuda" if machine.measured.startswith("datasheet") else "cpu")


def step_of_recipe(
    hf: str, recipe: Recipe | None, sizes: tuple[int | None, int, bool, bool], machine: Machine
) -> tuple[Trace, list[str]]:
    """Returns the trace of a recipe's step, and what it is in words.

    Args:
        hf: the configuration, as `load_configuration` takes it.
        recipe: how the model is trained.
        sizes: tokens, sequences, whether layers run again in backward, whether forward runs under autocast.
        machine: whose op times are estimated.

    Raises:
        typer.BadParameter: the recipe or its tokens are missing.
        ConfigError: there is no such configuration, or a library is missing.
        CaptureError: the model's step needs values of tensors.
    """
    import torch

    from tieroff.tracing.dry import dry_trace
    from tieroff.tracing.recipes.configuration import load_configuration
    from tieroff.tracing.recipes.recipe import RecipeStep, Settings

    tokens, batch, is_checkpointed, is_autocast = sizes
    if recipe is None or tokens is None:
        raise typer.BadParameter("--hf needs --recipe and --tokens")
    settings = Settings(recipe, tokens, batch, is_checkpointed, torch.bfloat16 if is_autocast else None)
    step = RecipeStep(load_configuration(hf), settings)
    trace = dry_trace(step.factory, machine, name=f"{hf} {recipe.value}", kernels=kernels_of(machine), option="--hf")
    assert step.built is not None
    return trace, _described(step.built, settings)


def _described(built: Built, settings: Settings) -> list[str]:
    again = "layers run again in backward" if settings.is_checkpointed else "no layer runs again in backward"
    autocast = ", autocast to bfloat16" if settings.autocast is not None else ""
    lines = [
        f"{built.name}, {settings.recipe.value}: {built.count:,} parameters in {format_bytes(built.weight_bytes)}, "
        f"{built.trained_count:,} of them trained by AdamW.",
        f"{settings.batch} x {settings.tokens} tokens per step; {again}{autocast}; attention: {built.attention}.",
        *built.notes,
    ]
    if 0 < built.positions < settings.tokens:
        lines.append(f"The configuration has {built.positions} positions, fewer than {settings.tokens}: it has to be extended.")
    return lines


def needs_of_recipe(trace: Trace, machine: Machine, budget: dict[Tier, int], result: Result) -> list[str]:
    """Returns the least device memory that the step runs in, and what the plan moves, a line each."""
    from tieroff.core.explain.describe import describe
    from tieroff.core.tensor import Tier
    from tieroff.planner.least import least
    from tieroff.planner.make_plan import default_capabilities
    from tieroff.planner.problem.problem import make_problem

    problem = make_problem(trace, machine, {**budget, Tier.DEVICE: 0}, default_capabilities(trace))
    plain_bytes, enough_bytes = trace.peak_bytes, least(problem).enough_bytes
    lines = [
        f"Device memory: {format_bytes(plain_bytes)} with nothing moved, {format_bytes(enough_bytes)} at least "
        f"({enough_bytes / plain_bytes:.0%})."
    ]
    return lines + (describe(trace, result.plan) if result.plan is not None else [])
