"""Submodules that torch.compile made run compiled inside a wrapped model: the plain run's graphs, and so its bits."""

from __future__ import annotations

import mmap
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.associative_scan import associative_scan
from torch.utils.checkpoint import checkpoint

import tieroff
from tests.support.parity import BACKENDS
from tieroff.core.tensor import Tier
from tieroff.errors import InfeasiblePlanError, StateError, StoreError
from tieroff.runtime.hooks.parameters.reads import ParameterReads

MIB = 1 << 20
WIDTH = 32
STEPS = 7

pytestmark = [  # of torch's own code, when it compiles
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A compiler that runs graphs as they are, counts the runs, and takes memory that no dispatcher sees.

    Args:
        scratch_bytes: nobody sees it used.
        buffer_bytes: a dispatcher sees it written, as by an op that generated code calls on its own buffers (`out=`).
            Graphs of such code run unseen.
    """

    def __init__(self, scratch_bytes: int = 0, buffer_bytes: int = 0) -> None:
        self.buffer_bytes = buffer_bytes
        self.sizes: list[int] = []
        self.runs = 0
        self.scratch_bytes = scratch_bytes
        self.backend = aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile)

    def _compile(self, graph: torch.fx.GraphModule, _example: Any) -> Any:
        self.sizes.append(len(graph.graph.nodes))

        def run(*args: Any) -> Any:
            self.runs += 1
            if self.scratch_bytes:
                with mmap.mmap(-1, self.scratch_bytes) as scratch:  # not from a heap, which may have it resident already
                    for page in range(0, self.scratch_bytes, mmap.PAGESIZE):
                        scratch[page] = 1  # page by page: bytes of that size to write would be as much memory again
            if not self.buffer_bytes:
                return graph(*args)
            with torch._C._DisableTorchDispatch():
                buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8)
            buffer.fill_(0)
            with torch._C._DisableTorchDispatch():
                return graph(*args)

        return make_boxed_func(run)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class InTwoGraphs(Block):
    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        torch._dynamo.graph_break()
        return x + self.down(torch.nn.functional.gelu(up))


def build(how: str, backend: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, WIDTH))
    for at in (1, 2):
        if how == "in place":
            model[at].compile(backend=backend)
        elif how == "wrapped":
            model[at] = torch.compile(model[at], backend=backend)  # type: ignore[assignment]
        elif how == "forward":
            model[at].forward = torch.compile(model[at].forward, backend=backend)
        elif how == "decorated":
            model[at].__class__ = type("Decorated", (Block,), {"forward": torch.compile(Block.forward, backend=backend)})
    if how == "whole":
        return torch.compile(model, backend=backend)  # type: ignore[return-value]
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int = 16) -> list[float]:
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = model(torch.randn(rows, WIDTH)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrap(model: nn.Module, folder: Path, backend: str = "cpu", budget: str = "90%", **plan: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    config = {
        "device": "cpu",
        "budget": {"device": budget, "nvme": "64MiB", "strict": True},
        "nvme": {"dirs": [str(folder)], "staging": "1MiB"},
        "plan": {"min_bytes": "1KiB", "policy": "floor", **plan},
    }
    tieroff.wrap(model, optimizer, config=config, backend=BACKENDS[backend]())
    return optimizer


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiling_a_wrapped_model_says_what_to_write_instead(fullgraph: bool, tmp_path: Path) -> None:
    model = build("plain", None)
    wrap(model, tmp_path)
    compiled = torch.compile(model, backend="eager", fullgraph=fullgraph)
    error = torch._dynamo.exc.Unsupported if fullgraph else StateError
    for _ in range(2):  # nothing is compiled that goes past the engine
        with pytest.raises(error, match=r"block\.compile\(\)[\s\S]*tieroff\.wrap\(torch\.compile\(model\), optimizer\)"):
            compiled(torch.randn(16, WIDTH))
    tieroff.unwrap(model)


def test_compiling_a_wrapped_optimizers_step_says_what_to_write_instead(tmp_path: Path) -> None:
    model, plain = build("plain", None), build("plain", None)
    optimizer = wrap(model, tmp_path)
    step = torch.compile(optimizer.step, backend="eager")
    model(torch.randn(16, WIDTH)).sum().backward()
    for _ in range(2):
        with pytest.raises(StateError, match=r"optimizer\.step = torch\.compile\(optimizer\.step\)"):
            step()
    optimizer.zero_grad()
    assert train(model, optimizer) == train(plain, torch.optim.AdamW(plain.parameters()))
    tieroff.unwrap(model)


def test_compiled_autograd_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = wrap(model, tmp_path, min_bytes=0)
    compiled: list[Any] = []

    def compiler(graph: Any) -> Any:
        compiled.append(graph)
        return graph

    with compiled_autograd._enable(compiler), pytest.raises(StateError, match="cannot train under compiled autograd"):
        model(torch.ones(4, 8))
    assert not compiled
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    tieroff.unwrap(model)


def test_whole_model_below_its_one_op_is_advised_to_compile_blocks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(Block(), Block()))
    model = torch.compile(inner, backend=Graphs().backend)
    assert isinstance(model, nn.Module)
    optimizer = wrap(model, tmp_path, budget="20%", policy="auto")
    with pytest.raises(InfeasiblePlanError, match=r"`for block in model\.1: block\.compile\(\)` before tieroff\.wrap"):
        train(model, optimizer)
    tieroff.unwrap(model)


def check_equal(make: Callable[[], nn.Module], folder: Path, backend: str, **plan: Any) -> tuple[nn.Module, list[float]]:
    """Trains plain and wrapped and compares; returns the model, still wrapped, and the losses."""
    plain = make()
    expected = train(plain, torch.optim.AdamW(plain.parameters()))
    torch._dynamo.reset()
    model = make()
    losses = train(model, wrap(model, folder, backend, **plan))
    assert losses == expected
    stats = tieroff.engine(model).stats()
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert stats.moved_bytes["nvme_write"] > 0
    for got, wanted in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(got, wanted)
    return model, losses


@pytest.mark.parametrize("cover", [["activations", "parameters", "gradients", "optimizer"], ["activations", "optimizer"]])
@pytest.mark.parametrize("backend", ["cpu", "delayed"])
@pytest.mark.parametrize("how", ["in place", "wrapped", "forward", "decorated", "whole"])
def test_compiled_modules_run_the_plain_runs_graphs(how: str, backend: str, cover: list[str], tmp_path: Path) -> None:
    made: list[Graphs] = []

    def make() -> nn.Module:
        made.append(Graphs())
        return build(how, made[-1].backend)

    model, _ = check_equal(make, tmp_path, backend, cover=cover)
    plain, wrapped = made
    assert wrapped.sizes == plain.sizes  # one forward and one backward graph; nothing is compiled twice
    assert wrapped.runs == plain.runs > 0
    tieroff.unwrap(model)
    train(model, torch.optim.AdamW(model.parameters()))
    assert set(wrapped.sizes) == set(plain.sizes)  # compiled once more where fetched values had another type
    assert wrapped.runs == 2 * plain.runs
    assert all(type(module._parameters) is dict for module in model.modules())


@pytest.mark.parametrize("backend", ["cpu", "delayed"])
def test_torchs_own_modules_compiled_in_place_run_as_they_are(backend: str, tmp_path: Path) -> None:
    made: list[Graphs] = []

    def make() -> nn.Module:
        torch.manual_seed(0)
        made.append(Graphs())
        inner = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH))
        inner.compile(backend=made[-1].backend)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH))

    model, _ = check_equal(make, tmp_path, backend, min_bytes=0)
    plain, wrapped = made
    # PyTorch before 2.14 does not compile frames of torch.nn by themselves, in the plain run neither.
    assert (wrapped.sizes, wrapped.runs) == (plain.sizes, plain.runs)
    tieroff.unwrap(model)


@pytest.mark.parametrize("backend", ["cpu", "delayed"])
def test_module_compiled_after_wrap_and_once_more_runs_compiled(backend: str, tmp_path: Path) -> None:
    model, first, second = build("none", None), Graphs(), Graphs()
    plain = build("none", None)
    expected = train(plain, torch.optim.AdamW(plain.parameters()))
    optimizer = wrap(model, tmp_path, backend)
    block = model[1]  # type: ignore[index]
    block.compile(backend=first.backend)
    assert train(model, optimizer) == expected
    assert first.runs == 2 * STEPS
    torch._dynamo.reset()
    block.compile(backend=second.backend)
    train(model, optimizer)
    assert (first.runs, second.runs) == (2 * STEPS, 2 * STEPS)
    assert tieroff.engine(model).stats().phase == "planned"
    tieroff.unwrap(model)
    assert all(type(module._parameters) is dict for module in model.modules())


@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("backend", ["cpu", pytest.param("delayed", marks=pytest.mark.long)])  # each compiles for 25 s
def test_inductor_gives_the_plain_runs_bits(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # the compiler shows progress by it, and it starts a thread
    before = set(threading.enumerate())
    with torch._inductor.config.patch(compile_threads=1):  # no pool of processes that outlives the test
        model, losses = check_equal(lambda: build("wrapped", "inductor"), tmp_path, backend)
        tieroff.unwrap(model)
    assert set(threading.enumerate()) <= before
    eager = build("none", None)
    # Else the test could not tell compiled from uncompiled.
    assert losses != train(eager, torch.optim.AdamW(eager.parameters()))


@pytest.mark.parametrize(("kind", "count"), [(Block, 2), (InTwoGraphs, 4)])  # one op of each graph of the two blocks
def test_memory_of_compiled_code_is_in_the_trace(kind: type[Block], count: int, tmp_path: Path) -> None:
    graphs = Graphs(scratch_bytes=8 * MIB)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), kind(), nn.Linear(WIDTH, WIDTH))
    for at in (1, 2):
        model[at].compile(backend=graphs.backend)
    train(model, wrap(model, tmp_path, budget="64MiB"))
    ops = tieroff.engine(model).trace.ops
    for phase in ("forward", "backward"):
        taken = [op.name for op in ops if op.phase == phase and op.transient_bytes >= 7 * MIB]
        assert len(taken) == count, (phase, taken)
    tieroff.unwrap(model)


def test_what_compiled_code_makes_counts_from_where_it_was_made(tmp_path: Path) -> None:
    """Not from the step's beginning: a plan's peak would be that of a model with all its layers' results at once."""
    rows, count = 4096, 6

    def peak_bytes(backend: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(count)))
        for block in model if backend is not None else ():
            block.compile(backend=backend)
        train(model, wrap(model, tmp_path, budget="64MiB"), rows)
        peak = tieroff.engine(model).trace.peak_bytes
        tieroff.unwrap(model)
        return peak

    eager = peak_bytes(None)
    compiled = peak_bytes(Graphs(buffer_bytes=MIB).backend)
    # A call is one op, in which all that it makes is there at once; eager has a norm's statistics besides, a float a row.
    statistics_bytes = rows * 4 + 512
    assert eager - statistics_bytes <= compiled <= 1.1 * eager + MIB


