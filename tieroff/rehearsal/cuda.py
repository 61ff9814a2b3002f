"""`torch.cuda` in a rehearsal: what scripts call there, answered by the rehearsed device.

PyTorch's builds without CUDA have this module, and most of it raises. Only the process that rehearses is changed.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch

from tieroff.core.machine import Machine
from tieroff.rehearsal.build import Native

_CAPABILITY = (9, 0)
_WARP_SIZE = 32


def serve(native: Native, machine: Machine) -> None:
    """Has `torch.cuda` speak of the rehearsed device from now on."""
    cuda: Any = torch.cuda
    generator = native.default_generator()
    properties = types.SimpleNamespace(
        name=machine.name or "rehearsed device",
        total_memory=machine.device_bytes,
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        multi_processor_count=machine.compute_units,
        warp_size=_WARP_SIZE,
        is_integrated=False,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: machine.bf16_flops_per_s > 0,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "_initialized": True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _check_device,
        "device": _Device,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: _CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": list,
        "default_generators": (generator,),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "seed": generator.seed,
        "seed_all": generator.seed,
        "initial_seed": generator.initial_seed,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "get_rng_state_all": lambda: [generator.get_state()],
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "set_rng_state_all": lambda states: generator.set_state(states[0]),
        "ipc_collect": lambda: None,
        **_streams(),
        **_memory(),
    }
    for name, answer in answers.items():
        setattr(cuda, name, answer)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, lambda *_args, **_options: 0)
    cuda.nvtx.range = lambda *_args, **_options: contextlib.nullcontext()
    # Libraries read it as they are imported where there is CUDA: bitsandbytes, which peft imports.
    torch._C._cuda_getCurrentRawStream = lambda device: 0


def _streams() -> dict[str, Any]:
    accelerator = torch.accelerator
    return {
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "set_stream": accelerator.set_stream,
        "current_stream": lambda device=None: accelerator.current_stream("cuda"),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=0, device_type=1),
        "synchronize": lambda device=None: accelerator.synchronize("cuda"),
    }


def _memory() -> dict[str, Any]:
    accelerator = torch.accelerator
    return {
        "empty_cache": accelerator.empty_cache,
        "memory_allocated": lambda device=None: accelerator.memory_allocated("cuda"),
        "max_memory_allocated": lambda device=None: accelerator.max_memory_allocated("cuda"),
        "memory_reserved": lambda device=None: accelerator.memory_reserved("cuda"),
        "max_memory_reserved": lambda device=None: accelerator.max_memory_reserved("cuda"),
        "memory_stats": lambda device=None: accelerator.memory_stats("cuda"),
        "reset_peak_memory_stats": lambda device=None: accelerator.reset_peak_memory_stats("cuda"),
        "reset_max_memory_allocated": lambda device=None: accelerator.reset_peak_memory_stats("cuda"),
        "mem_get_info": lambda device=None: accelerator.get_memory_info("cuda"),
        "memory_summary": lambda device=None, abbreviated=False: "rehearsed: no summary of memory",
    }


def _check_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, -1, 0):
        raise RuntimeError(f"CUDA error: invalid device ordinal: a rehearsal has one device, got {device}")


class _Device:
    """`with torch.cuda.device(...)`: there is one device, which is the current one."""

    def __init__(self, device: Any) -> None:
        _check_device(device)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass
