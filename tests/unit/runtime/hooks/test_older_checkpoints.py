"""A checkpoint of the form that torch 2.11 has, whose unpack hook itself asks for the inputs, is served as the present one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

PROGRAM = '''
import sys, weakref
import torch
import torch.utils.checkpoint as checkpoints

OLDER = """
class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor, *args):
        ctx.save_for_backward(*args)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx, *gradients):
        raise AssertionError("it only saves")


def _save_inputs(frame, *args):
    where = [index for index, one in enumerate(args) if isinstance(one, torch.Tensor)]
    frame.input_saver = _Inputs.apply(torch.empty(0, requires_grad=True), *[args[index] for index in where])
    frame.others = [None if isinstance(one, torch.Tensor) else one for one in args], where


def _inputs_of(frame, tensors):
    args, where = list(frame.others[0]), frame.others[1]
    for index, tensor in zip(where, tensors):
        args[index] = tensor
    return args


class _checkpoint_hook(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, frame):
        def pack_hook(x):
            holder = _Holder()
            frame.weak_holders.append(weakref.ref(holder))
            frame.x_metadatas.append(frame.metadata_fn(x))
            return holder

        def unpack_hook(holder):
            gid = torch._C._current_graph_task_id()
            if not frame.is_recomputed[gid]:
                saver = frame.input_saver.grad_fn
                args = _inputs_of(frame, saver.saved_tensors)
                try:
                    with _recomputation_hook(weakref.ref(frame), gid), torch.autograd.enable_grad():
                        frame.recompute_fn(*args)
                except _StopRecomputationError:
                    pass
                frame.is_recomputed[gid] = True
                frame.check_recomputed_tensors_match(gid)
            found = frame.recomputed[gid][holder.handles[gid]]
            holder.handles[gid] = None
            return found

        super().__init__(pack_hook, unpack_hook)
"""
if sys.argv[1] == "older":
    exec(OLDER, vars(checkpoints))
    del checkpoints._CheckpointFrame.get_inputs
    checkpoints._CheckpointFrame.save_inputs = checkpoints._save_inputs

import tieroff
from tieroff.core.tensor import Tier
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoints.checkpoint(layer, x, use_reentrant=False)
        return x


torch.manual_seed(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
plan = {"min_bytes": 0, "background": False}
tieroff.wrap(model, optimizer, {"plan": plan, "nvme": {"dirs": [sys.argv[2]]}}, budget="min")
for index in range(5):
    loss = model(torch.randn(8, 64, generator=torch.Generator().manual_seed(index))).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
engine = tieroff.engine(model)
peak_bytes = engine.plan.peak_bytes[Tier.DEVICE]  # that below goes by the measured times
print(loss.item(), engine.stats().phase, peak_bytes, [(t.name, t.size_bytes) for t in engine.trace.tensors])
'''


@pytest.mark.skipif(
    not hasattr(torch.utils.checkpoint._CheckpointFrame, "get_inputs"), reason="this torch has that form, which others test"
)
def test_a_checkpoint_that_asks_in_its_unpack_hook_is_planned_as_one_that_does_not(project: Path, tmp_path: Path) -> None:
    found = []
    for form in ("present", "older"):
        command = [sys.executable, "-c", PROGRAM, form, str(tmp_path)]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]
    assert "planned" in found[0]
