"""A walk over a model: what its modules hold, found once; each step looks whether it still is so.

A look is made of functions of the interpreter's own, without a line of Python per module or parameter: some 40 us for 150
parameters, where a walk takes a millisecond.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from operator import attrgetter, is_not, itemgetter, methodcaller
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tieroff.runtime.hooks.forward.compiled import is_compiled
from tieroff.runtime.hooks.forward.inputs import modules_in, storages_in
from tieroff.runtime.items.offloaded import own_class, untouched

_DICTS = ("_modules", "_parameters")
_CHILDREN, _PARAMETERS = map(itemgetter, _DICTS)
_VALUES = methodcaller("values")
_COMPILED_CALL = attrgetter("_compiled_call_impl")
_IS_TRAINED, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")
_IS_PRESENT = partial(is_not, None)


class Walk:
    """What a model holds.

    Attributes:
        used: parameters; one that several modules have comes several times.
        plain: parameters whose storage may be asked for.
        trained: which parameters get a gradient: a byte each.
        has_substitutes: other tensors stand in for parameters, for one call only (torch.func.functional_call).
        is_readable: all modules are Python's own, and not scripted.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = modules_in(model)
        self.is_readable = all(isinstance(module.__dict__.get(name), dict) for module in modules for name in _DICTS)
        self.used: list[torch.Tensor] = [p for module in modules for p in module._parameters.values() if p is not None]
        parameters = {id(p): p for p in self.used}.values()
        with untouched():
            self.plain = [p for p in parameters if p.layout is torch.strided and own_class(p) in _PLAIN]
            self.trained = bytes([p.requires_grad for p in parameters])
        self.has_substitutes = not all(type(p) is torch.nn.Parameter or isinstance(p, torch.nn.Parameter) for p in self.used)
        self._has_optimized = any(type(module).__name__ == "OptimizedModule" for module in modules) or any(
            is_compiled(getattr(kind, "forward", None)) for kind in {type(module) for module in modules}
        )
        self._modules = modules  # held: what is freed gives its identity to the next one
        self._dicts = [module.__dict__ for module in modules]
        self._seen = self._look() if self.is_readable else None

    @property
    def is_same(self) -> bool:
        """True when nobody added, replaced, removed, froze or converted anything since."""
        return self._seen is not None and self._look() == self._seen

    @property
    def has_compiled(self) -> bool:
        """True where calls of a module are compiled."""
        if self._has_optimized or any(call is not None for call in map(_COMPILED_CALL, self._modules)):
            return True
        return any(is_compiled(own["forward"]) for own in self._dicts if "forward" in own)

    def buffers(self) -> list[torch.Tensor]:
        """Returns the buffers that the modules have now: a forward may give them others."""
        return [buffer for module in self._modules for buffer in module._buffers.values() if buffer is not None]

    def fixed(self, inputs: Any) -> dict[int, StorageWeakRef]:
        """Returns the storages, by identity, of a call's inputs, and on which buffers and plain parameters lie now.

        While the references are kept nobody else gets these identities: inputs may die within the step, and an activation that
        got the identity of one would be taken for it.
        """
        with untouched():
            storages = [p.untyped_storage() for p in self.plain]
        storages += storages_in((inputs, self.buffers()))
        return {storage._cdata: StorageWeakRef(storage) for storage in storages}

    def _look(self) -> tuple[list[Any], ...]:
        with untouched():
            children = chain.from_iterable(map(_VALUES, map(_CHILDREN, self._dicts)))
            parameters = [*chain.from_iterable(map(_VALUES, map(_PARAMETERS, self._dicts)))]
            present = [*filter(_IS_PRESENT, parameters)]
            return [*map(id, children)], [*map(id, parameters)], [*map(_IS_TRAINED, present)], [*map(_DTYPE, present)]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
