"""Pack a problem and its tensors into the structures that the C kernels take: Problem and Tensors of src/problem.h."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from struct import Struct
from typing import NoReturn

import torch
from torch import Tensor

from onepass.core.allocate import on_cpu
from onepass.core.memory import LOWEST, require_memory
from onepass.core.mixing import MixedStatistics, MixOperands, mix_statistics
from onepass.core.moments import Moments
from onepass.core.problem import NormProblem
from onepass.core.spec import ACTIVATIONS
from onepass.core.view import contiguous_stride, laid_out

from .library import load
from .walk import walk_of

TYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


ACTIVATION_CODES = {name: code for code, name in enumerate(("", *ACTIVATIONS))}  # as the enum in src/numbers.h


_small = 1 << 15  # problems with fewer elements use one thread


def share_from(elements: int) -> None:
    """Set the smallest number of elements for which several threads are used. For tests. Existing launchers do not change."""
    global _small
    _small = elements


pack_problem = Struct("@20q2d16q").pack


pack_tensors = Struct("@20P").pack


class Call:
    """The values that all calls with the same problem share."""

    def __init__(self, problem: NormProblem) -> None:
        self.problem, self.library = problem, load()
        self.walk = walk_of(problem)
        self.small = prod(problem.shape) < _small
        self._stat_layout = problem.stat_shape, problem.stat_stride
        self.count = self.walk.sizes[1] * self.walk.fold * self.walk.sizes[3]

    def packed(self, given: bool, residual: bool) -> bytes:
        problem, walk, spec = self.problem, self.walk, self.problem.spec
        x, other = problem.addends if residual and problem.addends else (problem.dtype, None)
        types = [TYPES[t] for t in (x, other, problem.dtype, problem.weight, problem.bias, problem.scale, problem.shift)]
        flags = ACTIVATION_CODES[spec.activation], spec.centered, given, problem.from_y, walk.tile, walk.fold
        offset = spec.weight_offset if problem.weight else 0.0
        return pack_problem(*walk.sizes, *walk.strides, *types, *flags, spec.eps, offset, *walk.param, *walk.modulation)

    def threads(self) -> int:
        return 1 if self.small else self.library.threads()

    def stat(self, stat: Tensor | None) -> Tensor | None:
        """Return a statistic in float32, with the layout that the kernels take: contiguous as (outer, sets) of the view."""
        shape, stride = self._stat_layout
        if stat is None or (stat.dtype is torch.float32 and stat.stride() == stride and stat.shape == shape and stat.is_cpu):
            return stat
        require_cpu(stat)
        require_memory(("running statistic",), (stat,))
        return laid_out(stat.to(torch.float32).reshape(self.problem.stat_shape), self.problem.stat_stride)

    def new_stat(self) -> Tensor:
        return on_cpu(self.problem.stat_shape, self.problem.stat_stride, torch.float32)


def require_cpu(t: Tensor) -> None:
    if not t.is_cpu:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found one on {t.device} and x on cpu")


def dense(t: Tensor | None) -> Tensor | None:
    """Return the parameter itself if it is contiguous, otherwise a contiguous copy. Raise if it is not on the CPU."""
    if t is None:
        return None
    require_cpu(t)
    if t.is_contiguous():
        return t
    require_memory(("parameter",), (t,))
    return t.contiguous()


def new_gradient(param: Tensor) -> Tensor:
    shape = tuple(param.shape)
    return on_cpu(shape, (1,) if len(shape) == 1 else contiguous_stride(shape), param.dtype)


def addresses(*tensors: Tensor | None) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def checked_addresses(names: Sequence[str], *tensors: Tensor | None) -> list[int]:
    """Return the addresses of the tensors, 0 for None. Raise if a tensor has no memory."""
    pointers = []
    for t in tensors:
        at = 0 if t is None else t.data_ptr()
        if at < LOWEST and t is not None:
            require_memory(names, tensors)
        pointers.append(at)
    return pointers


def out_of_memory() -> NoReturn:
    raise MemoryError("onepass could not allocate its buffers")


def check_status(failed: int) -> None:
    """Raise MemoryError if a kernel returned 1. Kernels fail only if they cannot allocate memory."""
    if failed:
        out_of_memory()


NO_GRADIENTS = (0,) * 9


def mixed_statistics(call: Call, mean: Tensor | None, var: Tensor | None, operands: MixOperands) -> MixedStatistics:
    assert mean is not None and var is not None
    return mix_statistics(call.problem.spec, call.problem.shape, Moments(call.count, mean, var * call.count), operands)
