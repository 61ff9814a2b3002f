"""What people do with a model's life: copies, conversions, replaced parameters, inference and generation."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import tieroff
from tests.support.twins import Mlp, Setting, adam, assert_same, check_twins, equal, follow, look, mlp_and_adam, sgd
from tests.support.twins import usual_step as usual
from tieroff.errors import StateError

pytestmark = pytest.mark.timeout(60)


def started(setting: Setting, steps: int = 4) -> tuple[Any, Any]:
    """Returns a wrapped model and its optimizer some steps into training."""
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    setting.wrap(model, optimizer)
    for _ in range(steps):
        usual(model, optimizer)
    return model, optimizer


def mlp_and_sgd() -> tuple[Any, Any]:
    model = Mlp()
    return model, sgd(model)


def assert_plain(twin: Any, model: Any) -> None:
    """The twin has the model's values, trains by itself, and the model does not notice."""
    assert_same([look(model, None)], [look(twin, None)]) if any(p.grad is not None for p in twin.parameters()) else None
    for (name, ours), (_, theirs) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert ours.data_ptr() != theirs.data_ptr()
    with pytest.raises(StateError, match="not wrapped"):
        tieroff.engine(twin)
    assert "forward" not in twin.__dict__ or not hasattr(twin.__dict__["forward"], "engine")
    before = look(model, None)
    optimizer = sgd(twin)
    usual(twin, optimizer)
    assert_same([before], [look(model, None)])
    assert not torch.equal(next(twin.parameters()), next(model.parameters()))


def test_deepcopy_gives_a_plain_copy(each_setting: Setting) -> None:
    model, optimizer = started(each_setting)
    assert_plain(copy.deepcopy(model), model)
    usual(model, optimizer)
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)


def test_pickle_gives_a_plain_copy(each_setting: Setting) -> None:
    model, optimizer = started(each_setting)
    assert_plain(pickle.loads(pickle.dumps(model)), model)
    usual(model, optimizer)
    tieroff.unwrap(model)


