"""torch.nn.functional's norms, with its signatures and semantics, and more: check, define, call. Only running statistics are computed here.

Two differences from torch, both deliberate: the output keeps the input's memory format, and double backward is right everywhere.

Every norm takes these beside torch's arguments:

- `activation`: "silu" (or "swish"), "relu", "gelu" or "gelu_tanh", applied last;
- `modulate=(scale, shift)`: y = affine(x_hat)·(1 + scale) + shift with a scale and shift per sample and channel, both (N, C), either None;
- `return_stats=True`: `Stats(output, mean, rstd)` instead of the output; the statistics are float32 (float64 for float64) constants;
- `out`: a tensor for the output, where no gradient is needed; it may be the input itself.

All but switchable_norm and the add_ functions also take

- `save`: "x", or "y" to keep the output instead of the input for the backward, where the output lives on anyway. Without activation; where
  weight or 1 + scale is zero, gradients that need the input are NaN; the backward cannot be differentiated again.
"""

from .call import Stats
from .channels import group_norm, layer_norm2d
from .residual import add_group_norm, add_layer_norm, add_rms_norm
from .rows import layer_norm, layer_norm_out, rms_norm
from .running import batch_norm, instance_norm
from .switchable import switchable_norm

__all__ = [
    "Stats", "add_group_norm", "add_layer_norm", "add_rms_norm", "batch_norm", "group_norm", "instance_norm", "layer_norm", "layer_norm2d",
    "layer_norm_out", "rms_norm", "switchable_norm",
]  # fmt: skip
