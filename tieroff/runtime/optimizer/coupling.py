"""Whether an update lets values of one parameter reach another one: every op is watched, whatever the values are.

[Note: what couples]
A comparison of results shows nothing of a branch that was not taken: gradients are clipped by their common norm only when
that is large. But the norm is computed each time. So each tensor carries a label, the set of parameters whose value,
gradient or state it was computed from, and a tensor with two of them shows coupling. What Python reads (`item`, `if tensor`,
`tolist`, NumPy) leaves the tensors, and may come back anywhere: it counts as coupling too. What no parameter's values went
into has no label, wherever it is kept: a counter of updates may be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tieroff.runtime.movable import is_wrapper, plain_parts

Label = frozenset[int]
_NOTHING: Label = frozenset()

# Ways out of a tensor that no dispatch mode sees. Those that a tensor's metadata needs are not among them.
_READS = frozenset({"tolist", "numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_"})

# Ops that return a plain value, of what kind of tensors these are and not of what they hold; `p.data = t` asks for the first.
_OF_METADATA = frozenset({"_has_compatible_shallow_copy_type", "_has_same_storage_numel", "is_same_size"})


class Watch(TorchDispatchMode):
    """Follows from op to op which parameters a tensor depends on.

    Attributes:
        why: what couples parameters, "" as long as nothing does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels: dict[int, tuple[StorageWeakRef, Label]] = {}
        self.why = ""

    def mark(self, tensors: Iterable[Any], owner: int) -> None:
        """These tensors are of one parameter."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                self._set(tensor, frozenset((owner,)))

    def label_of(self, tensor: Any) -> Label:
        """Returns the parameters that a tensor depends on."""
        if is_wrapper(tensor):  # its own ops run inside of it, unseen
            return _NOTHING.union(*map(self.label_of, plain_parts(tensor)))
        key = _key_of(tensor)
        known = self._labels.get(key) if key else None
        return known[1] if known is not None and not known[0].expired() else _NOTHING

    def note_read(self, tensor: Any, how: str) -> None:
        """Python reads values of this tensor."""
        if self.label_of(tensor):
            self._found(f"its step reads values of tensors in Python ({how})")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        with torch._C.DisableTorchFunction():  # looks at storages below are no reads of the optimizer's
            if name.startswith(("_foreach_", "_fused_")):
                self._elementwise(func, args, kwargs or {}, out)
            elif name not in _OF_METADATA:
                self._together(func, tree_leaves((args, kwargs)), _written(func, args, kwargs or {}), out)
        return out

    def _together(self, func: Any, inputs: list[Any], written: list[Any], out: Any) -> None:
        label = frozenset[int]().union(*(self.label_of(leaf) for leaf in inputs))
        if not label:
            return
        outputs = tree_leaves(out)
        if (
            any(leaf is not None and not isinstance(leaf, torch.Tensor) for leaf in outputs)
            or torch.Tag.dynamic_output_shape in func.tags
        ):
            self._found(f"its step reads values of tensors in Python ({func})")
        for leaf in (*outputs, *written):
            self._set(leaf, label)
        if len(label) > 1:
            self._found(f"{func} computes with several of them")

    def _elementwise(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """An op on lists takes the tensors at each place together, and single tensors with all of them."""
        values = [*args, *kwargs.values()]
        lists = [value for value in values if isinstance(value, (list, tuple)) and _has_tensors(value)]
        count = max((len(value) for value in lists), default=0)
        common = [value for value in values if isinstance(value, torch.Tensor)]
        common += [leaf for value in lists if len(value) != count for leaf in value]
        outs = [out] if isinstance(out, (list, tuple)) and len(out) == count else []
        changed = set(map(id, _written(func, args, kwargs)))  # a tensor that all places read stays what it was
        for place in range(count):
            inputs = [value[place] for value in lists if len(value) == count] + common
            self._together(func, inputs, [leaf for leaf in inputs if id(leaf) in changed], [o[place] for o in outs])

    def _set(self, tensor: Any, label: Label) -> None:
        if is_wrapper(tensor):
            for part in plain_parts(tensor):
                self._set(part, label)
            return
        key = _key_of(tensor)
        if key:
            self._labels[key] = (StorageWeakRef(tensor.untyped_storage()), label)

    def _found(self, why: str) -> None:
        self.why = self.why or why


class WatchReads(TorchFunctionMode):
    """Tells a `Watch` of reads that are no ops."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS and args:
            self._watch.note_read(args[0], name)
        return func(*args, **(kwargs or {}))


def _has_tensors(values: Iterable[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) for value in values)


def _key_of(tensor: Any) -> int:
    """Returns what identifies a tensor's storage while it lives, or 0 for one without."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0  # a wrapper without a storage of its own


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    names = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    places = [i for i, a in enumerate(func._schema.arguments) if a.name in names]
    given = [args[i] for i in places if i < len(args)] + [kwargs[name] for name in names if name in kwargs]
    return tree_leaves(given)
