"""No update is made below unless comparison proved it: what is not equal stays on the device, and people are told."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.accelerator import target
from tests.accelerator.updates.loop import STEPS_BEFORE, Loop, Make, differing, fused_adamw, momentum
from tests.support.parity import warnings_of_tieroff
from tieroff.runtime.optimizer.host import evidence, proof
from tieroff.runtime.optimizer.host.capture import Capture
from tieroff.runtime.optimizer.host.proof import Proof, Verdict
from tieroff.updates.native import HAS_UPDATES
from tieroff.updates.rule import Rule, typical

pytestmark = pytest.mark.skipif(not HAS_UPDATES, reason="built without updates in host memory")

STEPS = STEPS_BEFORE + 4


def foreach_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def rounds_roots_correctly() -> bool:
    values = torch.rand(1 << 16, generator=torch.Generator().manual_seed(3)) * 1e-3
    return torch.equal(values.sqrt(), values.double().sqrt().float())


def test_what_no_kernel_equals_stays_on_the_device(tmp_path: Path) -> None:
    """PyTorch's CPU roots are not all correctly rounded where its math library has them; then no arithmetic is equal."""
    plain, wrapped = Loop(None, foreach_adamw), Loop(tmp_path, foreach_adamw)
    plain.steps(STEPS)
    with warnings_of_tieroff() as told:
        wrapped.steps(STEPS)
    assert wrapped.engine is not None
    text, is_refused = wrapped.engine.explain(), not wrapped.engine.plan.host_updates
    assert is_refused or rounds_roots_correctly()
    if is_refused:
        assert [message for message in told if "stay on the device: the CPU's differ in the last bits" in message] == told[:1]
        assert "The device updates: the CPU's differ in the last bits of" in text
        assert wrapped.engine.stats().host_updates == 0
    assert differing(plain.finish(), wrapped.finish()) == []


@pytest.mark.skipif(rounds_roots_correctly(), reason="here an arithmetic of ours is that of AdamW op by op")
def test_without_the_proof_bits_would_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrapped = Loop(None, foreach_adamw), Loop(tmp_path, foreach_adamw)
    plain.steps(STEPS)
    monkeypatch.setattr(Proof, "verdict_of", lambda self, kind: Verdict("contracted", "contracted", 0.0))
    wrapped.steps(STEPS)
    wrapped.assert_updated_below()
    assert differing(plain.finish(), wrapped.finish()) != []


def test_rounding_may_differ_where_the_config_says_so(tmp_path: Path) -> None:
    wrapped = Loop(tmp_path, foreach_adamw, exact=False)
    wrapped.steps(STEPS)
    wrapped.assert_updated_below()
    assert wrapped.engine is not None
    text = wrapped.engine.explain()
    assert "differ from the device's in" in text or rounds_roots_correctly()
    wrapped.finish()


def test_updates_that_tell_nothing_of_rounding_stay_on_the_device(tmp_path: Path) -> None:
    """As in an epoch of warm-up with a learning rate of 0: whatever the rounding, nothing changes."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.0, momentum=1.0)  # whose products are exact

    plain, wrapped = Loop(None, make), Loop(tmp_path, make)
    for loop in (plain, wrapped):
        loop.steps(STEPS)
        loop.optimizer.param_groups[0]["lr"] = 0.3
        loop.steps(2)
    assert wrapped.engine is not None and wrapped.engine.stats().host_updates == 0
    assert "The device updates: comparison did not tell how they are rounded" in wrapped.engine.explain()
    assert differing(plain.finish(), wrapped.finish()) == []


class HostBytes(TorchDispatchMode):
    """Counts the memory of tensors of the host that ops inside make.

    Attributes:
        peak_bytes: the most at once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(one) for one in tree_leaves(out) if isinstance(one, torch.Tensor) and one.is_cpu]
        storages = [made.untyped_storage() for one in self._made if (made := one()) is not None]
        self.peak_bytes = max(self.peak_bytes, sum({one.data_ptr(): one.nbytes() for one in storages}.values()))
        return out


