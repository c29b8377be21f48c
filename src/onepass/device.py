"""What the planner may know about the hardware. The only place that asks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch


@dataclass(frozen=True)
class Device:
    """A device as plain numbers, so that `plan` is pure and can be tested for hardware that is not here."""

    kind: str  # torch's device type: "cpu", "cuda", ...
    name: str = ""
    sms: int = 0  # multiprocessors, or compute units
    warp: int = 32  # threads that run together
    shared: int = 0  # bytes of shared memory that a program may have
    prefetches: bool = False  # loads can run ahead into shared memory
    chains: bool = False  # a kernel can start while the one before it ends
    no_triton: str = "Triton kernels need a GPU"  # why they cannot run, or ""


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
        return Device("cuda", properties.name, properties.multi_processor_count, properties.warp_size, shared, prefetches, chains, missing)
    if interpreted and device.type == "cpu":
        return Device("cpu", "interpreter", 4, 32, 2**17, True, False, missing)
    return Device(device.type)
