"""`accelerate`: loops as its users write them, prepared by tieroff, compute the same numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: nothing is downloaded

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch import nn

import tieroff
from tests.support.parity import NVME, config_for, differing, state_of
from tieroff.errors import ConfigError, StateError
from tieroff.integrations.accelerate import attach_accelerated, prepare
from tieroff.integrations.attaching import attach, check_ranks, torch_optimizer

BATCHES, WIDTH = 12, 16


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    """accelerate keeps one state per process."""
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def config_on_cpu(folder: Path) -> dict[str, Any]:
    """Returns a config under which everything leaves for the drive between any two uses."""
    return {"device": "cpu", **config_for(NVME, folder)}


class Net(nn.Module):
    """Two layers, dropout, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.2)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.tanh(self.first(x)))).float().square().mean()


Prepare = Callable[..., Any]


def run(accelerator: Accelerator, prepared_by: Prepare, folder: Path) -> dict[str, Any]:
    """Trains with accumulation, clipping and a schedule, saves and reads the state in between; returns what it computed."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rows: Any = torch.randn(2 * BATCHES, WIDTH)  # a tensor serves as a data set
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    model, optimizer, schedule, loader = prepared_by(accelerator, model, optimizer, schedule, loader)
    seen: dict[str, Any] = {}
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                seen[f"norm {index}"] = accelerator.clip_grad_norm_(model.parameters(), 0.1).clone()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        seen[f"loss {index}"] = loss.detach().clone()
        if index == BATCHES // 2:
            accelerator.save_state(str(folder / "state"))
            with torch.no_grad():
                model.first.weight.fill_(0)
            accelerator.load_state(str(folder / "state"))
    model.eval()
    with torch.no_grad():
        seen["evaluated"] = model(torch.ones(2, WIDTH))
    values = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    return {**seen, **values, **state_of(optimizer)}


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loop_computes_the_same(accumulated: int, precision: str, tmp_path: Path) -> None:
    models: list[nn.Module] = []

    def plainly(accelerator: Accelerator, *objects: Any) -> Any:
        return accelerator.prepare(*objects)

    def wrapped(accelerator: Accelerator, *objects: Any) -> Any:
        prepared = prepare(accelerator, *objects, config=config_on_cpu(tmp_path))
        models.append(prepared[0])
        return prepared

    outcomes = []
    for prepared_by in (plainly, wrapped):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulated, mixed_precision=precision)
        outcomes.append(run(accelerator, prepared_by, tmp_path))
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
    assert differing(*outcomes) == []
    stats = tieroff.engine(models[0]).stats()
    assert stats.phase == "planned"
    assert stats.moved_bytes_by_class["parameter"] > 0
    assert stats.moved_bytes_by_class["optimizer"] > 0
    assert stats.moved_bytes["nvme_read"] > 0
    tieroff.unwrap(models[0])


def test_a_model_that_was_wrapped_first_may_be_prepared_too(tmp_path: Path) -> None:
    """Mixed precision puts another forward round tieroff's, where it is still found, and harmless after unwrap."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    tieroff.wrap(model, optimizer, config_on_cpu(tmp_path))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = tieroff.engine(model)
    for _ in range(4):
        accelerator.backward(model(torch.ones(2, WIDTH)))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.stats().phase == "planned"
    with pytest.raises(StateError, match="wrapped already"):
        tieroff.wrap(model, None, config_on_cpu(tmp_path))
    tieroff.unwrap(model)
    with pytest.raises(StateError, match="not wrapped"):
        tieroff.engine(model)
    accelerator.backward(model(torch.ones(2, WIDTH)))
    optimizer.step()
    tieroff.wrap(model, optimizer.optimizer, config_on_cpu(tmp_path))
    assert not tieroff.engine(model).is_closed
    tieroff.unwrap(model)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_loss_scale_does_not_take_the_step_away(is_wrapped: bool, tmp_path: Path) -> None:
    """With a scaler, `AcceleratedOptimizer` puts the step that it found when it was made back after each step."""
    Accelerator(cpu=True)
    torch.manual_seed(0)
    model = Net()
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = AcceleratedOptimizer(inner, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))

    def step(scale: float) -> bool:
        torch.manual_seed(1)
        loss = optimizer.scaler.scale(model(torch.ones(2, WIDTH)) * scale)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return bool(optimizer.step_was_skipped)

    if is_wrapped:
        engine = attach_accelerated(model, optimizer, config_on_cpu(tmp_path), torch.device("cpu"))
        assert [step(scale) for scale in (1, 1, float("inf"), 1, 1)] == [False, False, True, False, False]
        assert engine.stats().phase == "planned"
        assert engine.stats().moved_bytes["nvme_read"] > 0
        assert hasattr(inner.step, "_bucketed_by")
        tieroff.unwrap(model)
    before = model.first.weight.detach().clone()
    assert not step(1)  # after unwrap too, with the step that the optimizer still remembers
    assert not torch.equal(model.first.weight, before)


