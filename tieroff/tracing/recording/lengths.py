"""`ctc_loss` of a step that is recorded, given what it is given in any other.

[Note: lengths on the host] Torch makes lists of the lengths that `ctc_loss` gets as tensors, wherever they lie, but not under a
dispatch mode: there an accelerator refuses lengths that lie on the host, as those of most programs do, and autograd saves
those that it takes, which it does in no other step. So while a step is recorded they are made here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ctc_loss: Any = torch.ctc_loss
_recorders = set[TorchDispatchMode]()


def give_lists(recorder: TorchDispatchMode) -> None:
    """A recorder begins."""
    _recorders.add(recorder)
    torch.ctc_loss = _by_lists


def leave_tensors(recorder: TorchDispatchMode) -> None:
    """A recorder ends (one of fake tensors made no lists); after the last the function is torch's own again."""
    _recorders.discard(recorder)
    if not _recorders and torch.ctc_loss is _by_lists:
        torch.ctc_loss = _ctc_loss


def _by_lists(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any) -> Any:
    lengths = (input_lengths, target_lengths)
    if not torch.compiler.is_dynamo_compiling() and all(isinstance(one, torch.Tensor) for one in lengths):
        blank = args[0] if args else kwargs.get("blank", 0)
        # cuDNN gets lengths as they are, with a mode or without.
        if log_probs.device.type != "cuda" or not torch._use_cudnn_ctc_loss(log_probs, targets, *lengths, blank):
            lengths = (input_lengths.tolist(), target_lengths.tolist())
    return _ctc_loss(log_probs, targets, *lengths, *args, **kwargs)
