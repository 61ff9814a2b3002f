"""Models as people write them, with everything moved out: the numbers of the plain run, or a clear error."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tieroff
from tests.support.twins import Mlp, Setting, adam, assert_same, check_twins, follow, look, loss_of, sgd, with_plans
from tests.support.twins import usual_step as usual

pytestmark = pytest.mark.timeout(60)


def made(build: Any, optimizer: Any = adam) -> Any:
    def make() -> Any:
        model = build()
        return model, optimizer(model)

    return make


class Shared(nn.Module):
    """A weight used by its module, by its parent and once more, so that three gradients are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.randn(8, 8) * 1e3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) + x @ self.inner.weight * 1e-3
        z = torch.tanh(y) @ self.inner.weight.T + (y @ self.scale).sin() + (x @ self.scale).cos() @ self.scale * 1e-3
        return z + y.sum()


def test_a_weight_used_inside_and_outside_its_module_and_three_times(each_setting: Setting) -> None:
    check_twins(made(Shared), usual, each_setting)


def test_a_weight_used_three_times_with_accumulation(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        losses = [loss_of(model) for _ in range(3)]
        for loss in losses[:2]:
            loss.backward()
        loss_of(model).backward()
        losses[2].backward()
        optimizer.step()
        return losses

    check_twins(made(Shared), step, each_setting)


def test_several_forwards_then_one_backward(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model) + loss_of(model, batch=2) * loss_of(model)
        loss.backward()
        optimizer.step()
        return loss

    check_twins(made(Shared), step, each_setting)


def test_in_place_ops_on_the_output(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        y = model(torch.randn(4, 8))
        y.mul_(2).add_(1)
        y[0] = 1.0
        y.relu_()
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        return loss, y

    check_twins(made(Mlp), step, each_setting)


def test_in_place_ops_and_views_inside(each_setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            y[:, ::2].mul_(2)
            left, right = y.relu_().chunk(2, dim=1)
            return self.second(torch.cat([left * right, left.exp()], dim=1)).add_(left)

    check_twins(made(Model), usual, each_setting)


@dataclasses.dataclass
class Answer:
    """No container that torch knows."""

    value: torch.Tensor
    extra: dict[str, Any]


def test_objects_and_side_channels_as_outputs(each_setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = torch.tanh(self.first(x))
            self.penalty = hidden.square().sum() + self.second.weight.norm()
            return Answer(self.second(hidden), {"hidden": [hidden]})

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        answer = model(torch.randn(4, 8))
        loss = answer.value.square().mean() + answer.extra["hidden"][0].mean() + model.penalty
        loss.backward()
        optimizer.step()
        return loss

    check_twins(made(Model), step, each_setting)


def test_one_of_two_outputs_unused(each_setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.first(x).exp()

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        used, unused = model(torch.randn(4, 8))
        loss = used.square().mean()
        del unused
        loss.backward()
        optimizer.step()
        return loss

    check_twins(made(Model), step, each_setting)


def test_a_parameter_that_no_step_uses(each_setting: Setting) -> None:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.randn(16))

    check_twins(made(Model), usual, each_setting)


def test_parameter_list_and_dict(each_setting: Setting) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(3)])
            self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(8)), "b": nn.Parameter(torch.randn(8))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.many:
                x = torch.tanh(x @ weight)
            scale, shift = self.named.values()
            return x * scale + self.named["b"] + shift * self.many[-1].sum()

    check_twins(made(Model), usual, each_setting)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["old weight norm", "new weight norm", "old spectral norm", "new spectral norm"])
def test_weight_and_spectral_norm(each_setting: Setting, kind: str) -> None:
    wrappers: dict[str, Callable[..., Any]] = {
        "old weight norm": nn.utils.weight_norm,
        "new weight norm": nn.utils.parametrizations.weight_norm,
        "old spectral norm": nn.utils.spectral_norm,
        "new spectral norm": nn.utils.parametrizations.spectral_norm,
    }
    wrapper = wrappers[kind]

    def build() -> nn.Module:
        model: Any = Mlp()
        model.first, model.second = wrapper(model.first), wrapper(model.second)
        return model

    check_twins(made(build), usual, each_setting)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_sparse_embeddings(each_setting: Setting, max_norm: float | None) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 8, sparse=True, max_norm=max_norm)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.table(index).tanh()

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randint(0, 16, (6,))).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    check_twins(made(Model, lambda m: torch.optim.SparseAdam(m.parameters(), 0.01)), step, each_setting)


