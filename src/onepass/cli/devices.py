"""Checks the argument --device."""

from __future__ import annotations

import torch


def require(name: str) -> None:
    """Raise a ValueError if there is no such device here.

    Example: `require("cpu")`
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name}: torch knows no such device; expected cpu or cuda, or one GPU, for example cuda:1") from None
    if device.type != "cuda":
        _try(device)
        return
    count = torch.cuda.device_count()
    if not torch.cuda.is_available():
        built = "was built for CPUs only" if not torch.backends.cuda.is_built() else "finds no GPU or no driver"
        raise ValueError(f"--device {name}: there is no GPU here, as torch {torch.__version__} {built}; use --device cpu")
    if (device.index or 0) >= count:
        raise ValueError(f"--device {name}: there are {count} GPUs here; expected cuda:0 to cuda:{count - 1}")


def _try(device: torch.device) -> None:
    try:
        torch.ones(1, device=device).item()
    except Exception as error:  # each kind of device has errors of its own
        raise ValueError(f"--device {device}: torch cannot use it here ({str(error).splitlines()[0]:.80}); use --device cpu") from None
