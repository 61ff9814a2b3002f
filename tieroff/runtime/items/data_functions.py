"""Which functions of a tensor need its data, and which everything but that."""

from __future__ import annotations

from typing import Any

import torch

_T = torch.Tensor
_ATTRIBUTES_READ = (
    "_backward_hooks",
    "_base",
    "_grad",
    "_grad_fn",
    "_post_accumulate_grad_hooks",
    "_version",
    "device",
    "dtype",
    "grad",
    "grad_dtype",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_meta",
    "is_mkldnn",
    "is_nested",
    "is_quantized",
    "is_sparse",
    "is_xpu",
    "itemsize",
    "layout",
    "names",
    "nbytes",
    "ndim",
    "output_nr",
    "requires_grad",
    "retains_grad",
    "shape",
)
_ATTRIBUTES_SET = ("_backward_hooks", "_grad", "_post_accumulate_grad_hooks", "grad", "grad_dtype", "requires_grad")
_METHODS = (
    "__hash__",
    "__len__",
    "_is_view",
    "_is_zerotensor",
    "dim",
    "element_size",
    "get_device",
    "is_complex",
    "is_conj",
    "is_contiguous",
    "is_floating_point",
    "is_inference",
    "is_neg",
    "is_shared",
    "nelement",
    "numel",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "size",
    "storage_offset",
    "stride",
)
_READ = frozenset(getattr(_T, name) for name in _ATTRIBUTES_READ if hasattr(_T, name))
_SET = frozenset(getattr(_T, name) for name in _ATTRIBUTES_SET if hasattr(_T, name))
# What asks of a tensor everything but its data.
_OF_NO_DATA = frozenset(
    [getattr(_T, name) for name in _METHODS if hasattr(_T, name)]
    + [_T.backward, torch.autograd.backward, torch.is_complex, torch.is_floating_point, torch.numel]
)


def _is_plain_attribute(func: Any) -> bool:
    """True for a read or write of an attribute that is no data."""
    name, owner = getattr(func, "__name__", ""), getattr(func, "__self__", None)
    return (name == "__get__" and owner in _READ) or (name == "__set__" and owner in _SET)


def asks_no_data(func: Any) -> bool:
    """True for a function that needs everything of a tensor but its data."""
    return func in _OF_NO_DATA or _is_plain_attribute(func)


def gives_data(func: Any) -> bool:
    """True for a read of `tensor.data`."""
    return getattr(func, "__name__", "") == "__get__" and getattr(func, "__self__", None) is _T.data


def assigns_data(func: Any) -> bool:
    """True for `tensor.data = value`."""
    return getattr(func, "__name__", "") == "__set__" and getattr(func, "__self__", None) is _T.data
