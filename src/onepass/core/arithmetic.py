"""The steps of a norm in torch operations, for any arrangement of x. The reference and the torch families share them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .activations import ACTIVATION_FUNCTIONS


def normalize(x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    """x_hat = (x - mean)·rstd. (4)"""
    return (x if mean is None else x - mean) * rstd


def affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """u = x_hat·weight + bias. (5)"""
    if weight is None:
        return x_hat if bias is None else x_hat + bias
    return x_hat * weight if bias is None else torch.addcmul(bias, x_hat, weight)


def affine_inverse(u: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x_hat = (u - bias)/weight, the inverse of (5). NaN where the weight is zero, since u then says nothing about x_hat. (36)"""
    u = u if bias is None else u - bias
    # u/0 would be infinite where y was rounded away from the bias.
    return u if weight is None else u / weight.masked_fill(weight == 0, torch.nan)


class PostAffine(NamedTuple):
    """What follows the affine step: y = act(u·gain + shift), gain = 1 + scale. (31)"""

    gain: Tensor | None
    shift: Tensor | None
    activation: str

    def __call__(self, u: Tensor) -> Tensor:
        z = affine(u, self.gain, self.shift)
        return ACTIVATION_FUNCTIONS[self.activation].apply(z) if self.activation else z

    def into(self, y: Tensor, u: Tensor) -> None:
        """Write the result to y, without gradients. It takes one pass less if y is contiguous and has u's dtype.

        (torch 2.13's gelu does not write an `out` that is not contiguous.)
        """
        if self.activation and y.dtype == u.dtype and y.is_contiguous():
            ACTIVATION_FUNCTIONS[self.activation].into(affine(u, self.gain, self.shift), out=y)
        else:
            y.copy_(self(u))

    def inverse(self, y: Tensor) -> Tensor:
        """u from y, if there is no activation. (36)"""
        return affine_inverse(y, self.gain, self.shift)

    def backward(self, dy: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of z = u·gain + shift and of u. z is computed again from u. (32), (33)"""
        dz = ACTIVATION_FUNCTIONS[self.activation].gradient(dy, affine(u, self.gain, self.shift)) if self.activation else dy
        return dz, affine(dz, self.gain, None)


def input_gradient(wdy: Tensor, x_hat: Tensor, rstd: Tensor, c1: Tensor | None, c2: Tensor | None) -> Tensor:
    """dx = (wdy - c1 - x_hat·c2)·rstd; c1 is None without a mean, both are None if the statistics were given. (8), (9)"""
    if c2 is None:
        return wdy * rstd
    return torch.addcmul(wdy if c1 is None else wdy - c1, x_hat, c2, value=-1) * rstd
