"""The norms of torch.nn.functional, with torch's signatures and semantics, and further norms and options.

Two things differ from torch on purpose: the output keeps the input's memory format, and double backward is correct for
every norm.

Every norm except layer_norm_out takes these options in addition to torch's arguments:

- `activation`: "silu" (or "swish"), "relu", "gelu" or "gelu_tanh", applied last.
- `modulate=(scale, shift)`: multiply the normalized output, after weight and bias, by 1 + scale, and add shift. Scale and
  shift have the shape (N, C): one value per sample and channel. Either can be None.

All functions but add_* and layer_norm_out also take

- `return_stats=True`: return `Stats(output, mean, rstd)` instead of the output. Mean and rstd are float32, or float64
  for a float64 input, and no gradient flows through them.
- `out`: a tensor to write the output to. It can be the input itself. The call must not need a gradient.

All of these except switchable_norm also take

- `save`: the tensor to save for the backward, "x" for the input or "y" for the output. "y" saves memory if other layers
  keep the output alive. With "y" there can be no activation, and the backward cannot be differentiated again. Where
  weight or 1 + scale is zero, gradients that need the input are NaN.

A function here checks its Python arguments, and hands a definition of the norm to `onepass.dispatch`, which computes it.
"""

from .channels import group_norm, layer_norm2d
from .extras import Stats
from .residual import add_group_norm, add_layer_norm, add_rms_norm
from .rows import layer_norm, layer_norm_out, rms_norm
from .running import batch_norm, instance_norm
from .switchable import switchable_norm

__all__ = [
    "Stats", "add_group_norm", "add_layer_norm", "add_rms_norm", "batch_norm", "group_norm", "instance_norm", "layer_norm", "layer_norm2d",
    "layer_norm_out", "rms_norm", "switchable_norm",
]  # fmt: skip
