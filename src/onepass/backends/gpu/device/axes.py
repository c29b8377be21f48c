"""Bits for the axes of x[o, r, s, t]. A mask of them says on which axes a value depends."""

import triton
import triton.language as tl

from onepass.backends.gpu import walk

_constant = int if triton.knobs.runtime.interpret else tl.constexpr  # Triton's interpreter cannot combine ints with constexpr

AXIS_O = _constant(walk.AXIS_O)
AXIS_R = _constant(walk.AXIS_R)
AXIS_S = _constant(walk.AXIS_S)
AXIS_T = _constant(walk.AXIS_T)
NO_AXIS = _constant(0)