def test_nothing_is_compiled_twice_where_nothing_moves(tmp_path: Path) -> None:
    graphs = Graphs()
    model = build("in place", graphs.backend)
    train(model, wrap(model, tmp_path, budget="100%", policy="auto"))
    assert tieroff.engine(model).stats().phase == "nothing moved"
    assert len(graphs.sizes) == 2
    tieroff.unwrap(model)


@pytest.mark.parametrize("where", ["the program", "a thread"])
def test_blocks_called_beside_the_step_run_the_plain_runs_graphs(where: str, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        values: list[Any] = train(model, optimizer)
        x = torch.ones(4, WIDTH)

        def evaluate() -> None:
            with torch.no_grad():
                values.append((model if where == "a thread" else model[1])(x))  # type: ignore[index]

        if where == "a thread":
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()
        else:
            evaluate()
        return values

    plain_graphs, graphs = Graphs(), Graphs()
    plain = build("in place", plain_graphs.backend)
    *expected, value = run(plain, torch.optim.AdamW(plain.parameters()))
    torch._dynamo.reset()
    model = build("in place", graphs.backend)
    *losses, got = run(model, wrap(model, tmp_path))
    assert losses == expected
    assert torch.equal(got, value)
    assert graphs.sizes == plain_graphs.sizes
    tieroff.unwrap(model)


def test_threads_that_evaluate_and_save_beside_compiled_steps(tmp_path: Path) -> None:
    model = build("in place", Graphs().backend)
    optimizer = wrap(model, tmp_path)
    errors: list[BaseException] = []
    is_over = threading.Event()

    def beside(act: Callable[[], Any]) -> None:
        try:
            while not is_over.is_set():
                with torch.no_grad():
                    act()
        except BaseException as error:
            errors.append(error)

    x = torch.ones(4, WIDTH)
    threads = [threading.Thread(target=beside, args=(act,)) for act in (lambda: model(x), model.state_dict)]
    train(model, optimizer)
    for thread in threads:
        thread.start()
    for _ in range(5):
        train(model, optimizer)
    is_over.set()
    for thread in threads:
        thread.join()
    assert errors == []
    tieroff.unwrap(model)


def test_compiled_method_that_reads_parameters_computes_the_same(tmp_path: Path) -> None:
    class ByMethod(Block):
        def __init__(self) -> None:
            super().__init__()
            self.compiled = torch.compile(super().forward, backend=Graphs().backend)

        def forward(self, x: Tensor) -> Tensor:
            return self.compiled(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), ByMethod(), nn.Linear(WIDTH, WIDTH))

    model, _ = check_equal(make, tmp_path, "cpu")
    tieroff.unwrap(model)


