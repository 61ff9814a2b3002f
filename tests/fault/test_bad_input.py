"""Bad input: an error that says what was expected, what was found and what to do, and nothing is lost."""

from __future__ import annotations

import errno
import os
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tieroff
from tests.support.twins import Mlp, Setting, adam, assert_same, follow, look, loss_of, mlp_and_adam
from tests.support.twins import usual_step as usual
from tieroff.core.io.json_files import load_plan, save_plan, save_trace
from tieroff.errors import (
    CaptureError,
    ConfigError,
    InfeasiblePlanError,
    InvalidPlanError,
    StateError,
    StoreError,
    TieroffError,
    TraceMismatchError,
)
from tieroff.storage.nvme.file_store import FileStore, Room
from tieroff.study.profiles.files import load_trace

pytestmark = pytest.mark.timeout(60)


def trained(setting: Setting, steps: int = 4, **planning: Any) -> Any:
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    setting.wrap(model, optimizer, **planning)
    for index in range(steps):
        torch.manual_seed(1000 + index)
        usual(model, optimizer)
    return model, optimizer


def assert_untouched(model: Any, before: dict[str, Any]) -> None:
    """The model is as it was, plain, and trains."""
    assert_same([before], [look(model, None)])
    assert type(model._parameters) is dict
    assert "forward" not in model.__dict__
    usual(model, adam(model))
    with pytest.raises(StateError, match="is not wrapped"):
        tieroff.engine(model)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"budget": {"devise": "25%"}}, r"\[budget\].devise is not a known key; did you mean \[budget\].device\?"),
        ({"buget": {}}, "buget is not a known key; did you mean budget"),
        ({"budget": {"device": [1]}}, r"\[budget\].device: expected bytes.*got \[1\]"),
        ({"plan": {"recompute": "yes"}}, r"\[plan\].recompute: expected true or false, got 'yes'"),
        ({"nvme": {"dirs": "/tmp"}}, r"\[nvme\].dirs: expected a list of folders.*got '/tmp'"),
        ({"plan": {"policy": "flor"}}, "flor"),
        ({"budget": {"nvme": "1GiB"}}, r"\[budget\].nvme is set but \[nvme\].dirs is empty"),
        ({"device": "cuda"}, "torch sees no accelerator"),
        ("missing.toml", "missing.toml: cannot read this config file"),
        (3, "expected a path, a mapping or a Config, got int"),
    ],
)
def test_a_wrong_config_is_told_before_anything_is_touched(config: Any, told: str) -> None:
    if told.startswith("torch sees") and torch.cuda.is_available():
        told = "^$"
    model = Mlp()
    before = look(model, None)
    with pytest.raises(ConfigError, match=told):
        tieroff.wrap(model, adam(model), config)
    assert_untouched(model, before)


def test_a_budget_below_the_largest_op(each_setting: Setting) -> None:
    torch.manual_seed(0)
    plain = follow(mlp_and_adam, usual, 4)
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    config = each_setting.config()
    config["budget"] |= {"device": 700, "strict": True}
    tieroff.wrap(model, optimizer, config, backend=each_setting.backend())
    with pytest.raises(InfeasiblePlanError) as caught:
        for index in range(4):
            torch.manual_seed(1000 + index)
            usual(model, optimizer)
    error = caught.value
    assert error.needed_bytes > error.available_bytes
    assert error.available_bytes <= 700
    assert error.op
    assert error.op in str(error)
    assert_same(
        [{k: v for k, v in plain.seen[0].items() if k.startswith("param")}],
        [{k: v for k, v in look(model, None).items() if k.startswith("param")}],
    )
    tieroff.unwrap(model)
    assert "step" not in optimizer.__dict__
    for index in (1, 2, 3):
        torch.manual_seed(1000 + index)
        out = usual(model, optimizer)
    assert_same([plain.seen[3]], [look(model, optimizer, out)])