class Recurrent(nn.Module):
    """Has a module whose weights torch keeps in a list of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


@pytest.mark.parametrize("kind", [Mlp, Recurrent])
def test_a_saved_model_loads_with_the_classes_that_the_plain_one_needs(
    each_setting: Setting, tmp_path: Path, kind: type[nn.Module]
) -> None:
    model = kind()
    optimizer = adam(model)
    safe: list[Any] = [kind, *{type(module) for module in model.modules()}]
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    torch.save(model, tmp_path / "model.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "state.pt")
    with torch.serialization.safe_globals(safe):
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_plain(loaded, model)
    assert vars(loaded).keys() == vars(kind()).keys()
    assert all(type(module._parameters) is dict for module in loaded.modules())
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(state["model"][name], value) for name, value in model.state_dict().items())
    tieroff.unwrap(model)
    assert vars(model).keys() == vars(kind()).keys()


def test_deepcopy_of_model_and_optimizer_together(each_setting: Setting) -> None:
    model, optimizer = started(each_setting)
    optimizer.zero_grad()  # torch's copies of parameters have no gradients
    twin, its_optimizer = copy.deepcopy((model, optimizer))
    assert_same([look(model, optimizer)], [look(twin, its_optimizer)])
    torch.manual_seed(1)
    ours = usual(model, optimizer)
    torch.manual_seed(1)
    theirs = usual(twin, its_optimizer)
    assert torch.equal(ours, theirs)
    assert_same([look(model, optimizer)], [look(twin, its_optimizer)])
    tieroff.unwrap(model)
    usual(twin, its_optimizer)


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_averaged_model_follows_a_wrapped_model(each_setting: Setting, average: Any) -> None:
    averages: dict[int, Any] = {}

    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 0:
            averages[id(model)] = AveragedModel(model, multi_avg_fn=average)
        averaged = averages[id(model)]
        loss = usual(model, optimizer)
        averaged.update_parameters(model)
        with torch.no_grad():
            return loss, averaged(torch.randn(4, 8)), list(averaged.parameters())

    check_twins(mlp_and_adam, step, each_setting)


def test_an_average_by_hand_swapped_in_and_out(each_setting: Setting) -> None:
    ema: list[torch.Tensor] = []

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        if index == 0:
            ema[:] = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for average, parameter in zip(ema, model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        kept = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for parameter, average in zip(model.parameters(), ema, strict=True):
                parameter.data.copy_(average)
            seen = model(torch.randn(4, 8))
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.data.copy_(value)
        return loss, list(ema), seen

    check_twins(mlp_and_adam, step, each_setting)


@pytest.mark.parametrize("convert", ["to double", "double", "bfloat16"])
def test_conversion_after_wrap(each_setting: Setting, convert: str) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        if index == 4:
            {"to double": lambda: model.to(torch.float64), "double": model.double, "bfloat16": model.bfloat16}[convert]()
        dtype = next(model.parameters()).dtype
        loss = model(torch.randn(4, 8).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def make() -> Any:
        model = Mlp()
        return model, torch.optim.SGD(model.parameters(), 0.05)

    check_twins(make, step, each_setting, steps=9)


def test_to_the_device_it_is_on_changes_nothing(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        model.to("cpu").cpu().train()
        return usual(model, optimizer)

    check_twins(mlp_and_adam, step, each_setting)


def test_a_parameter_replaced(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 4:
            old = model.second.weight
            model.second.weight = nn.Parameter(torch.randn(8, 16))
            group = optimizer.param_groups[0]
            group["params"] = [model.second.weight if p is old else p for p in group["params"]]
            optimizer.state.pop(old, None)
        return usual(model, optimizer)

    check_twins(mlp_and_adam, step, each_setting, steps=9)


def test_a_parameter_replaced_while_the_optimizer_keeps_the_old_one(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 4:
            model.second.weight.grad = None
            model.second.weight = nn.Parameter(torch.randn(8, 16))
            optimizer.add_param_group({"params": [model.second.weight]})
        return usual(model, optimizer)

    check_twins(mlp_and_adam, step, each_setting, steps=9)


def test_a_module_replaced(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 4:
            model.second = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
            optimizer.add_param_group({"params": list(model.second.parameters())})
        return usual(model, optimizer)

    check_twins(mlp_and_adam, step, each_setting, steps=9)


def test_a_layer_removed_and_another_put_in_later(each_setting: Setting) -> None:
    """Those behind it have other names and places from then on."""

    def make() -> Any:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        return model, adam(model)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 3:
            for gone in model[1].parameters():
                optimizer.state.pop(gone)
            del model[1]
            optimizer.param_groups[0]["params"] = list(model.parameters())
        if index == 5:
            model.append(nn.Linear(8, 8))
            optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.1})
        return usual(model, optimizer)

    plain, wrapped = follow(make, step, 9), follow(make, step, 9, each_setting)
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase == "planned"


@pytest.mark.parametrize("at", [0, 1, 3])  # after the recorded step, the timed one, a planned one
def test_an_evaluation_is_the_first_to_see_another_model(at: int, each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        if index == at:
            model.share_memory()
            with torch.no_grad():
                loss = model(torch.randn(4, 8))
        return loss

    assert_same(follow(mlp_and_adam, step, 7).seen, follow(mlp_and_adam, step, 7, each_setting).seen)


def test_load_state_dict_with_assign(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index == 4:
            model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()}, assign=True)
            optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.state.clear()
        return usual(model, optimizer)

    check_twins(mlp_and_adam, step, each_setting, steps=9)


def test_data_written_between_steps_and_between_backward_and_update(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)
            parameter.grad.data.mul_(0.5)
        optimizer.step()
        for parameter in model.parameters():
            parameter.data.add_(0.01)
        model.first.weight.data = model.first.weight.data * 1.01
        model.second.bias.detach().numpy()[:] += 0.5
        return loss

    check_twins(mlp_and_adam, step, each_setting, steps=6)


def test_data_clamped_between_steps_keeps_the_plan(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)
        model.second.bias.detach().numpy()[:] += 0.5
        return loss

    check_twins(mlp_and_adam, step, each_setting, steps=6)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_between_steps(each_setting: Setting, mode: Any) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        with mode():
            first = model(torch.randn(4, 8)).clone()
        loss = usual(model, optimizer)
        with mode():
            return loss, first, model(torch.randn(2, 8)).clone()

    check_twins(mlp_and_adam, step, each_setting)


def test_parameters_assigned_in_inference_mode(each_setting: Setting) -> None:
    """As zeroth-order training does (MeZO): no backward; and with one, once they are ordinary tensors again."""

    def step(model: Any, optimizer: Any, index: int) -> Any:
        losses = []
        with torch.inference_mode():
            for scale in (1.0, -2.0, 1.0):
                for parameter in model.parameters():
                    parameter.data = parameter.data + scale * 1e-2 * torch.ones_like(parameter)
                losses.append(model(torch.ones(4, 8)).square().mean().clone())
        for parameter in model.parameters():
            parameter.data = parameter.data.clone() if index % 3 else parameter.data - 1e-3 * (losses[0] - losses[1])
        return [*losses, usual(model, optimizer)] if index % 3 else losses

    assert_same(follow(mlp_and_adam, step, 7).seen, follow(mlp_and_adam, step, 7, each_setting).seen)


def test_a_forward_that_a_function_replaced(each_setting: Setting) -> None:
    model, optimizer = mlp_and_adam()
    each_setting.wrap(model, optimizer)
    before = model.forward
    model.forward = lambda x: before(x * 2)
    for _ in range(4):
        usual(model, optimizer)
    assert tieroff.engine(model).stats().phase == "planned"
    with pytest.raises(StateError, match="wrapped already"):
        tieroff.wrap(model, optimizer)
    tieroff.unwrap(model)
    assert torch.equal(model(torch.ones(2, 8)), type(model).forward(model, torch.full((2, 8), 2.0)))


class Tokens(nn.Module):
    """A tiny language model with tied weights and a `generate` that calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.body = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(tokens))[0])

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            chosen = torch.multinomial(self(tokens)[:, -1].softmax(-1), 1)
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens


