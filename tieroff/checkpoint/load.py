"""Loads weights into a model, tensor by tensor, straight to the tiers that the tensors have."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from tieroff.api import engine_of
from tieroff.checkpoint.folder import Checkpoint, open_checkpoint
from tieroff.checkpoint.shard import StoredTensor, code_of, size_of
from tieroff.checkpoint.targets import Target, check_arguments, targets_of
from tieroff.errors import CheckpointError, StateError
from tieroff.runtime.engine import Engine

log = logging.getLogger("tieroff")

Progress = Callable[[int, int], None]
_SHOWN = 8


class LoadedWeights(NamedTuple):
    """What did not match, under the names that `torch.nn.Module.load_state_dict` uses too.

    Attributes:
        missing_keys: what the model has and the checkpoint has not; it keeps its values.
        unexpected_keys: what the checkpoint has and the model has not.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    model: torch.nn.Module, path: str | Path, *, strict: bool = True, convert: bool = False, on_progress: Progress | None = None
) -> LoadedWeights:
    """Loads a model's weights from safetensors files, with one tensor at a time in memory.

    A model larger than memory is built under `torch.device("meta")` and wrapped; its optimizer may be made before or
    after. Here its parameters get their values one by one, and each lies in its tier before the next is read. The
    parameter objects stay the same. A model that is not wrapped is filled in ordinary memory.

    All files are checked before any value changes. Buffers that are not persistent are in no checkpoint: where they lie on
    the meta device, they have to be set by hand before the first forward, which says so.

    Args:
        model: wrapped or not, on the meta device, elsewhere, or partly.
        path: a `.safetensors` file, an index (`….index.json`), or a folder with `model.safetensors` or
            `model.safetensors.index.json`.
        strict: refuse a checkpoint with missing or unexpected names. Of tied parameters one name is enough.
        convert: allow other types in the checkpoint; its values are rounded to the model's.
        on_progress: called with (bytes loaded, bytes in all) after each tensor.

    Returns:
        Missing and unexpected names; both are empty under `strict`.

    Raises:
        CheckpointError: files are missing, truncated or contradictory, or belong to another model. Nothing was changed.
        StoreError: a drive failed; tensors loaded until then have their new values.
        StateError: this is no module or no path, or a parameter on the meta device has hooks or weak references and cannot be
            filled.
    """
    check_arguments("load_weights", model, path)
    checkpoint = open_checkpoint(Path(path))
    targets = targets_of(model)
    chosen = _match(targets, checkpoint, convert)
    missing = [name for target in targets if target not in chosen for name in target.names]
    known = {name for target in targets for name in target.names}
    unexpected = [name for name in checkpoint.tensors if name not in known]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"load_weights: {path} does not match this {type(model).__name__}: missing {_shown(missing)}; unexpected "
            f"{_shown(unexpected)}; strict=False loads what matches",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
        )
    _check_tied(targets, checkpoint)
    engine = engine_of(model)
    if engine is not None:
        _check_optimizer(engine)
        engine.settle()
    with _recurrent_layers_apart(model):
        _check_fillable(chosen)
        _load(chosen, checkpoint, engine, on_progress)
    _warn_of_meta(model)
    return LoadedWeights(missing, unexpected)


def _match(targets: Iterable[Target], checkpoint: Checkpoint, convert: bool) -> dict[Target, StoredTensor]:
    """Returns what each target is loaded from; raises CheckpointError where shape or type differ."""
    chosen: dict[Target, StoredTensor] = {}
    wrong: list[str] = []
    for target in targets:
        for name in target.names:
            stored = checkpoint.tensors.get(name)
            if stored is None:
                continue
            chosen.setdefault(target, stored)
            code, shape = code_of(target.tensor.dtype), tuple(target.tensor.shape)
            if stored.shape != shape:
                wrong.append(f"{name} has shape {list(shape)}, the checkpoint {list(stored.shape)}")
            elif stored.code != code and not convert:
                wrong.append(f"{name} is {code}, the checkpoint's is {stored.code}")
    if wrong:
        raise CheckpointError(
            f"load_weights: {checkpoint.path} has other shapes or types than this model: {'; '.join(wrong[:_SHOWN])}"
            f"{f' and {len(wrong) - _SHOWN} more' if len(wrong) > _SHOWN else ''}. Build the model as it was saved, or, "
            "if only types differ, use convert=True or model.to(dtype)"
        )
    return chosen


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more if names else "nothing"


