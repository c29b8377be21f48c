"""The steps of a norm as torch operations on tensors that broadcast together.

core/reference.py and the families of backends/torch_ops share these functions.
Numbers in parentheses are equations of docs/theory.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activations import ACTIVATION_FUNCTIONS


def normalize(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """Return x_hat = (x - mean)·rstd, equation (4)."""
    return (x if mean is None else x - mean) * rstd


def affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return u = x_hat·weight + bias, equation (5)."""
    if weight is None:
        return x_hat if bias is None else x_hat + bias
    return x_hat * weight if bias is None else torch.addcmul(bias, x_hat, weight)


def affine_inverse(u: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x_hat = (u - bias)/weight, equation (36).

    Where the weight is zero, u does not depend on x_hat, and the result is NaN.
    """
    u = u if bias is None else u - bias
    # Division by 0 would give infinity, not NaN, where rounding made u differ from the bias.
    return u if weight is None else u / weight.masked_fill(weight == 0, torch.nan)


class PostAffine(NamedTuple):
    """The modulation and activation after the affine step: y = act(u·gain + shift) with gain = 1 + scale, equation (31)."""

    gain: Tensor | None
    shift: Tensor | None
    activation: str

    def __call__(self, u: Tensor) -> Tensor:
        z = affine(u, self.gain, self.shift)
        return ACTIVATION_FUNCTIONS[self.activation].apply(z) if self.activation else z

    def into(self, y: Tensor, u: Tensor) -> None:
        """Write act(u·gain + shift) to y, without gradients.

        The activation writes directly to y if y is contiguous and has u's dtype; otherwise its result is copied.
        (torch 2.13's gelu does not write to an `out` that is not contiguous.)
        """
        if self.activation and y.dtype == u.dtype and y.is_contiguous():
            ACTIVATION_FUNCTIONS[self.activation].into(affine(u, self.gain, self.shift), out=y)
        else:
            y.copy_(self(u))

    def inverse(self, y: Tensor) -> Tensor:
        """Return u = (y - shift)/gain, equation (36). There must be no activation."""
        return affine_inverse(y, self.gain, self.shift)

    def backward(self, dy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return (dz, du), the gradients of z = u·gain + shift and of u, equations (32) and (33). z is computed again from u."""
        dz = ACTIVATION_FUNCTIONS[self.activation].gradient(dy, affine(u, self.gain, self.shift)) if self.activation else dy
        return dz, affine(dz, self.gain, None)


def input_gradient(wdy: Tensor, x_hat: Tensor, rstd: Tensor, c1: Tensor | None, c2: Tensor | None) -> Tensor:
    """Return dx = (wdy - c1 - x_hat·c2)·rstd, equation (8).

    `wdy` is the gradient of x_hat. c1 and c2 are the averages over a set of wdy, (6), and of wdy·x_hat, (7).
    c1 is None for norms without a mean. If the statistics were given, both are None, and dx = wdy·rstd, equation (9).
    """
    if c2 is None:
        return wdy * rstd
    return torch.addcmul(wdy if c1 is None else wdy - c1, x_hat, c2, value=-1) * rstd
