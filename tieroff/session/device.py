"""Where a wrapped model computes."""

from __future__ import annotations

import torch

from tieroff.errors import ConfigError


def device_for(wanted: str, model: torch.nn.Module) -> torch.device:
    """Returns the device that a config's `device` means for a model.

    Args:
        wanted: "auto" (where the model's parameters are; the machine's accelerator for a model on the meta device), or a device
            of PyTorch, with or without an index.
        model: the root module.

    Raises:
        ConfigError: it is no device of this machine, its index is not there, or the model lies on several accelerators.
    """
    if wanted == "auto":
        return _device_of(model)
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f'device = "{wanted}" is no device of PyTorch: {error}; use "auto" or "cpu"') from error
    if device.type == "cpu":
        _check_on_host(model)
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        there = accelerator.type if accelerator is not None else "no accelerator"
        raise ConfigError(f'device = "{wanted}", but torch sees {there} here; use "cpu" or "auto"')
    return _indexed(device)


def _check_on_host(model: torch.nn.Module) -> None:
    elsewhere = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type not in ("cpu", "meta")}
    if elsewhere:
        raise ConfigError(f'device = "cpu", but the model lies on {elsewhere.pop()}; use "auto", or move it to the CPU first')


def _device_of(model: torch.nn.Module) -> torch.device:
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    kinds = {device for device in found if device.type not in ("cpu", "meta")}
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        raise ConfigError(f"expected a model on one accelerator, this one lies on {names}; wrap the parts, or move it to one")
    if kinds:
        return _indexed(kinds.pop())
    is_on_meta = bool(found) and all(device.type == "meta" for device in found)
    accelerator = torch.accelerator.current_accelerator(check_available=True) if is_on_meta else None
    return _indexed(accelerator) if accelerator is not None else torch.device("cpu")


def _indexed(device: torch.device) -> torch.device:
    """Returns the device with its index.

    Raises:
        ConfigError: PyTorch's accelerator is another kind, or it has fewer devices.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        raise ConfigError(f"expected the model on the CPU or on an accelerator that torch.accelerator knows, got {device}")
    count = torch.accelerator.device_count()
    given: int | None = device.index  # its stub says int
    index = torch.accelerator.current_device_index() if given is None else given
    if not 0 <= index < count:
        raise ConfigError(f"expected a device from {device.type}:0 to {device.type}:{count - 1}, got {device}")
    return torch.device(device.type, index)