def test_generate_between_steps(each_setting: Setting) -> None:
    def make() -> Any:
        model = Tokens()
        return model, adam(model)

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        tokens = torch.randint(0, 11, (3, 6))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            said = model.generate(tokens[:1, :2], 6).clone()
        model.train()
        return loss, said

    check_twins(make, step, each_setting)


def test_methods_and_children_called_directly(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        hidden = model.first(torch.randn(4, 8))
        extra = torch.autograd.grad(hidden.sum(), [model.first.weight])
        return loss, hidden, extra

    check_twins(mlp_and_adam, step, each_setting)


def test_swap_tensors_of_a_parameter(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        if index == 3:
            optimizer.zero_grad()
            torch.utils.swap_tensors(model.second.bias, nn.Parameter(model.second.bias.detach() * 2))
        return loss

    try:
        check_twins(mlp_and_adam, step, each_setting, steps=8)
    except RuntimeError as error:
        assert "weakref" in str(error)  # torch refuses where anybody refers to the tensor weakly


def test_the_state_dict_of_a_wrapped_model_is_that_of_a_plain_one(each_setting: Setting) -> None:
    model, optimizer = started(each_setting)
    twin = Mlp()
    twin.load_state_dict(model.state_dict())
    its_optimizer = adam(twin)
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert list(model.state_dict()) == list(twin.state_dict())
    assert equal(dict(model.state_dict()), dict(twin.state_dict()))
    for seed in range(4):
        losses = []
        for each, its in ((model, optimizer), (twin, its_optimizer)):
            torch.manual_seed(seed)
            losses.append(usual(each, its))
        assert torch.equal(*losses)
        assert_same([look(twin, its_optimizer)], [look(model, optimizer)])
    tieroff.unwrap(model)


def test_the_programs_default_device_is_not_the_engines(tmp_path: Path) -> None:
    def step(model: Any, optimizer: Any, index: int) -> torch.Tensor:
        optimizer.zero_grad()
        rows = torch.full((4, 8), 0.1 * (index + 1))
        with torch.device("meta"):
            loss: torch.Tensor = model(rows).square().mean()
            loss.backward()
            optimizer.step()
        return loss

    check_twins(mlp_and_sgd, step, Setting(tmp_path))


def test_a_lazy_module_added_later_runs_by_itself_first(each_setting: Setting) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = sgd(model)
    each_setting.wrap(model, optimizer)
    for _ in range(4):
        usual(model, optimizer)
    model.append(nn.LazyLinear(8))
    with pytest.raises(StateError, match=r"LazyLinear has lazy parameters.*run it once"):
        usual(model, optimizer)
    model[-1](torch.randn(4, 8))
    optimizer.add_param_group({"params": [*model[-1].parameters()]})
    before = copy.deepcopy(model[-1].weight)
    for _ in range(4):
        usual(model, optimizer)
    assert not torch.equal(model[-1].weight, before)
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)
