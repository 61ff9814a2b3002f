"""The stack of dispatch modes, in which the recorder is one of several.

[Note: a step that begins in backward]
A hook may run the model, as GradCache does: the step's first forward is in a backward then, and its update is not. Autograd
runs each node with the modes that there were as that backward began, so what a node puts on is off again behind it, on
the CPU as on the thread of an accelerator. Such a recorder is put back at the step's next event: of a later node, or of the
update.
"""

from __future__ import annotations

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tieroff.tracing.recording import lengths


def put_on(mode: TorchDispatchMode) -> None:
    """Puts a mode on the stack."""
    _python_dispatch._push_mode(mode)
    lengths.give_lists(mode)


def stay_on(mode: TorchDispatchMode) -> None:
    """Puts a mode back that autograd has taken off."""
    if mode not in _python_dispatch._get_current_dispatch_mode_stack():
        put_on(mode)


def take_off(mode: TorchDispatchMode) -> None:
    """Takes a mode off the stack, wherever in it others have put it meanwhile."""
    lengths.leave_tensors(mode)
    if mode not in _python_dispatch._get_current_dispatch_mode_stack():
        return
    above = []
    while (top := _python_dispatch._pop_mode()) is not mode:
        above.append(top)
    for one in reversed(above):
        _python_dispatch._push_mode(one)
