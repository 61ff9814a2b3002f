"""Wrong arguments: each message says what was expected, what was given, and what to type instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tieroff
from tests.support.twins import MACHINE
from tieroff.cli import app
from tieroff.errors import TieroffError

pytestmark = pytest.mark.timeout(60)


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def wrap(config: Any = None, **options: Any) -> None:
    model, optimizer = pair()
    tieroff.wrap(model, optimizer, config, **options)


def unmade() -> tuple[nn.Module, torch.optim.Optimizer]:
    class Unmade(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": list(params)}]

    model = nn.Linear(2, 2)
    return model, Unmade(model.parameters())


def wrap_with(optimizer: Any) -> None:
    tieroff.wrap(pair()[0], optimizer)


def wrap_shared(models: list[nn.Module], times: int) -> None:
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], 0.1)
    tieroff.wrap(models, [optimizer] * times)


def table(name: str, **keys: Any) -> Callable[[], None]:
    return lambda: wrap({name: keys})


def wrapped(call: Callable[[Any, Any, Any], Any]) -> Callable[[], None]:
    """Returns a call on the engine of a wrapped model, with the model and its optimizer."""

    def run() -> None:
        model, optimizer = pair()
        tieroff.wrap(model, optimizer, {"device": "cpu"})
        try:
            call(tieroff.engine(model), model, optimizer)
        finally:
            tieroff.unwrap(model)

    return run


PROBLEM = ("--machine", "machine.toml", "--device-budget", "50%")
GPT = Path(__file__).resolve().parent.parent / "data" / "traces" / "gpt.json"


class _CommandError(TieroffError):
    """What a command wrote on standard error."""


def command(*arguments: str) -> Callable[[], None]:
    def run() -> None:
        result = CliRunner().invoke(app, list(arguments))
        assert result.exit_code in (1, 2)
        raise _CommandError(result.stderr)

    return run


# What is called wrongly -> what is expected, what was given, what to type.
TABLE: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "a share without %": (lambda: wrap(budget="50"), 'a share like "25%"', "got '50'", 'write "50%"'),
    "a number without %": (lambda: wrap(budget=50), 'a share like "25%"', "got 50, which would be 50 bytes", 'write "50%"'),
    "a fraction as text": (lambda: wrap(budget="0.5"), 'a share like "25%"', "got '0.5'", 'write "50%"'),
    "a fraction": (lambda: wrap(budget=0.5), "expected bytes like", "got 0.5", 'write "50%"'),
    "bytes as a float": (lambda: wrap(budget=0.5 * 12e9), "expected bytes like", "got 6000000000.0", 'write "6000000000"'),
    "no number": (lambda: wrap(budget=float("nan")), "expected bytes like", "got nan", 'write "min"'),
    "bytes with an exponent": (lambda: wrap(budget="6e9"), "expected bytes like", "got '6e9'", 'write "6000000000"'),
    "more than there can be": (lambda: wrap(budget=10**30), "expected bytes like", f"got {10**30}", 'write "min"'),
    "a share of no end": (lambda: wrap(budget="9" * 400 + "%"), "expected a share of at most", "got '999", '"100%" is what'),
    "per cent in words": (lambda: wrap(budget="50 percent"), "expected bytes like", "got '50 percent'", 'write "50%"'),
    "a unit in words": (lambda: wrap(budget="6gigs"), "expected bytes like", "got '6gigs'", 'write "6GiB"'),
    "a decimal comma": (lambda: wrap(budget="6,5GiB"), "expected bytes like", "got '6,5GiB'", 'write "6.5GiB"'),
    "a negative budget": (lambda: wrap(budget=-1), "expected bytes like", "got -1", 'write "min"'),
    "a budget of nothing": (lambda: wrap(budget="0%"), "expected a share above 0%", "got '0%'", 'write "min"'),
    "a list as budget": (lambda: wrap(budget=["50%"]), "expected bytes like", "got ['50%']", 'write "50%"'),
    "a table as budget": (lambda: wrap(budget={"device": "50%"}), "expected bytes", "got {'device': '50%'}", 'write "50%"'),
    "a flag as budget": (lambda: wrap(budget=True), "expected bytes like", "got True", 'write "min"'),
    "a budget as config": (lambda: wrap("50%"), "expected the path of a config file", "got '50%'", 'budget="50%"'),
    "a number as config": (lambda: wrap(3), "expected a path, a mapping or a Config", "got int", "budget=..."),
    "no such config": (lambda: wrap("no.toml"), "config file", "no.toml", "give a mapping such as"),
    "a config with an error": (lambda: wrap("text.toml"), "not valid TOML", "text.toml", "tables are [budget]"),
    "a budget as optimizer": (lambda: wrap_with("50%"), "expected a torch.optim.Optimizer", "got str", "budget=..."),
    "parameters as optimizer": (
        lambda: wrap_with(nn.Linear(2, 2).parameters()),
        "expected a torch.optim.Optimizer",
        "got generator",
        "torch.optim.AdamW(model.parameters())",
    ),
    "a config as optimizer": (lambda: wrap_with({"budget": {}}), "expected a torch.optim.Optimizer", "got dict", "config=..."),
    "a class as optimizer": (
        lambda: wrap_with(torch.optim.Adam),
        "expected a torch.optim",
        "got type",
        "Adam(model.parameters())",
    ),
    "a list of optimizers": (lambda: wrap_with([pair()[1]]), "expected a torch.optim", "got list", "param_groups"),
    "a scheduler as optimizer": (
        lambda: wrap_with(torch.optim.lr_scheduler.StepLR(pair()[1], 1)),
        "expected a torch.optim",
        "got StepLR",
        "give its .optimizer",
    ),
    "an optimizer that torch did not make": (
        lambda: tieroff.wrap(*unmade()),
        "expected an optimizer that torch.optim.Optimizer.__init__ has made",
        "got Unmade",
        "super().__init__(params, defaults)",
    ),
    "an optimizer of another model": (
        lambda: wrap_with(pair()[1]),
        "expected an optimizer of this model's parameters",
        "got SGD with 2 others",
        "made from model.parameters()",
    ),
    "a class as model": (lambda: tieroff.wrap(nn.Linear), "expected a torch.nn.Module", "got type", "Linear(...)"),  # type: ignore[call-overload]
    "one optimizer for a list of models": (
        lambda: tieroff.wrap([nn.Linear(2, 2)], pair()[1]),  # type: ignore[call-overload]
        "expected a list of 1 optimizers",
        "got SGD",
        "one for each model",
    ),
    "an optimizer that two models share": (
        lambda: wrap_shared([nn.Linear(2, 2), nn.Linear(2, 2)], 2),
        "an optimizer is of one",
        "this SGD already belongs to a wrapped model",
        "make one for each model",
    ),
    "an optimizer too few": (
        lambda: wrap_shared([nn.Linear(2, 2), nn.Linear(2, 2)], 1),
        "expected a list of 2 optimizers",
        "got 1 of them",
        "make one for each",
    ),
    "the optimizer first": (
        lambda: tieroff.wrap(pair()[1], pair()[0]),  # type: ignore[call-overload]
        "expected a torch.nn.Module",
        "got SGD",
        "tieroff.wrap(model, optimizer)",
    ),
    "an unknown table": (lambda: wrap({"budgets": {}}), "not a known key", "budgets", "did you mean budget?"),
    "an unknown key": (table("budget", devise=1), "not a known key", "[budget].devise", "did you mean [budget].device?"),
    "a key in no table": (lambda: wrap({"policy": "auto"}), "not a known key", "policy", "did you mean [plan].policy?"),
    "a budget for its table": (
        lambda: wrap({"budget": "50%"}),
        "budget: expected a table",
        "got '50%'",
        'write budget = { device = "50%" }',
    ),
    "folders for their table": (
        lambda: wrap({"nvme": ["/x"]}),
        "nvme: expected a table",
        "got ['/x']",
        'write nvme = { dirs = ["/x"] }',
    ),
    "a device in capitals": (lambda: wrap({"device": "CUDA"}), "expected auto", "got 'CUDA'", 'write device = "cuda"'),
    "a key of the wrong table": (
        lambda: tieroff.Config(policy="auto"),  # type: ignore[call-arg]
        "not a known key",
        "Config: policy",
        "did you mean [plan].policy?",
    ),
    "a wrong value in a config": (
        lambda: tieroff.Config(budget={"device": 0.5}),  # type: ignore[arg-type]
        "[budget].device: expected",
        "got 0.5",
        'write "50%"',
    ),
    "a wrong value in a copy": (
        lambda: tieroff.Config().plan.model_copy(update={"effort": "hihg"}),
        "[plan].effort: expected one of fast, high",
        "got 'hihg'",
        'write effort = "high"',
    ),
    "the same folder by another path": (
        table("nvme", dirs=["/x", "/y/../x"]),
        "each named once",
        "got ['/x', '/y/../x']",
        'write dirs = ["/x"]',
    ),
    "a name that is no UTF-8": (table("nvme", dirs=["/\udcff"]), "expected a list of folders", "got ['/\\udcff']", "rename it"),
    "a layer by its number": (
        table("plan", recompute_layers=[1]),
        "expected a list of names",
        "got 1",
        'write recompute_layers = ["blocks.0"]',
    ),
    "a folder that is no list": (table("nvme", dirs="/x"), "a list of folders", "got '/x'", 'write dirs = ["/x"]'),
    "a folder twice": (table("nvme", dirs=["/x", "/x"]), "each named once", "got ['/x', '/x']", 'write dirs = ["/x"]'),
    "an unknown engine": (table("nvme", engine="thread"), "expected one of", "got 'thread'", 'write engine = "threads"'),
    "a tier without folders": (table("budget", nvme="1GiB"), "[budget].nvme is set", "[nvme].dirs is empty", "name a folder"),
    "a share of host memory": (table("budget", host="50%"), "[budget].host: expected", "got '50%'", 'write host = "6GiB"'),
    "a flag in words": (table("budget", strict="yes"), "expected true or false", "got 'yes'", "write strict = true"),
    "an unknown policy": (table("plan", policy="atuo"), "unknown policy", "'atuo'", "the nearest is 'auto'"),
    "an unknown effort": (table("plan", effort="hihg"), "expected one of fast, high", "got 'hihg'", 'write effort = "high"'),
    "an unknown class": (table("plan", cover=["weights"]), "expected a list out of", "got 'weights'", "write cover = ["),
    "a layer that is no list": (
        table("plan", recompute_layers="layers.*"),
        "expected a list of names",
        "got 'layers.*'",
        'write recompute_layers = ["layers.*"]',
    ),
    "no such layer": (table("plan", recompute_layers=["no.*"]), "names or patterns", "got 'no.*'", "write a pattern such as"),
    "no such machine": (table("plan", machine="no.toml"), "expected a machine.toml", "no.toml", "tieroff probe --dir"),
    "no such device": (lambda: wrap({"device": "gpu"}), "Expected one of cpu", 'device = "gpu"', 'use "auto" or "cpu"'),
    "an unknown type": (lambda: wrap({"compute_dtype": "fp16"}), "one of bf16", "got 'fp16'", 'compute_dtype = "bf16"'),
    "no such plan": (
        lambda: wrap({"device": "cpu"}, plan="no.json"),
        "expected a tieroff.plan",
        "no.json",
        "tieroff plan --out",
    ),
    "a plan of another kind": (
        lambda: wrap({"device": "cpu"}, plan="text.toml"),
        "expected a tieroff.plan file",
        "another kind",
        "tieroff plan --out",
    ),
    "a plan that is none": (
        lambda: wrap({"device": "cpu"}, plan={"moves": []}),
        "expected a plan",
        "got dict",
        "tieroff plan --out",
    ),
    "a device as backend": (lambda: wrap(backend="cuda"), "expected a backend object", "got 'cuda'", '{"device": "cpu"}'),
    "unwrap of a list": (
        lambda: tieroff.unwrap([pair()[0]]),  # type: ignore[arg-type]
        "expected one wrapped model",
        "got a list",
        "for each of them",
    ),
    "a second optimizer": (wrapped(lambda e, m, o: e.attach(o)), "attached already", "has one", "tieroff.unwrap(model)"),
    "a second wrap": (wrapped(lambda e, m, o: tieroff.wrap(m, o)), "this model", "wrapped already", "tieroff.unwrap(model)"),
    "no such method": (wrapped(lambda e, m, o: e.begin_in("fit")), "expected the name of a method", "got 'fit'", "such as"),
    "a plain model": (lambda: tieroff.engine(pair()[0]), "is not wrapped", "Linear", "call tieroff.wrap first"),
    "no such weights": (lambda: tieroff.load_weights(pair()[0], "no"), "expected a safetensors", "no:", "name a .safetensors"),
    "weights of a path": (
        lambda: tieroff.save_weights("out", pair()[0]),  # type: ignore[arg-type]
        "expected a torch.nn.Module and a path",
        "got str and Linear",
        "tieroff.save_weights(model, path)",
    ),
    "weights from a state dict": (
        lambda: tieroff.load_weights(pair()[0], {}),  # type: ignore[arg-type]
        "expected a torch.nn.Module and a path",
        "got Linear and dict",
        "tieroff.load_weights(model, path)",
    ),
    "shards of nothing": (
        lambda: tieroff.save_weights(pair()[0], "out", max_shard_bytes=0),
        "expected max_shard_bytes above 0",
        "got 0",
        'write "5GiB"',
    ),
    "plan with a share without %": (
        command("plan", "--trace", str(GPT), "--machine", "machine.toml", "--device-budget", "50"),
        "--device-budget: expected",
        "got '50'",
        'write "50%"',
    ),
    "a plan into no folder": (
        command("plan", "--trace", str(GPT), *PROBLEM, "--out", "no/plan.json"),
        "--out no/plan.json",
        "the folder no does not exist",
        "make it, or name another one",
    ),
    "a machine into a folder": (
        command("probe", "--dir", ".", "--seconds", "600", "--out", "empty"),
        "--out empty",
        "this is a folder",
        "name a file in it",
    ),
    "plan of an empty folder": (
        command("plan", "--trace", "empty", *PROBLEM),
        "expected the folder of a run",
        "empty",
        "save_run",
    ),
    "plan of no file": (command("plan", "--trace", "no.json", *PROBLEM), "expected a tieroff.trace", "no.json", "save_run"),
    "plan of a module": (command("plan", "--model", "train", *PROBLEM), "MODULE:FACTORY", "got 'train'", "such as"),
    "plan of no module": (command("plan", "--model", "nomod:f", *PROBLEM), "expected a function", "nomod", "as in an import"),
    "report of no run": (
        command("report", "empty"),
        "expected config.toml",
        "there is no config.toml",
        "engine.save_run(folder)",
    ),
}


def test_there_are_forty() -> None:
    assert len(TABLE) >= 40


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_a_wrong_argument_is_told_with_what_to_type_instead(
    row: tuple[Callable[[], Any], str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, expected, given, instead = row
    (tmp_path / "machine.toml").write_text(MACHINE)
    (tmp_path / "text.toml").write_text("[budget\n")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TieroffError) as caught:
        call()
    message = " ".join(str(caught.value).split())
    assert expected in message
    assert given in message
    assert instead in message
