"""Segments of sets that use the same parameters."""

import triton
import triton.language as tl


@triton.jit
def member_of(q, segment, sets, segments, BY_SET: tl.constexpr):
    """o and s of the q-th set of a segment.

    A segment has `every` values of o, then its parameters return after `period` segments. BY_SET: each s has segments
    of its own.
    """
    if BY_SET:
        s, middle = segment % sets, segment // sets
    else:
        s, middle, q = q % sets, segment, q // sets
    return (q // segments.every * segments.period + middle) * segments.every + q % segments.every, s
