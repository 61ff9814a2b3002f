"""Where in autograd the calling thread is."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as pop_mode
from torch.utils._python_dispatch import _push_mode as push_mode

from tieroff.errors import StateError
from tieroff.runtime.backend.compute import entry_of
from tieroff.runtime.items.offloaded import guarded, is_offloaded, leaves
from tieroff.runtime.signal_safety import function_state, set_function_state
from tieroff.runtime.tensors import outside_inference

GradientEdge = torch.autograd.graph.GradientEdge

# The id of the running graph task, or -1 outside a backward.
current_graph_task = torch._C._current_graph_task_id


def training_phase() -> str:
    """Returns the phase of training that runs now, as ops of a trace name it."""
    return "forward" if current_graph_task() == -1 else "backward"


NO_NODE = (-1, -1)


def node_here() -> tuple[int, int]:
    """Returns the running graph task and which of its nodes is evaluated, `NO_NODE` outside a backward; keeps no node alive."""
    task = current_graph_task()
    if task == -1:
        return NO_NODE
    node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()
    return task, node._sequence_nr() if node is not None else -1


def edges_of(tensors: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Returns where the gradients of tensors go to. Asking a leaf makes a node, which this thread does not count.

    [Note: numbers of nodes] Each thread numbers the nodes that it makes, and backward runs what has a higher number first.
    On an accelerator the nodes of `create_graph` are numbered by autograd's own thread and meet those of forward: so how many
    nodes the program's thread has made decides in which order gradients are summed, and with it their last bits. A node belongs
    to the stream that is the current one as it is made: that of the program, where backward's other nodes are.

    Raises:
        RuntimeError: torch's own, of a tensor that gets no gradient.
    """
    found: list[GradientEdge] = []
    errors: list[RuntimeError] = []
    device = tensors[0].device if tensors else torch.device("cpu")
    stream = torch.accelerator.current_stream(device) if device.type not in ("cpu", "meta") else None

    def ask() -> None:
        try:
            with _computing_on(stream), torch._C.DisableTorchFunctionSubclass():
                found.extend(map(torch.autograd.graph.get_gradient_edge, tensors))
        except RuntimeError as error:
            errors.append(error)

    if tensors:
        asking = threading.Thread(target=ask, name="tieroff-edges", daemon=True)
        asking.start()
        asking.join()
    if errors:
        raise errors[0]
    return found


