"""Lightning with the callback: the whole step runs in the optimizer's closure, and computes the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import tieroff
from tests.support.parity import NVME, config_for, differing, state_of
from tieroff.core.tensor import Tier
from tieroff.errors import StateError
from tieroff.integrations.lightning import TieroffCallback

# Lightning's own, about workers that a test does not need, and about torch's future.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]

WIDTH, CLASSES, BATCHES = 16, 4, 6


def config_on_cpu(folder: Path, policy: str = "floor") -> dict[str, Any]:
    return {"device": "cpu", **config_for(NVME, folder, policy=policy)}


class Classifier(lightning.LightningModule):
    """Computes with parameters in `training_step` itself, in a child, and in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH), nn.Dropout(0.1), nn.ReLU())
        self.head = nn.Linear(4 * WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.ones(CLASSES))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, wanted = batch
        loss = nn.functional.cross_entropy(self(x) * self.scale, wanted) + 0.1 * self.net(x).square().mean()
        self.log("loss", loss)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.losses.append(nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def batches() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * BATCHES, WIDTH, generator=generator)
    wanted = torch.randint(CLASSES, (4 * BATCHES,), generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, wanted), batch_size=4)


def trainer_of(callback: TieroffCallback | None, **settings: Any) -> lightning.Trainer:
    chosen: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **settings,
    }
    chosen["callbacks"] = [*chosen.get("callbacks", []), *([callback] if callback is not None else [])]
    return lightning.Trainer(**chosen)


def seen(model: Classifier, trainer: lightning.Trainer) -> dict[str, Any]:
    """Returns everything that a run computed."""
    losses = {f"loss {i}": loss for i, loss in enumerate(model.losses)}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return {**losses, **values, **state_of(trainer.optimizers[0])}


def fit(callback: TieroffCallback | None, build: Callable[[], Classifier] = Classifier, **settings: Any) -> tuple[Any, ...]:
    model, trainer = build(), trainer_of(callback, **settings)
    torch.manual_seed(2)
    trainer.fit(model, batches(), batches())
    return model, trainer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "val_check_interval": 2},
    ],
    ids=["plain", "accumulation", "bf16-mixed", "bf16-true", "clipping"],
)
def test_a_fit_computes_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = seen(*fit(None, **settings))
    callback = TieroffCallback(config_on_cpu(tmp_path))
    model, trainer = fit(callback, **settings)
    assert differing(plain, seen(model, trainer)) == []
    assert callback.engine is tieroff.engine(model)
    stats = callback.engine.stats()
    assert stats.phase == "planned"
    assert all(stats.moved_bytes_by_class[kind] > 0 for kind in ("activation", "parameter", "gradient", "optimizer"))
    assert stats.moved_bytes["nvme_read"] > 0
    tieroff.unwrap(model)
    assert "training_step" not in model.__dict__
    assert differing(plain, seen(model, trainer)) == []


def test_a_fit_that_needs_nothing_moved_computes_the_same_and_moves_nothing(tmp_path: Path) -> None:
    callback = TieroffCallback(config_on_cpu(tmp_path, policy="auto"))
    model, trainer = fit(callback)
    assert differing(seen(*fit(None)), seen(model, trainer)) == []
    assert callback.engine is not None
    stats = callback.engine.stats()
    assert stats.phase == "nothing moved"
    assert sum(stats.moved_bytes.values()) == 0
    tieroff.unwrap(model)


def without_dropout() -> Classifier:
    """Lightning does not keep the state of dropout's generator in a checkpoint."""
    model = Classifier()
    model.net[2] = nn.Identity()
    return model


def test_a_checkpoint_resumes_to_the_same_numbers(tmp_path: Path) -> None:
    model, trainer = fit(None, without_dropout)
    whole = {name: value for name, value in seen(model, trainer).items() if not name.startswith("loss")}
    callback = TieroffCallback(config_on_cpu(tmp_path))
    first, _ = fit(
        callback, without_dropout, max_epochs=1, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, "first")]
    )
    tieroff.unwrap(first)
    for resuming in (None, callback):  # a checkpoint of a wrapped run is an ordinary one
        model, trainer = without_dropout(), trainer_of(resuming)
        trainer.fit(model, batches(), batches(), ckpt_path=tmp_path / "first.ckpt")
        assert differing(whole, {name: value for name, value in seen(model, trainer).items() if name in whole}) == []
    assert tieroff.engine(model).stats().moved_bytes["nvme_read"] > 0
    tieroff.unwrap(model)


