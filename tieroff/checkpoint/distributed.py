"""For `torch.distributed.checkpoint`: what a checkpoint reads and writes below leaves memory tensor by tensor.

    dcp.save(state, checkpoint_id=folder, planner=SavePlanner(model))
    dcp.load(state, storage_reader=StreamingReader(folder), planner=LoadPlanner(model))

Without them everything is right, too. Then a thread returns the pages that a checkpoint has touched, which may be late where
the cores are busy, and torch's reader holds two tensors at a time. Values, files and metadata are those of torch's own classes.
A planner is for one call: it holds what it saved or loaded, and what somebody holds does not move.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem
from torch.distributed.checkpoint.planner import LoadPlanner as TorchLoadPlanner
from torch.futures import Future

from tieroff.api import engine_of

_PIECE_BYTES = 1 << 20


class SavePlanner(DefaultSavePlanner):
    """Saves one tensor of a wrapped model after the other: when the next is read, the pages of the last are returned.

    So the resident set grows by the largest tensor of this rank, whatever the cores are busy with.

    Args:
        model: wrapped or not; its tensors and those of its optimizer may be saved.
        options: of `DefaultSavePlanner`.
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self._give_back = giving_back(model)
        self._last: torch.Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns what an item is; called when the item before it was written."""
        if self._last is not None:
            self._give_back(self._last)
        found = super().resolve_data(write_item)
        self._last = found if isinstance(found, torch.Tensor) else None
        return found


class LoadPlanner(DefaultLoadPlanner):
    """Loads tensors of a wrapped model in pieces of 1 MiB, whose pages are returned at once.

    So the resident set grows by what the reader has read from the checkpoint, and by one piece.

    Args:
        model: wrapped or not; its tensors and those of its optimizer may be loaded.
        options: of `DefaultLoadPlanner`.
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        super().__init__(**options)
        self._give_back = giving_back(model)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Returns where an item's values go."""
        target: _InPieces = super().resolve_tensor(read_item).as_subclass(_InPieces)
        target.give_back = self._give_back
        return target


class StreamingReader(FileSystemReader):
    """Reads a checkpoint from a folder one tensor at a time; torch's holds the last one while it reads the next."""

    def read_data(self, plan: LoadPlan, planner: TorchLoadPlanner) -> Future[None]:
        """Reads a plan's items, each of which is over before the next begins."""
        done: Future[None] = Future()
        for item in plan.items:
            super().read_data(replace(plan, items=[item]), planner).wait()
        done.set_result(None)
        return done


def giving_back(model: torch.nn.Module) -> Callable[[torch.Tensor], None]:
    """Returns what has the pages returned that a tensor takes of the tiers below a model; its value stays."""
    engine = engine_of(model)

    def give_back(tensor: torch.Tensor) -> None:
        if engine is None or engine.is_closed or tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        for store in engine.stores.values():
            store.give_back(storage.data_ptr(), storage.nbytes())

    return give_back


class _InPieces(torch.Tensor):
    """A tensor that takes what is copied into it piece by piece; nothing else of it is special.

    Attributes:
        give_back: called with the tensor after each piece.
    """

    give_back: Callable[[torch.Tensor], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is not torch.Tensor.copy_:
                found = func(*args, **kwargs or {})
                if func is torch.Tensor.detach:
                    found = found.as_subclass(cls)
                    found.give_back = args[0].give_back
                return found
            target, source, *_ = args
            for part, given in zip(_pieces(target), _pieces(source), strict=True):
                part.copy_(given)
                target.give_back(target)
            return target


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns a tensor's rows, as many at a time as take 1 MiB."""
    if not tensor.numel() or not tensor.dim():
        return (tensor,)
    row_bytes = tensor.numel() // len(tensor) * tensor.element_size()
    parts: tuple[torch.Tensor, ...] = tensor.split(max(_PIECE_BYTES // max(row_bytes, 1), 1))
    return parts
