"""The trace of a recipe from a configuration alone, beside that of the same small model trained for real."""

from __future__ import annotations

import os
import tempfile
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: nothing is downloaded

import peft
import pytest
import torch
import transformers
from torch import nn

from tests.unit.recipes.recipe_models import CONFIGS, MACHINE, MIN_BYTES, cleared, real_trace
from tieroff.core.tensor import TensorClass
from tieroff.core.trace import Trace
from tieroff.errors import ConfigError
from tieroff.tracing.dry import dry_trace
from tieroff.tracing.recipes.kinds import Recipe
from tieroff.tracing.recipes.packed import PackedLinear
from tieroff.tracing.recipes.recipe import LORA_RANK, RecipeStep, Settings, build_model
from tieroff.tracing.recording.scratch import PeakCounter

# peft, bitsandbytes and torchao say what they do not find, and call what transformers and torch have renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
]

PEAK_TOLERANCE = 0.03
DEFAULT_TIER = ("llama", "gpt2", "mixtral")
TOKENS, BATCH = 32, 2
WHOLE = [
    "llama",
    "mistral",
    "qwen3",
    "gemma2",
    "phi3",
    "gpt2",
    "falcon",
    "olmo2",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
]


def settings_of(recipe: Recipe, **others: Any) -> Settings:
    return Settings(recipe, TOKENS, BATCH, **others)


def planned_trace(name: str, settings: Settings) -> Trace:
    return dry_trace(RecipeStep(CONFIGS[name](), settings).factory, MACHINE, MIN_BYTES)


@pytest.fixture
def _no_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels of the CPU take for themselves shows in the process's memory only: no fake tensor knows it."""
    monkeypatch.setattr(PeakCounter, "reset", lambda self: False)


@pytest.mark.usefixtures("_no_scratch")
@pytest.mark.parametrize("recipe", Recipe)
@pytest.mark.parametrize(
    "name", [name if name in DEFAULT_TIER else pytest.param(name, marks=pytest.mark.long) for name in CONFIGS]
)
def test_peak_of_a_recipe_is_that_of_its_real_step(name: str, recipe: Recipe) -> None:
    settings = settings_of(recipe)
    planned = planned_trace(name, settings)
    torch.manual_seed(0)
    real = real_trace(cleared(build_model(CONFIGS[name](), settings)), settings)
    assert planned.peak_bytes == pytest.approx(real.peak_bytes, rel=PEAK_TOLERANCE)


@pytest.mark.usefixtures("_no_scratch")
@pytest.mark.parametrize("others", [{"is_checkpointed": False}, {"autocast": torch.bfloat16}], ids=["kept", "autocast"])
def test_peak_without_checkpointing_and_under_autocast(others: dict[str, Any]) -> None:
    settings = settings_of(Recipe.full_fp32, **others)
    planned = planned_trace("llama", settings)
    torch.manual_seed(0)
    real = real_trace(build_model(CONFIGS["llama"](), settings), settings)
    assert planned.peak_bytes == pytest.approx(real.peak_bytes, rel=PEAK_TOLERANCE)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "mistral",
        "qwen3",
        "gemma2",
        "phi3",
        "gpt2",
        "falcon",
        "olmo2",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
    ],
)
def test_whole_models_are_traced_without_being_made(kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind)
    settings = [Settings(recipe, tokens=512, batch=1) for recipe in Recipe]
    steps = [RecipeStep(config, each) for each in settings]
    peaks = [dry_trace(step.factory, MACHINE, kernels="cuda").peak_bytes for step in steps]
    made = [step.built for step in steps if step.built is not None]
    assert peaks == sorted(peaks, reverse=True)  # fewer bytes per weight, or fewer weights trained, need less
    assert len(made) == len(steps)
    assert all(peak > built.weight_bytes for peak, built in zip(peaks, made, strict=True))
    assert 1.9 < peaks[0] / peaks[1] < 2.1


