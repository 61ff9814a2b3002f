"""The stack of dispatch modes, in which the recorder is one of several."""

from __future__ import annotations

from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tieroff.tracing.recording import lengths


def put_on(mode: TorchDispatchMode) -> None:
    """Puts a mode on the stack."""
    _python_dispatch._push_mode(mode)
    lengths.give_lists(mode)


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