def test_max_norm_renormalises_the_home(each_setting: Setting) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 8, max_norm=0.5)
            self.head = nn.Linear(8, 8)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(index))

    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        loss = model(torch.randint(0, 16, (6,))).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    check_twins(made(Model), step, each_setting)


def test_complex_parameters(each_setting: Setting) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
            self.second = nn.Linear(8, 8, dtype=torch.complex64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.to(torch.complex64) @ self.first.conj().mT + self.first.imag.sum() + torch.view_as_real(self.first).mean()
            return self.second(y * y.conj()).abs()

    check_twins(made(Model), usual, each_setting)


def test_lazy_modules_are_refused_before_anything_is_touched(each_setting: Setting) -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    with pytest.raises(tieroff.errors.StateError, match=r"LazyLinear has lazy parameters.*run one forward"):
        each_setting.wrap(model, None)
    model(torch.randn(4, 8))
    optimizer = sgd(model)
    each_setting.wrap(model, optimizer)
    usual(model, optimizer)
    assert tieroff.engine(model).stats().moved_bytes_by_class["parameter"] > 0
    tieroff.unwrap(model)


class SharedCast(nn.Module):
    """One weight used often in one autocast region: torch casts it once, so its gradients are summed in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


@pytest.mark.parametrize("cache", [True, False])
def test_an_autocast_region_with_a_shared_weight(each_setting: Setting, cache: bool) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = model(torch.randn(16, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    check_twins(made(SharedCast), step, each_setting)


def test_an_autocast_region_round_two_forwards(each_setting: Setting) -> None:
    def step(model: Any, optimizer: Any, index: int) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(16, 8)).float().square().mean() + model(torch.randn(16, 8)).float().sin().mean()
        loss.backward()
        optimizer.step()
        return loss

    check_twins(made(SharedCast), step, each_setting)


def test_an_autocast_region_inside_the_model(each_setting: Setting) -> None:
    class Model(SharedCast):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = super().forward(x)
            return self.inner(y.float())

    check_twins(made(Model), usual, each_setting)


def test_storage_addresses_reused_between_packs(each_setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # Each temporary dies before the next is made, so malloc hands out the same address with other content.
            total = torch.zeros(())
            for power in range(1, 12):
                row = self.first(x * power)
                total = total + (row.square() * row.detach().clone().sin_()).sum()
                del row
            return super().forward(x) + total * 1e-3

    check_twins(made(Model), usual, each_setting, moves=("parameter", "activation"))


def test_one_storage_saved_as_many_views(each_setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            parts = [y[:, :8], y[:, 8:], y[:2].T, y.expand(2, 4, 16)[1], y.view(-1)[5:37].view(4, 8)]
            return self.second(y) + parts[0] * parts[1] + parts[4].exp() + (parts[2] @ parts[2].T).sum() * parts[3].sum()

    check_twins(made(Model), usual, each_setting, moves=("parameter", "activation"))


def test_two_parameters_that_share_memory_stay_and_are_reported(each_setting: Setting) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.randn(128)
            self.first, self.second = nn.Parameter(flat[:64].view(8, 8)), nn.Parameter(flat[64:].view(8, 8))
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(x @ self.first) @ self.second)

    check_twins(made(Model), usual, each_setting)
    model = Model()
    optimizer = adam(model)
    each_setting.wrap(model, optimizer)
    for _ in range(3):
        usual(model, optimizer)
    assert "a view of a larger storage: first, second" in tieroff.engine(model).explain()
    tieroff.unwrap(model)


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(each_setting: Setting, build: Any) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = build(8, 8, num_layers=2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x.view(2, -1, 8))[0]

    check_twins(made(Model), usual, each_setting)


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_that_is_the_whole_model(each_setting: Setting, build: Any) -> None:
    model = build(8, 8, num_layers=2)
    optimizer = adam(model)
    each_setting.wrap(model, optimizer)
    for _ in range(3):
        model(torch.randn(5, 2, 8))[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(tieroff.engine(model).trace.ops) > 1
    tieroff.unwrap(model)


def test_a_weight_clamped_through_data_inside_forward(each_setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first.weight.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                self.second.weight.mul_(0.99)
            return super().forward(x)

    check_twins(made(Model), usual, each_setting)


def test_attributes_that_people_hang_on_parameters(each_setting: Setting) -> None:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.first.weight.gain = 0.5  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(self.first.weight, nn.Parameter)
            return super().forward(x) * self.first.weight.gain  # type: ignore[attr-defined]

    check_twins(made(Model), usual, each_setting)


def test_buffers_and_batch_norm_through_train_and_eval(each_setting: Setting) -> None:
    def build() -> nn.Module:
        return nn.Sequential(OrderedDict(a=nn.Linear(8, 8), b=nn.BatchNorm1d(8), c=nn.Dropout(0.3), d=nn.Linear(8, 8)))

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer)
        model.eval()
        with torch.no_grad():
            seen = model(torch.randn(4, 8))
        model.train()
        return loss, seen

    check_twins(made(build), step, each_setting)


def test_user_checkpointing_inside(each_setting: Setting) -> None:
    class Model(Mlp):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant
            self.drop = nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            run = torch.utils.checkpoint.checkpoint
            return self.second(run(lambda v: self.drop(torch.tanh(self.first(v))), x, use_reentrant=self.reentrant))

    for reentrant in (False, True):
        check_twins(made(lambda reentrant=reentrant: Model(reentrant)), usual, each_setting)


def test_a_module_that_assigns_its_own_parameter_in_forward(setting: Setting) -> None:
    class Model(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = self.first.weight
            self.first.weight = held
            return super().forward(x)

    check_twins(made(Model), usual, setting)
    model = Model()
    setting.wrap(model, None)
    home = dict(model.named_parameters())["first.weight"]
    model(torch.randn(4, 8)).sum().backward()
    assert dict(model.named_parameters())["first.weight"] is home
    assert look(model, None)["gradient of first.weight"] is not None
    tieroff.unwrap(model)


class Traced(nn.Module):
    """A part that `torch.jit.trace` made: its parameters are not Python's, and are read where they lie."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.traced = torch.jit.trace(Mlp(), torch.randn(4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.traced(torch.tanh(self.first(x)))
        return out


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_traced_part(each_setting: Setting) -> None:
    check_twins(made(Traced), usual, each_setting)


@pytest.mark.filterwarnings("ignore")  # of torch's own code
@with_plans(way=(torch.jit.trace, torch.export.export), is_trained=(True, False))
def test_a_graph_of_a_wrapped_model_has_its_parameters(way: Any, is_trained: bool, planned_setting: Setting) -> None:
    """Made between planned steps, which go on; and its values follow those of the model, as they do plain."""

    def step(model: Any, optimizer: Any, index: int) -> Any:
        loss = usual(model, optimizer, index)
        if index == 4:
            with torch.set_grad_enabled(is_trained):
                made = way(model, (torch.ones(4, 8),))
            graphs.append(made.module() if way is torch.export.export else made)
        with torch.no_grad():
            return loss, [graph(torch.full((4, 8), 0.3)) for graph in graphs]

    graphs: list[Any] = []
    plain = follow(made(Mlp), step, 7)
    graphs.clear()
    wrapped = follow(made(Mlp), step, 7, planned_setting)
    assert_same(plain.seen, wrapped.seen)
    assert wrapped.phase in ("planned", "nothing moved")


def test_a_forward_on_fake_tensors(each_setting: Setting) -> None:
    """What people ask for shapes: it computes nothing, and is no step."""

    def step(model: Any, optimizer: Any, index: int) -> Any:
        if index in (0, 4):
            with FakeTensorMode(allow_non_fake_inputs=True) as fakes:
                assert model(fakes.from_tensor(torch.empty(3, 8))).shape == (3, 8)
        return usual(model, optimizer, index)

    check_twins(made(Mlp), step, each_setting, steps=6)
