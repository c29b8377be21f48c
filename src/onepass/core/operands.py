from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class OptionalOperands(NamedTuple):
    """The operands that few calls have, beside x, weight, bias and given statistics."""

    residual: Tensor | None = None  # added to x first; in a backward, what is added to dx last: the gradient that arrives at the sum
    scale: Tensor | None = None  # modulation: (1 + scale) and shift after the affine step
    shift: Tensor | None = None
    mean_weight: Tensor | None = None  # of a mix: the norms' weights, which sum to one
    var_weight: Tensor | None = None
    running_mean: Tensor | None = None  # of a mix: statistics that stand for the last norm's
    running_var: Tensor | None = None


NO_OPTIONAL = OptionalOperands()


class Result(NamedTuple):
    """What a forward returns. Statistics have the kept axes' shape and the accumulator's dtype; what was not computed is None.

    `mean` and `var` are each set's own; `rstd` is what was applied, which for a mix of norms is another's.
    """

    y: Tensor
    mean: Tensor | None
    rstd: Tensor
    var: Tensor | None
    sum: Tensor | None = None  # x + residual


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
