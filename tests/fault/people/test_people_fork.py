"""What a forked child finds of a wrapped model: values of the fork, or an error; and nothing with which it could disturb."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tieroff
from tests.support.twins import Setting, copied, equal, mlp_and_adam, usual_step

pytestmark = pytest.mark.timeout(60)


def fork(work: Callable[[], bool]) -> int:
    """Begins to run `work` in a forked child, whose exit status is 0 if it returns True; returns the child's id."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    return child


def in_child(work: Callable[[], bool]) -> int:
    """Runs `work` in a forked child; returns its exit status, 0 when it returned True, or minus the signal that ended it."""
    ended = os.waitpid(fork(work), 0)[1]
    return -os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else os.WEXITSTATUS(ended)


def trained(setting: Setting) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model, optimizer = mlp_and_adam()
    setting.wrap(model, optimizer)
    for _ in range(4):
        usual_step(model, optimizer)
    return model, optimizer


def values_of(model: Any, optimizer: Any) -> Any:
    return copied([dict(model.state_dict()), optimizer.state_dict()["state"], [p.detach().clone() for p in model.parameters()]])


@pytest.mark.parametrize("delayed", [False, True], ids=["cpu", "delayed"])
def test_a_child_reads_the_values_of_the_fork(delayed: bool, tmp_path: Any) -> None:
    model, optimizer = trained(Setting(tmp_path, delayed=delayed))
    expected = values_of(model, optimizer)
    ready, go = os.pipe()

    def read() -> bool:
        os.read(ready, 1)  # the parent has trained on
        return equal(values_of(model, optimizer), expected)

    child = fork(read)
    for _ in range(3):
        usual_step(model, optimizer)
    os.write(go, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(ready)
    os.close(go)
    tieroff.unwrap(model)


def test_what_a_child_writes_is_its_own(tmp_path: Any) -> None:
    model, optimizer = trained(Setting(tmp_path))
    expected = values_of(model, optimizer)

    def write() -> bool:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        return bool((next(model.parameters()) == 7).all())

    assert in_child(write) == 0
    assert equal(values_of(model, optimizer), expected)
    usual_step(model, optimizer)
    tieroff.unwrap(model)


def test_a_child_that_cannot_read_says_so_in_state_dict(tmp_path: Any) -> None:
    model, optimizer = trained(Setting(tmp_path, nvme=True))
    expected = values_of(model, optimizer)

    def refused() -> bool:
        for owner in (model, optimizer):
            try:
                owner.state_dict()
            except tieroff.StateError as error:
                assert "forked child" in str(error)
                continue
            return False
        return True

    assert in_child(refused) == 0
    assert equal(values_of(model, optimizer), expected)
    usual_step(model, optimizer)
    tieroff.unwrap(model)
    assert in_child(lambda: bool(model.state_dict())) == 0


READS: dict[str, Callable[[Any], Any]] = {
    "detach": lambda tensor: tensor.detach(),
    "data": lambda tensor: tensor.data,
    "sum": lambda tensor: tensor.sum(),
    "function": lambda tensor: torch.nn.functional.linear(torch.ones(1, tensor.shape[-1]), tensor),
    "numpy": lambda tensor: tensor.numpy(),
    "item": lambda tensor: tensor.view(-1)[0].item(),
    "list": lambda tensor: tensor.tolist(),
    "print": repr,
    "copy": copy.deepcopy,
    "write": lambda tensor: tensor.mul_(2),
}


@pytest.mark.parametrize("read", READS)
def test_a_child_that_uses_what_it_cannot_read_gets_an_error(read: str, tmp_path: Any) -> None:
    model, optimizer = trained(Setting(tmp_path, nvme=True))
    weight = model.first.weight
    tensors = [weight, weight.grad, optimizer.state[weight]["exp_avg"]]
    expected = values_of(model, optimizer)

    def refused() -> bool:
        refusals = 0
        for tensor in tensors:
            try:
                READS[read](tensor)
            except tieroff.StateError as error:
                refusals += "forked child" in str(error)
        return refusals == len(tensors) and tensors[0].shape == (16, 8) and tensors[0].requires_grad

    assert in_child(refused) == 0
    assert equal(values_of(model, optimizer), expected)
    usual_step(model, optimizer)
    tieroff.unwrap(model)
