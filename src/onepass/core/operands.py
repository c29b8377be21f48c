"""The tuples of tensors that forward and backward take and return.

A *set* is the elements that share one mean and variance. A *mix* of norms, as in SwitchableNorm, averages their statistics.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class OptionalOperands(NamedTuple):
    """The rarely used operands of a forward: all except x, weight, bias and given statistics."""

    residual: Tensor | None = None  # added to x, and the sum is normalized
    scale: Tensor | None = None  # modulation: the result u of the affine step becomes u·(1 + scale) + shift
    shift: Tensor | None = None
    mean_weight: Tensor | None = None  # for a mix: one weight per norm, for its mean; the weights sum to one
    var_weight: Tensor | None = None
    running_mean: Tensor | None = None  # for a mix: the statistics of its last norm, if they are given
    running_var: Tensor | None = None


NO_OPTIONAL = OptionalOperands()


class Result(NamedTuple):
    """The tensors that a forward returns. Those that were not computed are None.

    Statistics have one value per set, in the dtype of sums: float64 if x is float64, otherwise float32. `mean` and `var` are
    the set's own, even in a mix of norms. `rstd` is the factor that was applied; in a mix, it comes from the mixed variance.
    """

    y: Tensor
    mean: Tensor | None
    rstd: Tensor
    var: Tensor | None
    sum: Tensor | None = None  # x + residual


class SavedTensors(NamedTuple):
    """The tensors that a forward saves for its backward."""

    x: Tensor  # the tensor that was normalized, x or x + residual; y if `from_y` of the NormSpec is set
    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    var: Tensor | None = None  # for a mix: each set's own variance
    scale: Tensor | None = None
    shift: Tensor | None = None
    mean_weight: Tensor | None = None
    var_weight: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None

    @property
    def optional(self) -> OptionalOperands:
        """The optional operands of the forward. The residual is None, since the saved x already includes it."""
        return OptionalOperands(None, *self[6:])


class Gradients(NamedTuple):
    """The gradients that a backward returns. Those not needed are None. With a residual, `dx` is the gradient of x + residual."""

    dx: Tensor | None = None
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dscale: Tensor | None = None
    dshift: Tensor | None = None
    dmean_weight: Tensor | None = None
    dvar_weight: Tensor | None = None


class Needs(NamedTuple):
    """Whether each field of `Gradients` is needed."""

    x: bool = False
    weight: bool = False
    bias: bool = False
    scale: bool = False
    shift: bool = False
    mean_weight: bool = False
    var_weight: bool = False
