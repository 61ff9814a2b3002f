"""`tieroff rehearse`: scripts on a GPU that is not there, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tieroff.config import Config
from tieroff.core.io.run_folder import load_run
from tieroff.core.machine import load_machine
from tieroff.errors import ConfigError
from tieroff.rehearsal import build
from tieroff.rehearsal.below import Below

MIB = 2**20
LAYERS, WIDTH, ROWS = 6, 1024, 2048

MACHINE = """
name = "a slow GPU"
device_bytes = "1GiB"
host_bytes = "64GiB"
fp32_flops_per_s = 1e12
bf16_flops_per_s = 2e12
device_memory_bytes_per_s = "100GB"
d2h_bytes_per_s = "2GB"
h2d_bytes_per_s = "2GB"
"""
LARGE = MACHINE.replace('"1GiB"', '"40GiB"').replace('"2GB"', '"2000GB"')  # a rehearsal takes the time of its copies
DRIVE = """
nvme_bytes = "1TB"
nvme_write_bytes_per_s = "1GB"
nvme_read_bytes_per_s = "1GB"
"""

MODEL = f"""
import sys
import torch
import tieroff
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.GELU()) for _ in range({LAYERS})]).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
LOOP = f"""
for _ in range(int(sys.argv[1])):
    x = torch.randn({ROWS}, {WIDTH}).to("cuda")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
"""
WRAP = 'tieroff.wrap(model, optimizer, config={"plan": {"background": False}})\n'


class Rehearsal:
    """Runs scripts of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, script: str, *arguments: str, budget: str = "60%", machine: str = MACHINE, status: int = 0) -> Any:
        """Returns the document that the command prints."""
        (self.folder / "machine.toml").write_text(machine)
        (self.folder / "train.py").write_text(script)
        options = ["--machine", "machine.toml", "--device-budget", budget, "--json", "train.py", *arguments]
        command = [sys.executable, "-m", "tieroff", "rehearse", *options]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        self.stderr = done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def rehearsal(tmp_path: Path) -> Rehearsal:
    if torch.version.cuda is not None or torch.version.hip is not None:
        pytest.skip("a rehearsal needs PyTorch's CPU build, and this one is for GPUs")
    return Rehearsal(tmp_path)


def test_rehearse_runs_a_wrapped_script_by_plan_and_writes_its_run(rehearsal: Rehearsal) -> None:
    found = rehearsal.run(MODEL + WRAP + LOOP, "8")

    assert found["is_wrapped"] and found["steps"] == 8 and found["timed_steps"] > 0
    run = load_run(rehearsal.folder / "rehearsal")
    assert not run.plan.moves_nothing
    assert found["moved_bytes"]["d2h"] > 0 and found["moved_bytes"]["h2d"] > 0
    assert found["peak_bytes"]["device"] <= found["budget_bytes"]["device"]
    assert found["peak_bytes"]["host"] > 0
    assert (rehearsal.folder / "rehearsal" / "report.html").is_file()
    assert found["explain"]
    parts = found["compute_s"] + found["waiting_s"] + found["host_bound_s"]
    assert parts == pytest.approx(found["step_s"], rel=1e-6)
    low, high = found["interval_s"]
    assert low < found["step_s"] < high
    # A late host makes the step longer, and copies that run meanwhile are waited for less.
    simulated_s = found["predicted_step_s"]
    assert found["step_s"] > 0.97 * simulated_s
    batch_s = ROWS * WIDTH * 4 / 2e9  # the loop's own copy of its batch, of which a plan knows nothing
    assert found["compute_s"] + found["waiting_s"] < 1.03 * simulated_s + batch_s


def test_rehearse_takes_kernels_times_from_the_clock_of_the_machine(rehearsal: Rehearsal) -> None:
    slow = rehearsal.run(MODEL + LOOP, "4")
    fast = rehearsal.run(MODEL + LOOP, "4", machine=MACHINE.replace("1e12", "2e12"))

    flops = 6 * LAYERS * ROWS * WIDTH * WIDTH  # each layer's product, and two of backward
    assert slow["compute_s"] > flops / 1e12
    assert slow["compute_s"] > 1.5 * fast["compute_s"]
    assert slow["kernels"] == fast["kernels"]


def test_rehearse_says_that_a_script_is_not_wrapped_and_that_it_reads_zeros(rehearsal: Rehearsal) -> None:
    found = rehearsal.run(MODEL + LOOP, "4")

    assert not found["is_wrapped"] and found["predicted_step_s"] is None
    assert any("never called tieroff.wrap" in note for note in found["notes"])
    assert any("zeros" in note for note in found["notes"])
    assert found["values"] == 1
    assert "loss 0.0" in rehearsal.stderr


def test_rehearse_counts_memory_that_it_does_not_take(rehearsal: Rehearsal) -> None:
    large = MODEL.replace(str(WIDTH), "16384").replace("range(6)", "range(8)")
    loop = LOOP.replace(str(WIDTH), "16384").replace(str(ROWS), "64")
    found = rehearsal.run(large + WRAP + loop, "4", budget="min", machine=LARGE)

    state_bytes = 8 * 16384 * 16384 * 4 * 3  # parameters and AdamW's two of each
    assert sum(found["peak_bytes"][tier] for tier in ("allocated", "host")) > state_bytes
    assert found["real_peak_bytes"] < 2048 * MIB


def test_rehearse_moves_to_a_drive_that_is_not_there(rehearsal: Rehearsal) -> None:
    machine = MACHINE.replace('host_bytes = "64GiB"', 'host_bytes = "8MiB"') + DRIVE
    found = rehearsal.run(MODEL + WRAP + LOOP, "8", budget="min", machine=machine)

    assert found["moved_bytes"]["nvme_write"] > 0 and found["moved_bytes"]["nvme_read"] > 0
    assert found["peak_bytes"]["nvme"] > 0


def test_rehearse_raises_out_of_memory_when_a_plain_script_does_not_fit(rehearsal: Rehearsal) -> None:
    caught = MODEL + "try:\n    torch.empty(2**31, device='cuda')\nexcept torch.cuda.OutOfMemoryError:\n    print('full')\n"
    rehearsal.run(caught + LOOP, "3")

    assert "full" in rehearsal.stderr


FEATURES = """
import torch
from torch import nn
import torch.nn.functional as F

