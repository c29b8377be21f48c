"""What the planner may know about the hardware. The only place that asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Device:
    """A device as plain numbers, so that `plan` is pure and can be tested for hardware that is not here."""

    kind: str  # torch's device type: "cpu", "cuda", ...
    name: str = ""


def describe(device: torch.device) -> Device:
    """The Device a tensor lives on.

    Example: `describe(torch.device("cpu")).kind` is `"cpu"`.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Device(device.type, name)
