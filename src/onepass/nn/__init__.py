"""Subclasses of torch.nn's norms, computed by onepass, and two norms that torch.nn does not have: LayerNorm2d and SwitchableNorm.

The subclasses have the constructors, parameters, state_dicts and reprs of torch. All constructors take further keywords:

- `activation`, in every module;
- `channel_dim=-1` for an input (N, *, C), in GroupNorm, InstanceNorm, BatchNorm and SwitchableNorm;
- `save`, in every module except SwitchableNorm;
- `weight_offset`, in LayerNorm and RMSNorm;
- `granularity`, in LayerNorm.

A call of a module takes `modulate` and `activation`. `onepass.functional` explains all of these, and does the computation.
"""

from .channels import GroupNorm, LayerNorm2d
from .lazy import (
    LazyBatchNorm1d,
    LazyBatchNorm2d,
    LazyBatchNorm3d,
    LazyInstanceNorm1d,
    LazyInstanceNorm2d,
    LazyInstanceNorm3d,
)
from .rows import LayerNorm, RMSNorm
from .running import BatchNorm1d, BatchNorm2d, BatchNorm3d, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from .switchable import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LayerNorm",
    "LayerNorm2d", "LazyBatchNorm1d", "LazyBatchNorm2d", "LazyBatchNorm3d", "LazyInstanceNorm1d", "LazyInstanceNorm2d",
    "LazyInstanceNorm3d", "RMSNorm", "SwitchableNorm1d", "SwitchableNorm2d", "SwitchableNorm3d",
]  # fmt: skip