def bitsandbytes_model(name: str, *, is_double: bool) -> nn.Module:
    """Returns a small model as people load it for QLoRA, from a checkpoint on disk."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=is_double, bnb_4bit_compute_dtype=torch.bfloat16
    )
    with tempfile.TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16).save_pretrained(folder)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": "cpu"}
        )
    model.config.use_cache = False
    model.gradient_checkpointing_enable({"use_reentrant": False})
    adapters = peft.LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, lora_dropout=0.0, target_modules="all-linear")
    trained: nn.Module = peft.get_peft_model(model, adapters).train()
    return trained


@pytest.mark.long
@pytest.mark.usefixtures("_no_scratch")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_peak_of_qlora_is_that_of_bitsandbytes(name: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes has no wheel for this machine")
    settings = settings_of(Recipe.qlora)
    torch.manual_seed(0)
    real = real_trace(bitsandbytes_model(name, is_double=True), settings)
    assert planned_trace(name, settings).peak_bytes == pytest.approx(real.peak_bytes, rel=PEAK_TOLERANCE)


@pytest.mark.parametrize(("recipe", "value_bytes"), [(Recipe.full_fp32, 4), (Recipe.full_bf16, 2)])
def test_full_recipes_train_everything_in_one_type(recipe: Recipe, value_bytes: int) -> None:
    step = RecipeStep(CONFIGS["llama"](), settings_of(recipe))
    trace = dry_trace(step.factory, MACHINE, min_bytes=1)
    assert step.built is not None
    assert step.built.trained_count == step.built.count
    assert step.built.weight_bytes == value_bytes * step.built.count
    sizes = {kind: sum(t.size_bytes for t in trace.tensors if t.kind is kind) for kind in TensorClass}
    assert sizes[TensorClass.PARAMETER] == sizes[TensorClass.GRADIENT] == step.built.weight_bytes
    assert sizes[TensorClass.OPTIMIZER] == pytest.approx(2 * step.built.weight_bytes, rel=0.001)  # and counts of steps


def test_qlora_packs_linear_layers_but_the_output_and_leaves_packed_weights_free_between_their_uses() -> None:
    step = RecipeStep(CONFIGS["llama"](), settings_of(Recipe.qlora))
    trace = dry_trace(step.factory, MACHINE, MIN_BYTES)
    config = CONFIGS["llama"]()
    layer = 128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 256
    packed = [t for t in trace.tensors if t.name.endswith("base_layer.weight")]
    assert sum(t.size_bytes for t in packed) == config.num_hidden_layers * layer // 2
    backward = next(i for i, op in enumerate(trace.ops) if op.phase == "backward")
    assert all(any(stop <= backward for _, stop in t.holds) and any(start >= backward for start, _ in t.holds) for t in packed)
    assert not any(start < backward < stop for t in packed for start, stop in t.holds)
    assert not any(t.kind is TensorClass.GRADIENT and "lora" not in t.name for t in trace.tensors)


def test_packed_weights_unpack_to_what_their_bytes_say() -> None:
    layer = PackedLinear(64, 4, None, torch.float32)
    values = {
        "weight": torch.arange(128, dtype=torch.uint8)[:, None],
        "levels": torch.linspace(-1, 1, 16),
        "scales": torch.tensor([1, 2, 3, 4], dtype=torch.uint8),
        "scales_levels": torch.arange(256.0),
        "scales_of_scales": torch.full((1,), 2.0),
        "scales_mean": torch.tensor(1.0),
    }
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        tensor.copy_(values[name])
    whole = layer.unpacked(layer.weight).flatten()
    expected = [
        (-1 + 2 * ((value >> (4 * (1 - half))) & 15) / 15) * (2 * (1 + (2 * value + half) // 64) + 1)
        for value in range(128)
        for half in range(2)
    ]
    assert torch.allclose(whole, torch.tensor(expected))
    x: torch.Tensor = torch.randn(3, 64).requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, whole.view(4, 64).sum(0).expand(3, 64), atol=1e-5)


def test_a_model_without_checkpointing_says_how_to_plan_it() -> None:
    config = transformers.CTRLConfig(vocab_size=64, n_embd=32, dff=32, n_layer=1, n_head=2)
    with pytest.raises(ConfigError, match="--no-checkpointing"):
        dry_trace(RecipeStep(config, settings_of(Recipe.full_bf16)).factory, MACHINE)


def test_a_configuration_of_no_language_model_is_an_error() -> None:
    with pytest.raises(ConfigError, match="language model"):
        dry_trace(RecipeStep(transformers.ResNetConfig(), settings_of(Recipe.lora)).factory, MACHINE)


@pytest.mark.parametrize("library", ["peft"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, library, None)
    with pytest.raises(ConfigError, match=rf"pip install 'tieroff\[{library}\]'"):
        dry_trace(RecipeStep(CONFIGS["llama"](), settings_of(Recipe.lora)).factory, MACHINE)