@pytest.mark.parametrize("cover", [["parameters"], ["activations"], ["gradients"], ["optimizer"], []])
def test_parts_of_cover_are_obeyed(each_setting: Setting, cover: list[str]) -> None:
    def make() -> Any:
        model = nn.Sequential(Mlp(), nn.Tanh(), Mlp(), nn.Tanh(), Mlp())
        return model, adam(model)

    plain = follow(make, usual, 5)
    wrapped = follow(make, usual, 5, each_setting, {"cover": cover})
    assert_same(plain.seen, wrapped.seen)
    kinds = {"parameters": "parameter", "activations": "activation", "gradients": "gradient", "optimizer": "optimizer"}
    moved = {kind for kind, size in wrapped.moved_bytes.items() if size}
    assert moved <= {kinds[name] for name in cover}
    if cover != ["gradients"]:  # a gradient follows its parameter
        assert moved == {kinds[name] for name in cover}


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    model = Mlp()
    before = look(model, None)
    config = {"budget": {"host": 0, "nvme": "1MiB"}, "nvme": {"dirs": [str(tmp_path / "missing")]}}
    with pytest.raises((ConfigError, StoreError), match="missing"):
        tieroff.wrap(model, adam(model), config)
    with pytest.raises(ConfigError, match=r"\[nvme\] dirs: .*missing does not exist; make it, or name another"):
        tieroff.wrap(model, adam(model), {"nvme": config["nvme"]}, budget="50%")  # whose room is looked up first
    assert_untouched(model, before)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    model = Mlp()
    before = look(model, None)
    config = {"budget": {"host": 0, "nvme": "1MiB"}, "nvme": {"dirs": [str(tmp_path / "file")]}}
    with pytest.raises((ConfigError, StoreError), match="file"):
        tieroff.wrap(model, adam(model), config)
    assert_untouched(model, before)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is injected, so that it also comes for root and on any file system."""

    def refuse(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    defaults = FileStore.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "room", Room(opener=refuse))
    model = Mlp()
    before = look(model, None)
    config = {"budget": {"host": 0, "nvme": "1MiB"}, "nvme": {"dirs": [str(tmp_path)]}}
    with pytest.raises((ConfigError, StoreError), match=r"[Rr]ead-only") as caught:
        tieroff.wrap(model, adam(model), config)
    assert str(tmp_path) in str(caught.value)
    monkeypatch.undo()
    assert_untouched(model, before)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_too_small_is_known_before_training(tmp_path: Path) -> None:
    model = Mlp()
    before = look(model, None)
    config = {"budget": {"host": 0, "nvme": "900TiB"}, "nvme": {"dirs": [str(tmp_path)]}}
    with pytest.raises((ConfigError, StoreError)) as caught:
        tieroff.wrap(model, adam(model), config)
    assert str(tmp_path) in str(caught.value)
    assert_untouched(model, before)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_address_space_is_told_with_what_to_lower(tmp_path: Path) -> None:
    model, config = nn.Linear(4, 4), {"device": "cpu", "budget": {"device": "1GiB", "nvme": "8GiB"}}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + 2 * 2**30, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"address space .* lower \[budget\] nvme, or raise the limit \(ulimit -v\)"):
            tieroff.wrap(model, config={**config, "nvme": {"dirs": [str(tmp_path)]}})
        tieroff.wrap(model, config={**config, "budget": {"device": "1GiB", "nvme": "8MiB"}, "nvme": {"dirs": [str(tmp_path)]}})
        tieroff.unwrap(model)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_drive_that_fills_up_is_known_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = Mlp()
    before = look(model, None)
    config = {"budget": {"host": 0, "nvme": "1MiB"}, "nvme": {"dirs": [str(tmp_path)]}, "plan": {"min_bytes": 0}}
    with pytest.raises(StoreError, match="No space left"):
        tieroff.wrap(model, adam(model), config)
    monkeypatch.undo()
    assert_untouched(model, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("thing", [nn.Linear, 3, None, "model", torch.ones(3)], ids=str)
def test_wrap_of_no_module(setting: Setting, thing: Any) -> None:
    with pytest.raises(StateError, match=r"expected a torch.nn.Module to wrap, got (type|int|NoneType|str|Tensor)"):
        setting.wrap(thing, None)


def test_wrap_with_no_optimizer_of_torch(each_setting: Setting) -> None:
    model = Mlp()
    before = look(model, None)
    with pytest.raises(StateError, match=r"expected a torch.optim.Optimizer, got list"):
        each_setting.wrap(model, [1])
    assert_untouched(model, before)


def test_an_optimizer_of_another_model(each_setting: Setting) -> None:
    generator, discriminator = Mlp(), Mlp()
    before = look(discriminator, None)
    with pytest.raises(StateError, match=r"expected an optimizer of this model's parameters, got Adam.* none of Mlp"):
        each_setting.wrap(discriminator, adam(generator))
    assert_untouched(discriminator, before)
    each_setting.wrap(discriminator)
    with pytest.raises(StateError, match="expected an optimizer of this model's parameters"):
        tieroff.engine(discriminator).attach(adam(generator))
    optimizer = adam(discriminator)
    tieroff.engine(discriminator).attach(optimizer)
    usual(discriminator, optimizer)
    tieroff.unwrap(discriminator)


def test_an_optimizer_that_was_never_attached_is_said_once(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    model, other = Mlp(), Mlp()
    each_setting.wrap(model)
    optimizer = adam(model)
    for _ in range(3):
        usual(other, adam(other))  # of a model that is not wrapped
    assert caplog.messages == []
    for _ in range(4):
        usual(model, optimizer)
    told = [message for message in caplog.messages if "no optimizer attached" in message]
    assert len(told) == 1
    assert "tieroff.engine(model).attach(optimizer)" in told[0]
    assert "4 parameters" in told[0]
    tieroff.unwrap(model)


def test_an_optimizer_that_was_made_anew_is_said_once(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    model = Mlp()
    each_setting.wrap(model, adam(model))
    again = adam(model)
    for _ in range(5):
        usual(model, again)
    told = [message for message in caplog.messages if "is not the optimizer that was given to tieroff.wrap" in message]
    assert len(told) == 1
    assert "Adam updates 4 parameters of the wrapped Mlp" in told[0]
    assert "No step has ended yet: one ends with step() of the Adam" in tieroff.engine(model).explain()
    tieroff.unwrap(model)


def test_an_optimizer_inside_of_the_attached_one_is_said(setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    class Around(torch.optim.SGD):
        def second_step(self, inner: torch.optim.Optimizer) -> None:
            self.base = inner
            inner.step()

    model = Mlp()
    around, inner = Around(model.parameters(), 0.1), adam(model)
    setting.wrap(model, around)
    for _ in range(3):
        loss_of(model).backward()
        around.second_step(inner)
    (told,) = [message for message in caplog.messages if "is not the optimizer that was given to tieroff.wrap" in message]
    assert told.endswith("It is the Around's own, and the Around's step() is never called: tieroff.wrap(model, optimizer.base)")
    tieroff.unwrap(model)


def test_updates_by_the_models_own_optimizer_are_not_said(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    model = Mlp()
    own, other = adam(model), torch.optim.SGD(list(model.parameters())[:1], lr=0.0)
    each_setting.wrap(model, own)
    for _ in range(4):
        usual(model, own)
        other.step()
    assert [message for message in caplog.messages if "updates" in message] == []
    assert "No step has ended yet" not in tieroff.engine(model).explain()
    tieroff.unwrap(model)


class Parts(nn.Module):
    """An agent whose loop calls a method of its own, never the model: it has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = Mlp(), Mlp()

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.actor(x) + self.critic(x)


