"""What an engine has to know of device memory, asked of the CUDA driver itself: storage does not import torch."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tieroff.errors import ConfigError, StoreError

_SUCCESS, _NOT_INITIALIZED = 0, 3
_MEMORY_TYPE, _DEVICE_ORDINAL = 2, 9  # CU_POINTER_ATTRIBUTE_*
_DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class CudaMemory:
    """Tells device addresses from host addresses, and copies device memory to the host."""

    def __init__(self) -> None:
        """Loads the driver's library; starts nothing on any device.

        Raises:
            ConfigError: there is none.
        """
        try:
            driver = ctypes.CDLL("libcuda.so.1")
            self._attributes = driver.cuPointerGetAttributes
            self._device = driver.cuDeviceGet
            self._retain = driver.cuDevicePrimaryCtxRetain
            self._release = driver.cuDevicePrimaryCtxRelease_v2
            self._push = driver.cuCtxPushCurrent_v2
            self._pop = driver.cuCtxPopCurrent_v2
            self._copy = driver.cuMemcpyDtoH_v2
        except (OSError, AttributeError) as error:
            raise ConfigError(
                f'[nvme] engine = "gds" needs the NVIDIA driver (libcuda.so.1): {error}; install the driver, or set '
                'engine = "auto"'
            ) from error

    def holds(self, address: int) -> bool:
        """Returns whether an address lies in device memory; False while this process has not used CUDA.

        Raises:
            StoreError: the driver does not say (EIO), such as after a kernel has failed.
        """
        return self._attribute(address, _MEMORY_TYPE) == _DEVICE

    def copy_to_host(self, target_address: int, source_address: int, size_bytes: int) -> None:
        """Copies device memory to the host, and waits.

        Raises:
            StoreError: the copy failed (EIO).
        """
        with self._context(self._attribute(source_address, _DEVICE_ORDINAL)):
            _check(
                self._copy(ctypes.c_void_p(target_address), ctypes.c_uint64(source_address), ctypes.c_size_t(size_bytes)),
                f"to copy {size_bytes} bytes from the device",
            )

    def _attribute(self, address: int, attribute: int) -> int:
        value = ctypes.c_int(0)  # stays 0 where the driver knows nothing of the address: plain host memory
        code = self._attributes(
            ctypes.c_uint(1),
            (ctypes.c_int * 1)(attribute),
            (ctypes.c_void_p * 1)(ctypes.addressof(value)),
            ctypes.c_uint64(address),
        )
        if code != _NOT_INITIALIZED:
            _check(code, f"ask which memory is at {address:#x}")
        return value.value

    @contextmanager
    def _context(self, ordinal: int) -> Iterator[None]:
        """Makes the device's primary context, which torch uses too, the current one of this thread within the block."""
        device, context = ctypes.c_int(0), ctypes.c_void_p()
        _check(self._device(ctypes.byref(device), ctypes.c_int(ordinal)), f"device {ordinal}")
        _check(self._retain(ctypes.byref(context), device), f"the context of device {ordinal}")
        try:
            _check(self._push(context), f"to enter the context of device {ordinal}")
            try:
                yield
            finally:
                self._pop(ctypes.byref(ctypes.c_void_p()))
        finally:
            self._release(device)


def _check(code: int, wanted: str) -> None:
    if code != _SUCCESS:
        raise StoreError(f"cannot {wanted}: CUDA driver error {code}", errno=errno.EIO)