def test_wrap_after_prepare_takes_the_prepared_optimizer(tmp_path: Path) -> None:
    def prepared(accelerator: Accelerator, *objects: Any) -> Any:
        made = accelerator.prepare(*objects)
        tieroff.wrap(made[0], made[1], config_on_cpu(tmp_path))
        assert tieroff.engine(made[0]).optimizer is made[1].optimizer
        return made

    plain = run(Accelerator(cpu=True, gradient_accumulation_steps=2), lambda a, *objects: a.prepare(*objects), tmp_path)
    AcceleratorState._reset_state(True)
    wrapped = run(Accelerator(cpu=True, gradient_accumulation_steps=2), prepared, tmp_path)
    assert differing(plain, wrapped) == []


def test_wrap_after_prepare_with_a_loss_scale_names_the_call_that_works(tmp_path: Path) -> None:
    model = Net()
    scaler: Any = torch.amp.GradScaler("cpu")
    Accelerator(cpu=True)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), 0.1), scaler=scaler)
    with pytest.raises(StateError, match=r"write tieroff\.integrations\.accelerate\.prepare\(accelerator, \.\.\.\)"):
        tieroff.wrap(model, optimizer, config_on_cpu(tmp_path))
    assert tieroff.api.engine_of(model) is None


def test_prepare_takes_a_budget_as_wrap_does(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigError, match='write "50%"'):
        prepare(accelerator, model, optimizer, config=config_on_cpu(tmp_path), budget="50")
    prepare(accelerator, model, optimizer, config=config_on_cpu(tmp_path), budget="70%")
    asked = tieroff.engine(model).settings.device_budget
    assert asked is not None and asked.share == 0.7


def test_objects_without_one_model_and_one_optimizer_are_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(StateError, match="one optimizer among the objects to prepare, got 0"):
        prepare(accelerator, model, config=config_on_cpu(tmp_path))
    with pytest.raises(StateError, match="one module among the objects to prepare, got 2"):
        prepare(accelerator, model, Net(), optimizer, config=config_on_cpu(tmp_path))
    assert accelerator._models == [], "nothing was prepared"


def test_over_several_gpus_parameters_have_to_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2, device="meta")  # not on the CPU, as on a GPU
    config = config_on_cpu(tmp_path)
    check_ranks(model, config)  # one process
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(StateError, match="cover includes gradients and parameters"):
        check_ranks(model, config)
    config["plan"]["cover"] = ["activations", "optimizer"]
    check_ranks(model, config)
    check_ranks(nn.Linear(2, 2), config_on_cpu(tmp_path))  # homes of the CPU keep their device


def test_a_trainer_on_another_device_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ConfigError, match="the trainer uses cuda and tieroff cpu"):
        attach(model, optimizer, config_on_cpu(tmp_path), torch.device("cuda"))
    assert type(model._parameters) is dict
    assert "step" not in optimizer.__dict__


def test_an_optimizer_that_is_not_torchs_is_refused() -> None:
    with pytest.raises(StateError, match=r"the trainer\'s optimizer is a object, not a torch\.optim\.Optimizer"):
        torch_optimizer(object())


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    for library, name in (("accelerate", "accelerate"), ("transformers", "transformers"), ("lightning", "lightning")):
        with monkeypatch.context() as patch:
            for loaded in [known for known in sys.modules if known.split(".")[0] == library]:
                patch.delitem(sys.modules, loaded)
            patch.setitem(sys.modules, library, None)
            patch.delitem(sys.modules, f"tieroff.integrations.{name}", raising=False)
            with pytest.raises(ConfigError, match=rf"pip install 'tieroff\[{name}\]'"):
                importlib.import_module(f"tieroff.integrations.{name}")
