"""What a forked child finds of a wrapped model: values of the fork, or an error; and nothing with which it could disturb."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tieroff
from tests.support.twins import Setting, copied, equal, mlp_and_adam, usual_step

pytestmark = pytest.mark.timeout(60)


def in_child(work: Callable[[], bool]) -> int:
    """Runs `work` in a forked child; returns its exit status, 0 when it returned True, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if work() else 1
        finally:
            os._exit(status)
    ended = os.waitpid(child, 0)[1]
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

    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if read() else 1
        finally:
            os._exit(status)
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