def test_a_second_fit_of_the_same_model_is_wrapped_anew(tmp_path: Path) -> None:
    outcomes = []
    for callback in (None, TieroffCallback(config_on_cpu(tmp_path))):
        model, _ = fit(callback)
        first = callback.engine if callback is not None else None
        trainer = trainer_of(callback)
        trainer.fit(model, batches(), batches())
        outcomes.append(seen(model, trainer))
        if callback is not None:
            assert first is not None and first.is_closed
            assert callback.engine is tieroff.engine(model)
            tieroff.unwrap(model)
    assert differing(*outcomes) == []


class ByHand(lightning.LightningModule):
    """Trains one inner model by hand, which it calls beside a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.models = nn.ModuleDict({"net": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))})
        self.teacher = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], index: int) -> None:
        optimizer = self.optimizers()
        loss = (self.models["net"](batch[0]) - self.teacher(batch[0])).square().mean()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.models.parameters(), 1e-2)


class Entangled(Classifier):
    """Has two optimizers of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        both = [self.head.weight, self.scale], [self.head.bias, *self.net.parameters()]
        return [torch.optim.SGD(part, 0.1) for part in both]


def test_two_optimizers_of_one_module_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"SGD of Entangled, SGD of Entangled; .*call tieroff.wrap\(self.model, optimizer\)"):
        fit(TieroffCallback(config_on_cpu(tmp_path)), Entangled)


def test_a_compiled_module_is_refused(tmp_path: Path) -> None:
    module: Any = torch.compile(Classifier(), backend="eager")
    with pytest.raises(StateError, match=r"leave torch\.compile out"):
        trainer_of(TieroffCallback(config_on_cpu(tmp_path)), num_sanity_val_steps=0).fit(module, batches(), batches())


class Adversaries(lightning.LightningModule):
    """A GAN by hand; one that wraps its inner models itself, or leaves that to the callback."""

    def __init__(self, config: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.generator, self.judge = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, n)) for n in (WIDTH, 1)
        )
        self.config, self.losses = config, list[Tensor]()

    def on_train_start(self) -> None:
        if self.config is not None:
            optimizers = [wrapper.optimizer for wrapper in self.optimizers()]
            tieroff.wrap([self.generator, self.judge], optimizers, self.config, budget="100%")

    def training_step(self, batch: list[Tensor], index: int) -> None:
        of_generator, of_judge = self.optimizers()
        self.toggle_optimizer(of_judge)
        fake = self.generator(batch[0])
        loss = (self.judge(batch[0]) - 1).square().mean() + self.judge(fake.detach()).square().mean()
        of_judge.zero_grad()
        self.manual_backward(loss)
        of_judge.step()
        self.untoggle_optimizer(of_judge)
        self.toggle_optimizer(of_generator)
        gain = (self.judge(self.generator(batch[0])) - 1).square().mean()
        of_generator.zero_grad()
        self.manual_backward(gain)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.losses += [loss.detach(), gain.detach()]

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 1e-2) for part in (self.generator, self.judge)]


def outcome(module: Any, callback: TieroffCallback | None, fits: int = 1) -> list[Tensor]:
    for _ in range(fits):
        trainer_of(callback, max_epochs=3).fit(module, batches())
    return [*module.losses, *(p.detach().clone() for p in module.parameters())]


def assert_equal(*outcomes: list[Tensor]) -> None:
    assert [i for i, (a, b) in enumerate(zip(*outcomes, strict=True)) if not torch.equal(a, b)] == []


def test_models_wrapped_together_train_by_hand_as_plain(tmp_path: Path) -> None:
    module = Adversaries(config_on_cpu(tmp_path, "auto"))
    assert_equal(outcome(Adversaries(), None), outcome(module, None))
    assert all(tieroff.engine(part).stats().phase in ("planned", "nothing moved") for part in module.children())


@pytest.mark.parametrize("build", [ByHand, Adversaries])
@pytest.mark.parametrize("fits", [1, 2])
def test_a_module_that_optimizes_by_hand_trains_within_the_budget(build: Any, fits: int, tmp_path: Path) -> None:
    config = config_on_cpu(tmp_path, "auto")
    config["budget"]["device"] = "min"
    module, callback = build(), TieroffCallback(config)
    assert_equal(outcome(build(), None, fits), outcome(module, callback, fits))
    assert len(callback.engines) == (2 if build is Adversaries else 1)
    for engine in callback.engines:
        stats = engine.stats()
        assert stats.phase == "planned" and sum(stats.moved_bytes.values()) > 0
        assert engine.plan.peak_bytes[Tier.DEVICE] <= engine.plan.budget_bytes[Tier.DEVICE]
        tieroff.unwrap(engine.model)
