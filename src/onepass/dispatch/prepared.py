"""What the code that torch.compile generates calls: one function for each norm of a graph.

inductor_lowering.py writes these calls. The generated code prepares each norm once, when it is loaded. Each step is then one line:

    norm_0 = onepass_prepared.infer("n (g k) *l | …", (32,), 1e-05, 0.0)    # when the code is loaded
    buf0 = norm_0(x, weight, bias)                                          # in each step

The generated code knows nothing about the launch. The first call with a new shape of x chooses a family. It gets the same launchers
as a call without torch.compile. On a GPU, backends/gpu/launch/prepared.py writes them.

Each function returns a tuple, in the order of the registered op's results. Results that the generated code does not use may be None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from onepass.core.memory import LOWEST, require_memory
from onepass.core.operands import OptionalOperands, SavedTensors
from onepass.core.statistics import repack
from onepass.core.view import contiguous_stride
from onepass.planning.options import batch_invariant, options_in_context

from .launchers import MAX_KINDS, OPERAND_NAMES, Launchers
from .library import BACKWARD_NAMES, as_results, backward_launchers, dense_if_derived, forward_launchers

Call = Callable[..., tuple[Tensor | None, ...]]


class _ByShape:
    """The launchers of one norm in a graph. The key is the shape and strides of x, and the options: the graph fixes all else."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}
        self.find = self._known.get

    def remember(self, key: Any, launch: Any) -> Any:
        if len(self._known) >= MAX_KINDS:
            self._known.clear()
        self._known[key] = launch
        return launch


def infer(words: str, sizes: Sequence[int], eps: float, weight_offset: float) -> Call:
    """Return a function (x, weight, bias, mean, var) -> (y,)."""
    args, known = (words, tuple(sizes), eps, weight_offset), _ByShape()
    find = known.find

    def call(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, mean: Tensor | None = None, var: Tensor | None = None):
        key = x.shape, x.stride(), options_in_context.get(), batch_invariant.on
        launch = find(key)
        if launch is None:
            found = forward_launchers(args, (x, weight, bias, mean, var), OptionalOperands(), track=False)
            launch = known.remember(key, found.infer)
        return (launch(x, weight, bias, mean, var),)

    return call


def infer_extras(words: str, sizes: Sequence[int], eps: float, weight_offset: float) -> Call:
    """Return a function (x, weight, bias, residual, scale, shift) -> (y, None, None, None, x + residual)."""
    args, known = (words, tuple(sizes), eps, weight_offset), _ByShape()
    find = known.find

    def call(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *extras: Tensor | None):
        key = x.shape, x.stride(), options_in_context.get(), batch_invariant.on
        launch = find(key)
        if launch is None:
            found = forward_launchers(args, (x, weight, bias, None, None), OptionalOperands(*extras), track=False)
            launch = known.remember(key, found.infer_extras)
        y, total = launch(x, weight, bias, *extras, *[None] * (3 - len(extras)))
        return y, None, None, None, total

    return call


def forward(words: str, sizes: Sequence[int], eps: float, weight_offset: float, track: bool) -> Call:
    """Return a function (x, weight, bias, mean, var, *optional) -> (y, mean, rstd, var, x + residual)."""
    args, known = (words, tuple(sizes), eps, weight_offset), _ByShape()
    find = known.find

    def call(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, mean=None, var=None, *others: Tensor | None):
        key = x.shape, x.stride(), options_in_context.get(), batch_invariant.on
        launch = find(key)
        if launch is None:
            launchers = forward_launchers(args, (x, weight, bias, mean, var), OptionalOperands(*others), track)
            launch = known.remember(key, _training_forward(launchers) or _general_forward(launchers, var is not None, track))
        return launch(x, weight, bias, mean, var, *others)

    return call


def _training_forward(launchers: Launchers) -> Call | None:
    """Return a launcher that stores mean and rstd in one tensor, which `_backward` needs for its short path. None if there is none."""
    problem = launchers.problem
    plain, extras, centered = launchers.train_forward, launchers.train_extras, problem.spec.centered
    if problem.given or problem.track or contiguous_stride(problem.stat_shape) != problem.stat_stride:
        return None
    if plain:

        def launch(x: Tensor, weight, bias, _mean, _var, *others):
            y, statistics = plain(x, weight, bias)
            return y, statistics[0] if centered else None, statistics[1], None, None

        return launch
    if extras is None:
        return None

    def launch_with_extras(x: Tensor, weight, bias, _mean, _var, residual=None, scale=None, shift=None, *others):
        y, statistics, total = extras(x, weight, bias, residual, scale, shift)
        return y, statistics[0] if centered else None, statistics[1], None, total

    return launch_with_extras


def _general_forward(launchers: Launchers, given: bool, track: bool) -> Call:
    def launch(x: Tensor, *operands: Tensor | None):
        if min([t.data_ptr() for t in (x, *operands) if t is not None]) < LOWEST:
            require_memory(OPERAND_NAMES, (x, *operands))
        weight, bias, mean, var, *others = operands
        return as_results(launchers.forward(x, weight, bias, mean, var, OptionalOperands(*others)), given, track)

    return launch


def backward(words: str, sizes: Sequence[int], eps: float, weight_offset: float, given: bool, needs: Sequence[bool]) -> Call:
    """Return a function (dy, x, weight, bias, mean, rstd, var, dsum, *optional) -> Gradients, with None where not needed."""
    args, known, needs = (words, tuple(sizes), eps, weight_offset), _ByShape(), tuple(needs)
    find = known.find

    def call(dy: Tensor, x: Tensor, weight=None, bias=None, mean=None, rstd=None, var=None, dsum: Tensor | None = None, *others):
        assert rstd is not None
        x = dense_if_derived(x, dsum, words)
        key = x.shape, x.stride(), options_in_context.get(), batch_invariant.on
        saved = SavedTensors(x, weight, bias, mean, rstd, var, *others)
        launch = find(key)
        if launch is None:
            launch = known.remember(key, _backward(backward_launchers(args, dy, dsum, saved, given), needs))
        return launch(dy, dsum, saved)

    return call


def _backward(launchers: Launchers, needs: tuple[bool, ...]) -> Call:
    """Return a launcher (dy, dsum, saved) -> gradients.

    It takes the short path if mean and rstd lie in one tensor, as `_training_forward` leaves them.
    """
    problem, plain, extras = launchers.problem, launchers.train_backward, launchers.train_extras_backward

    def launch(dy: Tensor, dsum: Tensor | None, saved: SavedTensors):
        x, weight, bias, mean, rstd, _, scale, shift = saved[:8]
        arrived = dy.stride() == problem.y_stride and (dsum is None or dsum.stride() == problem.y_stride)
        statistics = repack(problem, mean, rstd) if (plain or extras) and arrived else None
        if statistics is not None and plain:
            return plain(dy, x, weight, bias, statistics, needs[:3])
        if statistics is not None and extras:
            return extras(dy, x, weight, bias, statistics, scale, shift, dsum, needs[:5])
        if min([t.data_ptr() for t in (dy, dsum, *saved) if t is not None]) < LOWEST:
            require_memory(BACKWARD_NAMES, (dy, dsum, *saved))
        return launchers.backward(dy, dsum, saved, needs)

    return launch