def _computing_on(stream: torch.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Has the calling thread, which is new, compute on a stream of another one inside; see [Note: a thread's device]."""
    if stream is None:
        return contextlib.nullcontext()
    torch.accelerator.set_device_index(stream.device_index)
    return entry_of(stream)


def reader_may_write() -> bool:
    """True where what autograd saved goes to somebody who may write it: a Function of one's own, or code outside of backward.

    Torch's own derivatives only read. With a retained graph a later backward finds what was written, also by a kernel that
    no dispatch mode sees and of which no version tells.
    """
    kind = type(torch._C._current_autograd_node())
    may_write = _MAY_WRITE.get(kind)
    if may_write is None:
        is_torchs = kind.__module__ == "builtins" and _TORCHS_DERIVATIVE.search(kind.__name__) is not None
        may_write = _MAY_WRITE[kind] = not is_torchs
    return may_write


_TORCHS_DERIVATIVE = re.compile(r"Backward\d+$")
_MAY_WRITE: dict[type, bool] = {}


def functorch_is_active() -> bool:
    """True inside `torch.func` transforms, where nothing is hooked."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def takes_no_hooks() -> bool:
    """True where what autograd saves goes through no hooks: inside transforms, and where somebody has disabled them.

    Whoever runs an op of a transform below it, as one that records a step does, runs it outside of the transform.
    """
    return functorch_is_active() or not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def is_followed() -> bool:
    """True where a forward is run for its graph, which is to hold the parameters as they lie.

    That is under a `FakeTensorMode`, where nothing is computed (`torch.export`), and under `torch.jit.trace`.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None or torch._C._is_tracing()


def refuse_compiled_autograd() -> None:
    """Returns where backward is run by autograd itself.

    Raises:
        StateError: it would be compiled, and the engine's hooks with it.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.compiled_autograd_enabled:
        raise StateError(
            "a wrapped model cannot train under compiled autograd: what it saves for backward is moved by hooks, which no "
            "compiled backward may have; switch it off round this model (forwards may be compiled: see docs/what-works.md)"
        )


def refused_hooks(error: BaseException) -> StateError | None:
    """Returns what to raise where a forward failed because torch allows no hooks on saved tensors; None where it did not."""
    if not isinstance(error, RuntimeError):
        return None
    if "saved tensor hooks" in str(error):
        return StateError(
            "torch.func transforms inside the forward of a wrapped model do not work while its saved tensors are "
            "moved (torch: no saved tensor hooks under functorch); wrap the parts that do not use them"
        )
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return StateError(
            f'expected a forward in which tensors may be moved as autograd saves them, got one under "{error}": leave '
            "torch.autograd.graph.disable_saved_tensors_hooks out round a wrapped model"
        )
    return None


class _AsTheEngine:
    """What `as_the_engine` returns.

    Set, and set back: a context of Python that an interrupt leaves entered dies with its traceback, and changes modes then.
    """

    __slots__ = ("_makes_gradients", "_modes", "_others", "_overriding")

    def __enter__(self) -> None:
        self._makes_gradients, self._overriding = torch.is_grad_enabled(), function_state()
        self._modes: list[TorchDispatchMode] = []
        self._others = contextlib.ExitStack()
        try:
            self._set()
        except BaseException:
            self.__exit__()
            raise

    def _set(self) -> None:
        if functorch_is_active():
            self._others.enter_context(temporarily_clear_interpreter_stack())
        self._others.enter_context(outside_inference())
        if torch._ops._len_torch_dispatch_stack_pre_dispatch():
            self._others.enter_context(_disable_current_modes())
        torch._C._set_grad_enabled(False)
        while modes_here():
            self._modes.append(pop_mode())
        set_function_state(_NO_FUNCTIONS)

    def __exit__(self, *_: object) -> None:
        set_function_state(self._overriding)
        while self._modes:
            push_mode(self._modes.pop())
        torch._C._set_grad_enabled(self._makes_gradients)
        self._others.close()


def as_the_engine() -> contextlib.AbstractContextManager[None]:
    """Moves tensors in whatever mode the program is, and unseen by whoever records the step or changes functions."""
    return _AsTheEngine()


# How many dispatch modes there are: usually none, or a recorder.
modes_here = torch._C._len_torch_dispatch_stack
_NO_FUNCTIONS: Any = torch._C._TorchFunctionState.ALL_DISABLED  # type: ignore[attr-defined]


@contextlib.contextmanager
def unseen_by_the_program() -> Iterator[None]:
    """No dispatch mode of the program sees what runs: selective checkpointing counts ops, and recomputes as many as it saw.

    A recorder below them does. Those of torch's own that trace (fake tensors, for one) are left, since nothing is moved there.
    """
    above: list[TorchDispatchMode] = []
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if mode.is_infra_mode() or type(mode).__module__.startswith("tieroff."):
            break
        above.append(pop_mode())
    try:
        yield
    finally:
        for mode in reversed(above):
            push_mode(mode)


def by_edges(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Returns the arguments of `autograd.grad` with gradient edges for the tensors that lie below, if that says the same."""
    values = {**dict(zip(("outputs", "inputs"), args, strict=False)), **kwargs}
    inputs = values.get("inputs")
    listed = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs or ())
    outside = [values.get("outputs"), *args[2:], kwargs.get("grad_outputs")]
    below = [tensor for tensor in listed if is_offloaded(tensor)]
    needs_tensor = kwargs.get("materialize_grads") or any(not tensor.requires_grad for tensor in below)
    if needs_tensor or any(guarded(leaf) is not None for leaf in leaves(outside)):
        return args, kwargs, False
    found = iter(edges_of(below))
    edges = [next(found) if is_offloaded(t) else t for t in listed]
    if len(args) >= 2:
        return (args[0], edges, *args[2:]), kwargs, True
    return args, {**kwargs, "inputs": edges}, True
