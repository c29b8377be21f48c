"""Segments: groups of sets that use the same parameters.

A set is the elements of x[o, r, s, t] with the same o and s, which share a mean and a variance.
"""

import triton
import triton.language as tl


@triton.jit
def member_of(q, segment, sets, segments, BY_SET: tl.constexpr):
    """Return o and s of the q-th set of a segment.

    A segment has `every` consecutive values of o out of each `every` * `period`. With BY_SET, it has one value of s,
    otherwise all values of s.
    """
    if BY_SET:
        s, middle = segment % sets, segment // sets
    else:
        s, middle, q = q % sets, segment, q // sets
    return (q // segments.every * segments.period + middle) * segments.every + q % segments.every, s
