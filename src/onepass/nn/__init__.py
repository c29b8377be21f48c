"""torch.nn's norms as subclasses: the same constructors, parameters, state_dicts and reprs, with onepass's forward. No maths here.

Every module takes the keyword `activation`, and `modulate` and `activation` in its call; those that torch fixes to (N, C, *) take
`channel_dim=-1`; all but SwitchableNorm take `save`.
"""

from .channels import GroupNorm, LayerNorm2d
from .rows import LayerNorm, RMSNorm
from .running import BatchNorm1d, BatchNorm2d, BatchNorm3d, InstanceNorm1d, InstanceNorm2d, InstanceNorm3d
from .switchable import SwitchableNorm1d, SwitchableNorm2d, SwitchableNorm3d

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LayerNorm",
    "LayerNorm2d", "RMSNorm", "SwitchableNorm1d", "SwitchableNorm2d", "SwitchableNorm3d",
]  # fmt: skip
