"""Checks that all programs of a kernel can run at the same time. Programs that wait for each other have to."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_NVIDIA = "libcuda.so.1", "cuOccupancyMaxActiveBlocksPerMultiprocessor"


_AMD = "libamdhip64.so", "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"


class NotResident(RuntimeError):
    """Raised if the programs of a kernel cannot all run at the same time, or if the driver cannot tell."""


def require_coresident(kernel: Any, programs: int, device: int) -> None:
    """Raise NotResident unless all `programs` programs of a loaded kernel can run on the device at the same time."""
    library, name = _NVIDIA if torch.version.hip is None else _AMD
    metadata, each, driver = kernel.metadata, ctypes.c_int(0), ctypes.CDLL(library)
    threads = metadata.num_warps * metadata.target.warp_size
    if library == _NVIDIA[0]:
        _need_context(driver, device)
    ask = getattr(driver, name)
    failed = ask(ctypes.byref(each), ctypes.c_void_p(kernel.function), ctypes.c_int(threads), ctypes.c_size_t(metadata.shared))
    if failed:
        raise NotResident(f"the driver does not say how many programs run at the same time: {name} gave error {failed}")
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    if each.value * sms < programs:
        raise NotResident(
            f"{programs} programs must run at the same time, but each of {sms} multiprocessors has room for {each.value}, "
            f"with {threads} threads and {metadata.shared} bytes of shared memory each"
        )


def _need_context(driver: ctypes.CDLL, device: int) -> None:
    """Give this thread the device's context, unless it has one. The thread in which autograd runs backwards has none at first."""
    context, handle = ctypes.c_void_p(), ctypes.c_int(0)
    if driver.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value:
        return
    if driver.cuDeviceGet(ctypes.byref(handle), device) == 0 and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle) == 0:
        driver.cuCtxSetCurrent(context)