assert torch.cuda.is_available() and torch.cuda.device_count() == 1
device = torch.device("cuda")
a, b = torch.randn(8, 8, device=device), torch.randn(8, 8).cuda(non_blocking=True)
assert a.is_cuda and (a @ b).device == torch.device("cuda", 0)
assert (a + 1).t().contiguous().shape == (8, 8)
assert torch.nonzero(a).shape == (0, 2) and a.sum().item() == 0.0 and a.tolist()[0][0] == 0.0
assert a[a > 0].shape == (0,)
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert (a @ b).dtype is torch.bfloat16
q = torch.randn(2, 4, 16, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
assert q.grad.shape == q.shape
q32 = q.detach().float().requires_grad_()
F.scaled_dot_product_attention(q32, q32, q32, is_causal=True).sum().backward()
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1), nn.Flatten()
)
model = nn.Sequential(model, nn.Linear(8 * 16, 4)).cuda()
scaler = torch.amp.GradScaler("cuda")
for fused in (False, True):
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    for _ in range(2):
        out = model(torch.randn(2, 3, 8, 8, device="cuda"))
        loss = F.cross_entropy(out, torch.zeros(2, dtype=torch.long, device="cuda"))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
before = torch.cuda.memory_allocated()
held = torch.empty(2**20, device="cuda")
assert torch.cuda.memory_allocated() - before == 2**22 and torch.cuda.max_memory_allocated() >= before + 2**22
start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    start.record()
    pinned = torch.empty(2**24, dtype=torch.uint8).pin_memory()
    pinned.to("cuda", non_blocking=True)
    stop.record()
torch.cuda.synchronize()
assert 8.0 < start.elapsed_time(stop) < 80.0  # 16 MiB at 2 GB/s
try:
    a + torch.ones(8)
except RuntimeError as error:
    assert "same device" in str(error)
else:
    raise AssertionError("a tensor of the host was taken")
print("all right")
"""


def test_rehearse_serves_what_scripts_call_of_cuda(rehearsal: Rehearsal) -> None:
    rehearsal.run(FEATURES)

    assert "all right" in rehearsal.stderr


def test_rehearse_ends_as_the_script_does(rehearsal: Rehearsal) -> None:
    rehearsal.run("raise SystemExit(3)", status=1)
    rehearsal.run("1 / 0", status=1)

    assert "ZeroDivisionError" in rehearsal.stderr


def test_rehearse_names_what_a_machine_lacks(rehearsal: Rehearsal) -> None:
    found = rehearsal.run("pass", machine=MACHINE.replace("fp32_flops_per_s = 1e12", ""), status=1)

    assert found["error"]["type"] == "ConfigError" and "fp32_flops_per_s" in found["error"]["message"]


def test_a_build_of_pytorch_for_gpus_is_told_which_one_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    with pytest.raises(ConfigError, match=r"PyTorch's CPU build, torch 2\.14\.1\+cpu"):
        build.load()


@pytest.mark.parametrize(("engine", "left_bytes"), [("auto", 6 * MIB), ("gds", 8 * MIB)])
def test_what_a_rehearsal_has_of_the_host_is_without_the_bounce_buffers(engine: str, left_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "machine.toml").write_text(MACHINE + DRIVE)
    machine = load_machine(tmp_path / "machine.toml")
    native: Any = None  # no memory is asked for
    below = Below(native, machine, tmp_path / "machine.toml", "1MiB", None, None)
    tables = {"budget": {"host": "8MiB"}, "nvme": {"dirs": [str(tmp_path)], "staging": "2MiB", "engine": engine}}
    assert below.adapt(Config.load(tables)).budget.host == left_bytes
