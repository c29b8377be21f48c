"""The affine step and the modulation, folded into one factor and one term for each element.

Numbers such as (4) are equations of docs/theory.md. A block of elements of x[o, r, s, t] has the shape [I, J].
"""

import triton
import triton.language as tl

from .axes import AXIS_O, AXIS_R, AXIS_S, AXIS_T


@triton.jit
def fold_affine(rstd, affine, maps, place, norm: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr):
    """Return factor and term such that y = activation((x - mean)·factor + term). (4), (5), (31)

    ALONG_I and ALONG_J are masks of AXIS_O to AXIS_T: the axes that vary along I and along J of a block.
    """
    factor, term = scale_and_shift(
        rstd, 0.0, affine.weight_ptr, affine.bias_ptr, maps.param, place, norm.weight_offset, norm.param_axes, ALONG_I, ALONG_J
    )
    HAS_TERM: tl.constexpr = affine.bias_ptr is not None
    return scale_and_shift(
        factor, term, affine.scale_ptr, affine.shift_ptr, maps.modulation, place, 1.0, norm.modulation_axes, ALONG_I, ALONG_J, HAS_TERM
    )


@triton.jit
def scale_and_shift(
    factor, term, weight_ptr, bias_ptr, index_map, place,
    OFFSET: tl.constexpr, AXES: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr, HAS_TERM: tl.constexpr = False,
):  # fmt: skip
    """Fold z·(OFFSET + weight) + bias into z = x·factor + term. Return the new factor and term. Skip missing parameters.

    Without HAS_TERM, the term is 0. The compiler keeps a product with 0, since it is nan for an infinite weight.
    """
    if weight_ptr is not None:
        weight = parameter(weight_ptr, index_map, place, AXES, ALONG_I, ALONG_J)
        if OFFSET != 0.0:
            weight = weight + OFFSET
        factor = factor * weight
        if HAS_TERM:
            term = term * weight
    if bias_ptr is not None:
        bias = parameter(bias_ptr, index_map, place, AXES, ALONG_I, ALONG_J)
        if HAS_TERM:
            term = term + bias
        else:
            term = bias
    return factor, term


@triton.jit
def parameter(ptr, index_map, place, AXES: tl.constexpr, ALONG_I: tl.constexpr, ALONG_J: tl.constexpr):
    """Load the parameter of each element of a block, by equation (1).

    AXES is the mask of the axes on which the parameter depends. If these vary along I and J, the result has the shape
    [I, J]. If they vary along one of them, it has the shape of the coordinates, such as [1, J]. Otherwise it is a scalar.
    """
    at = 0
    if AXES & AXIS_O:
        at += place.o // index_map.every % index_map.period * index_map.o
    if AXES & AXIS_R:
        at += place.r * index_map.r
    if AXES & AXIS_S:
        at += place.s * index_map.s
    if AXES & AXIS_T:
        at += place.t // index_map.run * index_map.t
    if (AXES & ALONG_I) and (AXES & ALONG_J):
        value = tl.load(ptr + at, mask=place.i_inside & place.j_inside, other=0.0)
    elif AXES & ALONG_I:
        value = tl.load(ptr + at, mask=place.i_inside, other=0.0)
    elif AXES & ALONG_J:
        value = tl.load(ptr + at, mask=place.j_inside, other=0.0)
    else:
        value = tl.load(ptr + at)
    return value.to(tl.float32)
