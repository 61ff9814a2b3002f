"""Whether an optimizer's update is elementwise, and the same bit for bit when it is made in slices.

[Note: elementwise]
Three things are asked of copies of a part of the parameter, which are stepped a dozen times with gradients of all sizes. That
every op of the step is pointwise, or makes or copies tensors: then no element reaches another one, whatever the values are. A
norm, a mean, a product of matrices, a random number, an index: all are refused, whoever wrote the optimizer. That the step does
not ask how large a tensor is: one that does something else from so many rows on would do it neither in a trial nor in a slice.
And that slices leave the bits that the whole leaves.

The last is about kernels of the CPU that round the last elements of a vector otherwise than those before, as torch's fused
SGD does in two elements of a thousand. Threads share a tensor out in parts that end anywhere, so such a kernel's results depend
on their number, and slices cannot have the same. Only the kernels of `_CUT_AT_LINES` have each thread begin at a cache line,
where slices do, too. So slices of an odd number of elements are tried first, in which nearly as many elements are last ones as
are not; where they differ and all is done by those kernels, such as begin at cache lines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tieroff.errors import StateError
from tieroff.runtime.optimizer.buckets import Narrowed
from tieroff.runtime.optimizer.shared import SharedValues
from tieroff.runtime.optimizer.slices.rows import RowsOfState, step_in_slices
from tieroff.runtime.optimizer.trial import FACTORS, Copied, NotTriableError, copied, is_same, random_numbers_put_back

_SAMPLE_SLICES = 256
_ODD, _EVEN = 31, 64  # elements of a slice of the trial
_CUT_AT_LINES = frozenset(("aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_adagrad_"))
# Besides pointwise ones: what makes a tensor of another's shape, and copies.
_PLAIN_OPS = frozenset(
    f"aten::{name}"
    for name in (
        *("copy_", "_to_copy", "clone", "detach", "alias", "lift_fresh", "zero_", "fill_"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_empty", "zeros", "empty"),
    )
)
_ASK_FOR_SIZE = frozenset(
    (
        torch.numel,
        *(getattr(torch.Tensor, name) for name in ("size", "numel", "nelement", "__len__", "untyped_storage")),
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "nbytes")),
    )
)
_REDUCE_LISTS = frozenset(("_foreach_norm", "_foreach_max", "_foreach_powsum"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial showed.

    Attributes:
        why_not: an update cannot be made in slices; "": it can.
        state_bytes: of the state of one element.
        own_bytes: that an update of one element takes for itself.
    """

    why_not: str
    state_bytes: int = 0
    own_bytes: int = 0