def _check_fillable(chosen: Iterable[Target]) -> None:
    for target in chosen:
        tensor = target.tensor
        if tensor.is_meta and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
            raise StateError(
                f"load_weights: {target.name} is on the meta device and has hooks, which would be lost; register them after "
                "tieroff.load_weights"
            )
        if tensor.is_meta and isinstance(tensor, torch.nn.Parameter) and weakref.getweakrefcount(tensor):
            raise StateError(
                f"load_weights: {target.name} is on the meta device and has weak references, which torch cannot keep when a "
                "tensor gets memory; load before anything refers to it"
            )
        if not target.owners and not isinstance(tensor, torch.nn.Parameter):
            raise StateError(
                f"load_weights: {target.name} is neither a parameter nor a buffer, a hook of the model adds it to the state "
                "dict; use load_state_dict"
            )


def _check_optimizer(engine: Engine) -> None:
    state = engine.optimizer.state.values() if engine.optimizer is not None else ()
    if any(isinstance(value, torch.Tensor) and value.is_meta for entries in state for value in entries.values()):
        raise StateError(
            "load_weights: the optimizer has state on the meta device, because it was loaded while the parameters were there; "
            "load the weights first, then make or load the optimizer's state again"
        )


def _check_tied(targets: Iterable[Target], checkpoint: Checkpoint) -> None:
    """Raises CheckpointError where a checkpoint has different values for one tensor with several names."""
    for target in targets:
        stored = [checkpoint.tensors[name] for name in target.names if name in checkpoint.tensors]
        for other in stored[1:]:
            if not torch.equal(_read(checkpoint, stored[0]), _read(checkpoint, other)):
                raise CheckpointError(
                    f"load_weights: this model ties {stored[0].name} and {other.name}, but {checkpoint.path} has different "
                    "values for them; untie them in the model, or remove one from the checkpoint"
                )


def _read(checkpoint: Checkpoint, stored: StoredTensor) -> torch.Tensor:
    with checkpoint.shards[stored.path].reading() as read:
        return read(stored.name)


def _load(
    chosen: dict[Target, StoredTensor], checkpoint: Checkpoint, engine: Engine | None, on_progress: Progress | None
) -> None:
    total_bytes, done_bytes = sum(size_of(target.tensor) for target in chosen), 0
    for path, shard in checkpoint.shards.items():
        here = [(target, stored) for target, stored in chosen.items() if stored.path == path]
        if not here:
            continue
        with shard.reading() as read:
            for target, stored in sorted(here, key=lambda pair: pair[1].position):
                size_bytes = size_of(target.tensor)
                _give(target, read, stored.name, engine)
                done_bytes += size_bytes
                if on_progress is not None:
                    on_progress(done_bytes, total_bytes)
        log.info("loaded %s", path)


@contextmanager
def _recurrent_layers_apart(model: torch.nn.Module) -> Iterator[None]:
    """Has recurrent layers drop their weak references to their weights meanwhile, as torch does when it swaps tensors."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
    for layer in layers:
        layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()


def _give(target: Target, read: Callable[[str], torch.Tensor], name: str, engine: Engine | None) -> None:
    """Gives one target its value; the tensor that was read dies with this call, or lies in its tier."""
    tensor = target.tensor
    if not tensor.is_meta:
        with torch.no_grad():
            tensor.copy_(read(name))
        if engine is not None:
            engine.trim(tensor)
    elif isinstance(tensor, torch.nn.Parameter):
        _fill_in(tensor, read(name))
        if engine is not None:
            engine.take_filled(tensor)
    else:
        device = engine.device if engine is not None else torch.device("cpu")
        value = _like(tensor, read(name)).to(device).requires_grad_(tensor.requires_grad)
        for module, attribute in target.owners:
            module._buffers[attribute] = value


def _fill_in(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Gives a parameter on the meta device memory; optimizers and modules hold the same object as before."""
    filled = torch.Tensor._make_subclass(type(parameter), _like(parameter, value), parameter.requires_grad)
    filled.__dict__.update(parameter.__dict__)
    try:
        torch.utils.swap_tensors(parameter, filled)
    except RuntimeError as error:
        message = f"a parameter on the meta device cannot be filled: {error}; load before anything refers to it"
        raise StateError(message) from error


def _like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns the value in the type and the order of dimensions that a tensor on the meta device stands for."""
    if value.dtype is tensor.dtype and value.stride() == tensor.stride():
        return value
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).copy_(value)


def _warn_of_meta(model: torch.nn.Module) -> None:
    on_meta = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if on_meta:
        log.warning("still on the meta device, since the checkpoint does not hold them: %s", _shown(on_meta))
