"""What goes into a kernel and what comes out of it, beside x, weight and bias."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class OptionalOperands(NamedTuple):
    """The operands of a forward that few calls have, beside x, weight, bias and given statistics."""

    residual: Tensor | None = None  # added to x first
    scale: Tensor | None = None  # modulation: u·(1 + scale) + shift after the affine step
    shift: Tensor | None = None
    mean_weight: Tensor | None = None  # for a mix: one weight per norm; they sum to one
    var_weight: Tensor | None = None
    running_mean: Tensor | None = None  # for a mix: given statistics of its last norm
    running_var: Tensor | None = None


NO_OPTIONAL = OptionalOperands()


class Result(NamedTuple):
    """What a forward returns. Statistics have one value per set, in the accumulator's dtype; what was not computed is None.

    `mean` and `var` belong to each set itself. `rstd` is the one that was applied: for a mix of norms, the mixed one.
    """

    y: Tensor
    mean: Tensor | None
    rstd: Tensor
    var: Tensor | None
    sum: Tensor | None = None  # x + residual


class SavedTensors(NamedTuple):
    """What a forward keeps for its backward."""

    x: Tensor  # what was normalized: x, or x + residual; y if the spec says `from_y`
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    var: Tensor | None = None  # for a mix: the variance of each set itself
    scale: Tensor | None = None
    shift: Tensor | None = None
    mean_weight: Tensor | None = None
    var_weight: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None

    @property
    def optional(self) -> OptionalOperands:
        """The optional operands of the forward. The residual is part of x."""
        return OptionalOperands(None, *self[6:])


class Gradients(NamedTuple):
    """What a backward returns; None where it was not needed. With a residual, `dx` is the gradient of the sum."""

    dx: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dscale: Tensor | None = None
    dshift: Tensor | None = None
    dmean_weight: Tensor | None = None
    dvar_weight: Tensor | None = None


class Needs(NamedTuple):
    """Which of the Gradients are wanted."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    scale: bool = False
    shift: bool = False
    mean_weight: bool = False
    var_weight: bool = False