def test_a_trial_takes_the_host_memory_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLICE_ELEMENTS", 1 << 10)
    tensors = tuple(torch.rand(1 << 14, device=target.device()) for _ in range(4))
    captures = [Capture(typical("adam", "none", ()), "float32", tensors, ("adam",)) for _ in range(2)]
    found = Proof()
    with HostBytes() as count:
        found.end(found.begin(captures), 1)
    copied_bytes = 2 * 4 * 4 << 14
    assert copied_bytes <= count.peak_bytes <= proof.needed_bytes(captures) < copied_bytes * 1.2


def test_an_optimizer_without_a_kernel_is_updated_on_the_device(tmp_path: Path) -> None:
    plain, wrapped = Loop(None, torch.optim.Adamax), Loop(tmp_path, torch.optim.Adamax)
    plain.steps(STEPS)
    with warnings_of_tieroff() as told:
        wrapped.steps(STEPS)
    assert wrapped.engine is not None
    assert (wrapped.engine.stats().phase, wrapped.engine.stats().host_updates, told) == ("planned", 0, [])
    assert differing(plain.finish(), wrapped.finish()) == []


def scaled(loop: Loop, scaler: torch.amp.GradScaler) -> None:
    scaler.scale(loop.loss()).backward()
    scaler.unscale_(loop.optimizer)
    loop.note(torch.nn.utils.clip_grad_norm_(loop.parameters, 0.02))
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()


@pytest.mark.parametrize(("make", "is_below"), [(momentum, True), (fused_adamw, False)], ids=["sgd", "fused-adamw"])
def test_under_a_loss_scale_an_optimizer_that_takes_the_scale_updates_on_the_device(
    make: Make, is_below: bool, tmp_path: Path
) -> None:
    plain, wrapped = Loop(None, make), Loop(tmp_path, make)
    for loop in (plain, wrapped):
        scaler = torch.amp.GradScaler(target.NAME, init_scale=2.0**120, growth_interval=3)
        for _ in range(STEPS + 8):
            scaled(loop, scaler)
        loop.note(scaler.get_scale())
    assert wrapped.engine is not None
    assert bool(wrapped.engine.stats().host_updates) is is_below
    assert differing(plain.finish(), wrapped.finish()) == []


@pytest.mark.parametrize("update_on_host", [True, False])
def test_parameters_on_one_memory_are_updated_on_the_device(update_on_host: bool, tmp_path: Path) -> None:
    """No copy of the one is under way while an update writes the other: the device would tell of a race."""
    plain, wrapped = Loop(None), Loop(tmp_path, update_on_host=update_on_host)
    for loop in (plain, wrapped):
        loop.steps(STEPS_BEFORE)
        loop.parameters[2].data = loop.parameters[0].data
        loop.steps(8)
    assert differing(plain.finish(), wrapped.finish()) == []


@pytest.mark.parametrize("budget", ["45%", "min"])
def test_parameters_that_come_to_share_memory_are_updated_in_one_call(budget: str, tmp_path: Path) -> None:
    """Both are decayed before both get their step, as `foreach` does it for a list; one after the other rounds otherwise."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3, foreach=True)

    plain, wrapped = Loop(None, make), Loop(tmp_path, make, budget=budget)
    for loop in (plain, wrapped):
        loop.steps(STEPS_BEFORE)
        loop.parameters[2].data = loop.parameters[0].data
        loop.steps(10)
    assert wrapped.engine is not None and wrapped.engine.stats().phase == "planned"
    assert differing(plain.finish(), wrapped.finish()) == []


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("budget", ["45%", "min"])
def test_parameters_that_come_to_share_state_are_updated_in_one_call(budget: str, is_fused: bool, tmp_path: Path) -> None:
    """Lists are updated op by op: what both write is written for both before either is updated with it."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=is_fused, foreach=not is_fused)

    plain, wrapped = Loop(None, make), Loop(tmp_path, make, budget=budget)
    for loop in (plain, wrapped):
        loop.steps(STEPS_BEFORE)
        loop.state[8]["exp_avg_sq"] = loop.state[0]["exp_avg_sq"]
        loop.steps(4)
        loop.optimizer.state[loop.parameters[4]] = loop.state[12]
        loop.steps(6)
    assert differing(plain.finish(), wrapped.finish()) == []


