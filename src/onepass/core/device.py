"""What planning and backends know about the hardware. Only this file queries it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

# Triton 3.9 for gfx942 lets a program announce its moments before the stores of all its waves have arrived.
NO_TEAM_ON_AMD = "programs that wait for one another were not proved on AMD GPUs"


NO_RING = "it is written for Hopper, GPUs of compute capability 9.0"


@dataclass(frozen=True)
class Device:
    """A device as plain values. So `plan` is pure, and tests can plan for hardware that is not present."""

    kind: str  # torch's device type: "cpu", "cuda", ...
    name: str = ""
    sms: int = 0  # multiprocessors, or compute units
    warp: int = 32  # threads of a warp, or of a wave
    shared: int = 0  # bytes of shared memory that a program may have
    prefetches: bool = False  # loads can be asynchronous, into shared memory
    chains: bool = False  # supports programmatic dependent launch
    no_triton: str = "Triton kernels need a GPU"  # why they cannot run, or ""
    no_team: str = ""  # why programs that wait for one another cannot run, or ""
    l2: int = 0  # bytes of the cache that all programs share
    no_ring: str = NO_RING  # why the kernel for Hopper cannot run, or ""
    no_c: str = "C kernels are for the CPU"  # why they cannot run, or ""


KNOWN_DEVICES = {
    "a100": Device("cuda", "A100", 108, 32, 166912, True, False, "", "", 40 * 2**20),
    "h200": Device("cuda", "H200", 132, 32, 232448, True, True, "", "", 60 * 2**20, ""),
    "b200": Device("cuda", "B200", 148, 32, 232448, True, True, "", "", 126 * 2**20),
    "mi300x": Device("cuda", "MI300X", 304, 64, 65536, False, False, "", NO_TEAM_ON_AMD, 256 * 2**20),
    "rx7900": Device("cuda", "RX 7900", 96, 32, 65536, False, False, "", NO_TEAM_ON_AMD, 6 * 2**20),
}  # plans can be made for them, and kernels compiled, without one


class Process:
    """What has happened to this process since onepass was imported."""

    forked = False  # True in a forked child, which has one thread


def _fork() -> None:
    Process.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork)


@cache
def describe(device: torch.device) -> Device:
    """The Device a tensor lives on.

    Example: `describe(torch.device("cpu")).kind` is `"cpu"`.
    """
    missing = "" if find_spec("triton") else "Triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # for tests: programs run one by one on the CPU
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
        nvidia = torch.version.hip is None
        if nvidia and properties.major < 7:
            missing = f"Triton needs a GPU of compute capability 7 or later, this has {properties.major}.{properties.minor}"
        if interpreted:
            missing = "TRITON_INTERPRET is set, and its interpreter runs on the CPU"
        prefetches, chains = nvidia and properties.major >= 8, nvidia and properties.major >= 9
        return Device(
            *("cuda", properties.name, properties.multi_processor_count, properties.warp_size, shared, prefetches, chains, missing),
            *("" if missing else _no_team(device, nvidia), properties.L2_cache_size),
            "" if nvidia and (properties.major, properties.minor) == (9, 0) else NO_RING,
        )
    if interpreted and device.type == "cpu":
        return Device("cpu", "interpreter", 4, 32, 2**17, True, False, missing, no_c=_no_c())
    return Device(device.type, no_c=_no_c()) if device.type == "cpu" else Device(device.type)


def _no_c() -> str:
    """Why C kernels are not even compiled (ONEPASS_CPU=off), or ""."""
    value = os.environ.get("ONEPASS_CPU", "")
    if value not in ("", "off", "c", "native"):  # native: the older name of c
        raise ValueError(f"ONEPASS_CPU={value!r}, expected off, c, or nothing")
    return "ONEPASS_CPU=off" if value == "off" else ""


def _no_team(device: torch.device, nvidia: bool) -> str:
    """Why the driver cannot guarantee that all programs of a launch run at the same time, or ""."""
    if not nvidia:
        return NO_TEAM_ON_AMD
    can, number = ctypes.c_int(0), torch.cuda.current_device() if device.index is None else device.index
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(can), 95, number)  # cooperative launch
    except (OSError, AttributeError):
        return "libcuda.so.1 was not found, so it is unknown whether programs can run at the same time"
    return "" if can.value and not failed else "the driver cannot promise that programs run at the same time (cooperative launch)"