def test_error_of_a_fetch_for_compiled_code_is_raised_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = build("in place", Graphs().backend), build("none", None)
    optimizer = wrap(model, tmp_path)
    value_for, refused = ParameterReads.value_for, model[2].up.weight  # type: ignore[index]

    def refuse(reads: ParameterReads, home: Tensor) -> Tensor:
        if home is refused:
            raise StoreError("a drive failed")
        return value_for(reads, home)

    with monkeypatch.context() as patch:
        patch.setattr(ParameterReads, "value_for", refuse)
        with pytest.raises(StoreError, match="a drive failed"):
            model(torch.randn(16, WIDTH))
    assert train(model, optimizer) == train(plain, torch.optim.AdamW(plain.parameters()))
    tieroff.unwrap(model)


def test_parameter_assigned_in_compiled_code_is_kept(tmp_path: Path) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            out = x @ self.weight
            self.weight = self.weight
            return out

    def make() -> nn.Module:
        torch.manual_seed(0)
        compiled: Any = torch.compile(Counting(), backend=Graphs().backend)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), compiled)

    model, _ = check_equal(make, tmp_path, "cpu", budget="95%")
    tieroff.unwrap(model)


class Choosing(Block):
    """Torch's control flow, which runs branches of which no recorder sees the insides."""

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up.weight, self.down.weight
        return x + torch.cond(x.sum() > 0, lambda a, b, c: (a @ b.t()) @ c.t(), lambda a, b, c: (a @ c) @ b, (x, up, down))