def test_layers_are_frozen_and_thawed_once_the_cpu_updates(tmp_path: Path) -> None:
    """Their state stays, so that the optimizer's buckets still hold them."""
    plain, wrapped = Loop(None), Loop(tmp_path)
    for loop in (plain, wrapped):
        loop.steps(STEPS_BEFORE)
        for parameter in loop.parameters[:4]:
            parameter.requires_grad_(False)
        loop.steps(4)
        for parameter in loop.parameters[:4]:
            parameter.requires_grad_(True)
        loop.steps(2)
    wrapped.assert_updated_below()
    assert differing(plain.finish(), wrapped.finish()) == []


def test_a_rate_that_is_a_tensor_leaves_updates_to_the_device(tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(1e-2), fused=True)

    plain, wrapped = Loop(None, make), Loop(tmp_path, make)
    plain.steps(STEPS)
    wrapped.steps(STEPS)
    assert wrapped.engine is not None
    assert "The device updates: no kernel makes its updates" in wrapped.engine.explain()
    assert differing(plain.finish(), wrapped.finish()) == []


@pytest.mark.parametrize(("option", "value"), [("weight_decay", 0.1), ("dampening", 0.3), ("nesterov", True)])
def test_options_that_come_later_are_compared_before_the_cpu_updates_with_them(
    option: str, value: float, tmp_path: Path
) -> None:
    plain, wrapped = Loop(None, momentum), Loop(tmp_path, momentum)
    for loop in (plain, wrapped):
        loop.steps(STEPS)
    wrapped.assert_updated_below()
    assert wrapped.engine is not None
    phases = []
    with warnings_of_tieroff() as told:
        for loop in (plain, wrapped):
            loop.optimizer.param_groups[0][option] = value
            for _ in range(5):
                loop.step()
                phases.append(wrapped.engine.stats().phase)
    assert phases[5:] == ["on demand"] * 2 + ["planned"] * 3
    assert told == []
    wrapped.assert_updated_below()
    assert differing(plain.finish(), wrapped.finish()) == []


def wrong_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every kernel count the gradient with the other sign from here on."""
    make = Rule.part

    def part(rule: Rule, *arguments: Any) -> Any:
        flags = tuple({"maximize"} ^ {*rule.flags})
        return make(Rule(rule.name, rule.decay, flags, rule.scalars), *arguments)

    monkeypatch.setattr(Rule, "part", part)


def test_kernels_with_a_wrong_flag_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrapped = Loop(None), Loop(tmp_path)
    plain.steps(STEPS)
    wrong_from(monkeypatch)
    with warnings_of_tieroff() as told:
        wrapped.steps(STEPS)
    assert wrapped.engine is not None and wrapped.engine.stats().host_updates == 0
    assert len([message for message in told if "stay on the device" in message]) == 1
    assert differing(plain.finish(), wrapped.finish()) == []


@pytest.mark.parametrize("is_wrong", [False, True], ids=["still-equal", "other-by-then"])
def test_what_was_proven_is_compared_again(is_wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wrapped = Loop(None, fused_adamw), Loop(tmp_path, fused_adamw)
    plain.steps(STEPS + 8)
    wrapped.steps(STEPS)
    wrapped.assert_updated_below()
    monkeypatch.setattr(evidence, "RECHECK_UPDATES", STEPS)
    if is_wrong:
        wrong_from(monkeypatch)
        monkeypatch.setattr(evidence, "RECHECK_UPDATES", 0)
    assert wrapped.engine is not None
    phases = []
    with warnings_of_tieroff() as told:
        for _ in range(8):
            wrapped.step()
            phases.append(wrapped.engine.stats().phase)
    assert "on demand" in phases
    if is_wrong:
        assert len([message for message in told if "stay on the device" in message]) == 1
        assert wrapped.engine.stats().host_updates == 0
    else:
        assert told == []
        assert phases.count("on demand") == 1
        wrapped.assert_updated_below()
    assert differing(plain.finish(), wrapped.finish()) == []
