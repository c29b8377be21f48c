"""torch's fast path for TransformerEncoderLayer: one function that computes a whole layer, in evaluation without gradients."""

from __future__ import annotations

import torch
from torch import nn


def may_bypass_its_norms(module: nn.Module) -> bool:
    """Return whether a module is a layer that can take torch's fast path. Its norms and activation are not called then.

    These are the conditions of `nn.TransformerEncoderLayer.forward` that do not depend on the input. In training, the norms run.
    """
    if not isinstance(module, nn.TransformerEncoderLayer) or not torch.backends.mha.get_fastpath_enabled():
        return False
    attention = module.self_attn
    supported = attention.batch_first and attention.in_proj_bias is not None and attention._qkv_same_embed_dim
    return bool(supported and module.activation_relu_or_gelu and module.norm1.eps == module.norm2.eps and attention.num_heads % 2 == 0)