class _WatchOps(TorchDispatchMode):
    """Looks whether ops on tensors of several elements are elementwise.

    Attributes:
        why: the update is not; "" as far as is known.
        names: of all such ops.
        peak_bytes: the most that tensors of several elements took which ops have made, state that was made included.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why, self.names, self.peak_bytes = "", set[str](), 0
        self._made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs))
        has_elements = any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in given)
        if has_elements:
            self.names.add(func._schema.name)
        if has_elements and not self.why and not _is_elementwise(func):
            self.why = f"its step calls {func}"
        out = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage()._cdata for leaf in given if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and leaf.untyped_storage()._cdata not in known:
                self._made.append((StorageWeakRef(leaf.untyped_storage()), leaf.numel() * leaf.element_size()))
        self._made = [(storage, size_bytes) for storage, size_bytes in self._made if not storage.expired()]
        self.peak_bytes = max(self.peak_bytes, sum(size_bytes for _, size_bytes in self._made))
        return out


class _WatchSizes(TorchFunctionMode):
    """Looks whether a step asks for the size of a tensor of several elements."""

    def __init__(self, watch: _WatchOps) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASK_FOR_SIZE and not self._watch.why and args[0].numel() > 1:
            self._watch.why = "its step asks how large a tensor is"
        return func(*args, **(kwargs or {}))


def _is_elementwise(func: Any) -> bool:
    name = func._schema.name
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    plain = name.rpartition("::")[2]
    if plain.startswith("_foreach_"):
        return plain not in _REDUCE_LISTS
    return plain.startswith("_fused_") or torch.Tag.pointwise in func.tags or name in _PLAIN_OPS


@dataclass(frozen=True, slots=True)
class Trial:
    """What is tried: the update of one parameter.

    Attributes:
        optimizer: the user's, which is not changed.
        parameter: has a gradient.
        rows_of: returns a tensor's first rows on the device.
        step: of the optimizer, without hooks; called with a copy first.
        args: of it.
        kwargs: of it.
    """

    optimizer: torch.optim.Optimizer
    parameter: torch.Tensor
    rows_of: Callable[[torch.Tensor, int], torch.Tensor]
    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def verdict(self) -> Verdict:
        """Makes the trial; see [Note: elementwise]."""
        with _disable_current_modes(), random_numbers_put_back(), torch.no_grad():
            try:
                return self._verdict()
            except (NotTriableError, StateError) as error:
                return Verdict(str(error))
            except Exception as error:  # noqa: BLE001  any failure of foreign code on copies means: do not slice it
                return Verdict(f"a trial on copies failed: {type(error).__name__}: {error}")

    def _verdict(self) -> Verdict:
        watch = _WatchOps()
        why = self._differs(watch, _ODD if self.parameter.device.type == "cpu" else _EVEN)
        if why and not watch.why and watch.names <= _CUT_AT_LINES | _PLAIN_OPS:
            why = self._differs(watch, _EVEN)
        if watch.why or why:
            return Verdict(watch.why or why)
        stepped = self._stepped_copy(_WatchOps(), _EVEN)  # its state exists from here on
        part, own = stepped.params[0], _WatchOps()
        with own:
            self.step(stepped.optimizer, *self.args, **self.kwargs)
        values = stepped.optimizer.state.get(part, {}).values()
        state_bytes = sum(value.element_size() for value in values if getattr(value, "shape", None) == part.shape)
        return Verdict("", state_bytes, -(-own.peak_bytes // part.numel()))

    def _copy(self, columns: int) -> Copied:
        """Returns the optimizer on rows of the parameter, each of so many elements where it has several dimensions."""
        parameter, is_flat = self.parameter, self.parameter.dim() == 1
        rows = min(parameter.shape[0], _SAMPLE_SLICES * (columns if is_flat else 1))

        def sample(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape != parameter.shape:
                return tensor
            found = self.rows_of(tensor, rows)
            return found if is_flat else found.flatten(1)[:, :columns].reshape(rows, -1, *(1,) * (parameter.dim() - 2))

        made = copied(self.optimizer, {id(parameter): parameter}, sample)
        seeded = torch.Generator(made.grads[0].device).manual_seed(0)
        made.grads[0].normal_(0.0, 1e-2, generator=seeded)  # those of rows that nothing has used are zero
        return made

    def _stepped_copy(self, watch: _WatchOps, columns: int) -> Copied:
        whole = self._copy(columns)
        for factor in FACTORS:
            whole.set_gradients(factor)
            with watch, _WatchSizes(watch):
                self.step(whole.optimizer, *self.args, **self.kwargs)
            if watch.why:
                break
        return whole

    def _differs(self, watch: _WatchOps, columns: int) -> str:
        """Returns what differs when slices of so many elements are updated, or "" where nothing does."""
        whole = self._stepped_copy(watch, columns)
        if watch.why:
            return ""
        split = self._copy(columns)
        part, narrowed = split.params[0], Narrowed(split.optimizer)
        length = columns if part.dim() == 1 else 1
        slices = [range(start, min(start + length, len(part))) for start in range(0, len(part), length)]
        for factor in FACTORS:
            split.set_gradients(factor)
            shared, state = SharedValues(split.optimizer), RowsOfState(split.optimizer, part)

            def step_once(shared: SharedValues = shared) -> None:
                self.step(split.optimizer, *self.args, **self.kwargs)
                shared.take_back()

            step_in_slices(split.optimizer, part, slices, step_once, state, narrowed)
            shared.finish()
        expected, got = whole.outcome(), split.outcome()
        different = [name for name in got if not is_same(expected[name], got[name])]
        return f"{different[0]} differ when it is updated in slices" if different else ""
