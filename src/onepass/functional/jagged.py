"""layer_norm and rms_norm of jagged tensors: nested tensors whose rows lie one after the other in one tensor, their values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def normalize_jagged(function: Callable[..., Tensor], input: Any, normalized_shape: Sequence[int], **others: Any) -> Tensor:
    """Normalize the values of a jagged tensor by `function`, layer_norm or rms_norm. Return a jagged tensor of the same lengths.

    Example: `layer_norm(torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged), (8,))`
    """
    name, shape, ragged = function.__name__, list(normalized_shape), input._ragged_idx
    given = [f"{word}={others[word]!r}" for word in ("modulate", "out", "return_stats") if others[word]]
    if given:
        raise NotImplementedError(f"{name}() of a jagged input got {given[0]}; expected none: normalize input.values() instead")
    if len(shape) >= input.dim() - ragged:
        raise RuntimeError(
            f"{name}() of a jagged input of shape {list(input.shape)} got normalized_shape={shape}, which reaches dimension {ragged}, "
            f"whose length varies; expected at most {input.dim() - ragged - 1} dimensions: pad the input with input.to_padded_tensor()"
        )
    y = function(input.values(), normalized_shape, **others)
    seqlens = {"min_seqlen": input._maybe_min_seqlen, "max_seqlen": input._maybe_max_seqlen}
    return torch.nested.nested_tensor_from_jagged(y, input.offsets(), input.lengths(), ragged, **seqlens)