class Dropping(Block):
    """A checkpoint whose random numbers compiled code saves and draws again."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda a: nn.functional.dropout(super(Dropping, self).forward(a), 0.3), x, use_reentrant=False)


class OneRegion(Block):
    """A region that is compiled once and called by all graphs."""

    forward = torch.compiler.nested_compile_region(Block.forward)


class Scanning(Block):
    """Code that runs as it is inside a compiled call, op by op, and saves tensors between them."""

    def forward(self, x: Tensor) -> Tensor:
        summed = associative_scan(torch.add, self.up(x), dim=0, combine_mode="generic")
        return x + self.down(torch.tanh(summed))


class Twice(nn.Module):
    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.first, self.second = kind(), kind()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


@pytest.mark.parametrize(
    ("kind", "backend"), [(Choosing, None), (Choosing, "aot_eager"), (Dropping, "aot_eager"), (OneRegion, "aot_eager")]
)
def test_higher_order_operators_run_in_recorded_steps(kind: type[Block], backend: str | None, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Twice(kind), Twice(kind), nn.Linear(WIDTH, WIDTH))
        for at in (1, 2) if backend else ():
            model[at].compile(backend=backend)
        return model

    model, _ = check_equal(make, tmp_path, "cpu", budget="100%", min_bytes=0)
    tieroff.unwrap(model)


def test_parameters_that_a_compiled_call_holds_are_in_the_plan(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Twice(Scanning) for _ in range(3)))
    for part in model:
        part.compile(backend="eager")
    train(model, wrap(model, tmp_path, budget="min", policy="auto", min_bytes=0), rows=2)
    engine = tieroff.engine(model)
    stats, planned_bytes = engine.stats(), engine.plan.peak_bytes[Tier.DEVICE]
    tieroff.unwrap(model)
    assert (stats.phase, stats.fallbacks) == ("planned", 0)
    assert stats.peak_device_bytes <= planned_bytes
