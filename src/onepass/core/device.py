"""Properties of the hardware that planning and backends use. No other file queries the hardware for them.

A *program* is one instance of a Triton kernel. CUDA calls it a thread block.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch

# With Triton 3.9 on gfx942 (MI300X), a program can signal that its results are ready before all of its waves have stored them.
NO_TEAM_ON_AMD = "programs that wait for one another were not proved on AMD GPUs"


NO_RING = "it is written for Hopper, GPUs of compute capability 9.0"


@dataclass(frozen=True)
class Device:
    """The properties of a device as plain values, so that tests can plan for hardware that is not present."""

    kind: str  # torch's device type: "cpu", "cuda", ...
    name: str = ""
    sms: int = 0  # number of multiprocessors; on AMD, compute units
    warp: int = 32  # threads in a warp; on AMD, in a wave
    shared: int = 0  # bytes of shared memory that one program may use
    prefetches: bool = False  # can load asynchronously into shared memory
    chains: bool = False  # a kernel may start before the previous one ends (programmatic dependent launch)
    no_triton: str = "Triton kernels need a GPU"  # why Triton kernels cannot run, or ""
    no_team: str = ""  # why programs that wait for one another cannot run, or ""
    l2: int = 0  # bytes of the level-2 cache, which all programs share
    no_ring: str = NO_RING  # why the family `ring`, written for Hopper GPUs, cannot run, or ""
    no_c: str = "C kernels are for the CPU"  # why C kernels cannot run, or ""


KNOWN_DEVICES = {
    "a100": Device("cuda", "A100", 108, 32, 166912, True, False, "", "", 40 * 2**20),
    "h200": Device("cuda", "H200", 132, 32, 232448, True, True, "", "", 60 * 2**20, ""),
    "b200": Device("cuda", "B200", 148, 32, 232448, True, True, "", "", 126 * 2**20),
    "mi300x": Device("cuda", "MI300X", 304, 64, 65536, False, False, "", NO_TEAM_ON_AMD, 256 * 2**20),
    "rx7900": Device("cuda", "RX 7900", 96, 32, 65536, False, False, "", NO_TEAM_ON_AMD, 6 * 2**20),
}  # onepass can plan and compile for these GPUs without having one


class Process:
    """The state of this process."""

    forked = False  # True in a child forked after onepass was imported; such a child has one thread


def _fork() -> None:
    Process.forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_fork)


@cache
def describe(device: torch.device) -> Device:
    """Return the properties of a torch device.

    Example: `describe(torch.device("cpu")).kind` is `"cpu"`.
    """
    missing = "" if find_spec("triton") else "Triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # for tests: Triton's interpreter runs on the CPU
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
    """Return the reason "ONEPASS_CPU=off" if the environment turns C kernels off, otherwise ""."""
    value = os.environ.get("ONEPASS_CPU", "")
    if value not in ("", "off", "c", "native"):  # native is the old name of c
        raise ValueError(f"ONEPASS_CPU={value!r}, expected off, c, or nothing")
    return "ONEPASS_CPU=off" if value == "off" else ""


def _no_team(device: torch.device, nvidia: bool) -> str:
    """Return why programs that wait for one another cannot run on this GPU, or "" if they can.

    They need a driver that guarantees that all programs of a launch run at the same time (cooperative launch).
    """
    if not nvidia:
        return NO_TEAM_ON_AMD
    can, number = ctypes.c_int(0), torch.cuda.current_device() if device.index is None else device.index
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(can), 95, number)  # 95: COOPERATIVE_LAUNCH
    except (OSError, AttributeError):
        return "libcuda.so.1 was not found, so it is unknown whether programs can run at the same time"
    return "" if can.value and not failed else "the driver cannot promise that programs run at the same time (cooperative launch)"