def test_updates_without_a_forward_are_said_once(each_setting: Setting, caplog: pytest.LogCaptureFixture) -> None:
    model = Parts()
    optimizer = adam(model)
    each_setting.wrap(model, optimizer)

    def train(steps: int) -> list[str]:
        for _ in range(steps):
            model.values(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [message for message in caplog.messages if "its forward was never called" in message]

    assert train(2) == []
    (told,) = train(3)
    assert told.startswith("Parts was updated 3 times")
    assert told.endswith("tieroff.engine(model).begin_in('values')")
    tieroff.engine(model).begin_in("values")
    assert train(6) == [told]
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)


class Agent(Parts):
    """Its first method is asked without gradients alone; the loss is made of the last, which calls others."""

    def first_guess(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x)

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.first_guess(x) + self.actor(x)

    def act_and_value(self, x: torch.Tensor) -> torch.Tensor:
        return self.values(x).tanh()


def test_the_method_that_is_named_is_the_one_that_the_loss_is_made_of(
    each_setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    model = Agent()
    optimizer = adam(model)
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        with torch.no_grad():
            model.first_guess(torch.randn(4, 8))
        model.act_and_value(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            model.first_guess(torch.randn(4, 8))
        optimizer.step()
        optimizer.zero_grad()
    (told,) = [message for message in caplog.messages if "its forward was never called" in message]
    assert "begin_in('act_and_value') (there are also first_guess, values)" in told
    assert not any(part._forward_pre_hooks for part in model.modules())
    tieroff.unwrap(model)


def test_a_model_that_is_copied_to_several_devices_in_each_forward(setting: Setting) -> None:
    model, optimizer = mlp_and_adam()
    copied: Any = nn.DataParallel(model)  # without devices it calls the model
    copied.device_ids = [0, 1]
    before = look(model, None)
    with pytest.raises(StateError, match=r"DataParallel copies the model to 2 devices.*tieroff launch"):
        setting.wrap(copied, optimizer)
    assert_untouched(model, before)
    copied.device_ids = []
    setting.wrap(copied, optimizer)
    tieroff.unwrap(copied)


def test_a_second_wrap(each_setting: Setting) -> None:
    plain = follow(mlp_and_adam, usual, 5)
    model, optimizer = trained(each_setting)
    with pytest.raises(StateError, match=r"wrapped already; tieroff\.unwrap"):
        each_setting.wrap(model, optimizer)
    torch.manual_seed(1004)
    assert_same([plain.seen[4]], [look(model, optimizer, usual(model, optimizer))])
    tieroff.unwrap(model)
    each_setting.wrap(model, optimizer)
    usual(model, optimizer)
    tieroff.unwrap(model)


def test_engine_and_unwrap_of_what_is_not_wrapped(each_setting: Setting) -> None:
    model = Mlp()
    for call in (tieroff.engine, tieroff.unwrap):
        things: tuple[Any, ...] = (model, 3, None)
        for thing in things:
            with pytest.raises(StateError, match=r"not wrapped.*call tieroff.wrap first"):
                call(thing)
    each_setting.wrap(model, None)
    with pytest.raises(StateError, match="not wrapped"):
        tieroff.engine(model.first)
    tieroff.unwrap(model)
    with pytest.raises(StateError, match="not wrapped"):
        tieroff.unwrap(model)


def test_questions_before_their_answers_exist(each_setting: Setting) -> None:
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    engine = tieroff.engine(model)
    for ask, told in (
        (engine.stats, "no figures yet"),
        (lambda: engine.plan, "no plan yet"),
        (lambda: engine.trace, "no trace yet"),
        (lambda: engine.timeline, "no timeline yet"),
    ):
        with pytest.raises(StateError, match=told):
            ask()
    assert engine.explain()
    usual(model, optimizer)
    assert engine.explain()
    tieroff.unwrap(model)
    with pytest.raises(StateError, match="closed"):
        engine.attach(optimizer)


def damaged(text: str) -> list[str]:
    return [text[: len(text) // 2], "", "{}", "[]", "\0" * 100, text.replace('"', "'", 40)]


def test_truncated_and_foreign_files(each_setting: Setting, tmp_path: Path) -> None:
    model, _ = trained(each_setting)
    engine = tieroff.engine(model)
    save_plan(engine.plan, tmp_path / "plan.json")
    save_trace(engine.trace, tmp_path / "trace.json")
    tieroff.unwrap(model)
    plan_text, trace_text = (tmp_path / "plan.json").read_text(), (tmp_path / "trace.json").read_text()
    for text in [*damaged(plan_text), trace_text]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(TieroffError, match=r"bad\.json"):
            load_plan(tmp_path / "bad.json")
        fresh = Mlp()
        before = look(fresh, None)
        with pytest.raises(TieroffError, match=r"bad\.json"):
            tieroff.wrap(fresh, None, each_setting.config(), plan=tmp_path / "bad.json", backend=each_setting.backend())
        assert_untouched(fresh, before)
    for text in [*damaged(trace_text), plan_text]:
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises((CaptureError, InvalidPlanError), match=r"bad\.json"):
            load_trace(tmp_path / "bad.json")
    with pytest.raises(TieroffError, match="absent"):
        load_plan(tmp_path / "absent.json")


def test_a_plan_from_another_model_is_refused_and_nothing_is_lost(each_setting: Setting, tmp_path: Path) -> None:
    model, optimizer = trained(each_setting)
    save_plan(tieroff.engine(model).plan, tmp_path / "plan.json")
    tieroff.unwrap(model)

    def make() -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
        return model, adam(model)

    plain = follow(make, usual, 4)
    torch.manual_seed(0)
    model, optimizer = make()
    tieroff.wrap(model, optimizer, each_setting.config(), plan=tmp_path / "plan.json", backend=each_setting.backend())
    index = 0
    with pytest.raises(TraceMismatchError, match="made for another model"):
        for index in range(4):
            torch.manual_seed(1000 + index)
            usual(model, optimizer)
    tieroff.unwrap(model)
    for later in range(index, 4):
        torch.manual_seed(1000 + later)
        out = usual(model, optimizer)
    assert_same([plain.seen[3]], [look(model, optimizer, out)])


def test_the_model_can_be_used_on_after_an_error_in_planning(each_setting: Setting) -> None:
    """Whoever catches the error and goes on gets right numbers, or the error again; never something else."""
    plain = follow(mlp_and_adam, usual, 6)
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    config = each_setting.config()
    config["budget"] |= {"device": 700, "strict": True}
    tieroff.wrap(model, optimizer, config, backend=each_setting.backend())
    done = 0
    for _ in range(20):
        torch.manual_seed(1000 + done)
        try:
            out = usual(model, optimizer)
        except InfeasiblePlanError:
            continue
        assert_same([plain.seen[done]], [look(model, optimizer, out)])
        done += 1
        if done == 6:
            break
    assert done >= 2
    tieroff.unwrap(model)
    assert_same(
        [{k: v for k, v in plain.seen[done - 1].items() if k.startswith("param")}],
        [{k: v for k, v in look(model, None).items() if k.startswith("param")}],
    )


def test_a_forked_child_is_told_to_wrap_for_itself(each_setting: Setting) -> None:
    model, optimizer = trained(each_setting)
    before = look(model, optimizer)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, about forks in a process with threads
        child = os.fork()
    if child == 0:
        said = b"nothing was raised"
        try:
            model(torch.randn(4, 8))
        except StateError as error:
            said = str(error).encode()
        finally:
            os.write(write, said)
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert b"wrapped in the parent process" in pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert_same([before], [look(model, optimizer)])
    usual(model, optimizer)
    tieroff.unwrap(model)
