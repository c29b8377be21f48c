"""How the members of a team exchange moments: through global memory, with a counter to wait for each other.

A team is a group of programs, its members, that share large sets. A set is the elements of x[o, r, s, t] with the same o
and s, which share a mean and a variance. Moments are a mean and an M2, the sum of squared differences from that mean. A
part is the moments of one set in the rows r of one member. Parts are merged by equations (14) and (15) of
docs/theory.md.
"""

import triton
import triton.language as tl

from onepass.backends.gpu.device.moments import join, merge


@triton.jit
def merge_members(
    parts_ptr, first_set, view, members, rows, m2_offset, CENTERED: tl.constexpr, SETS: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
    """Merge the parts of all members. Return mean and M2 of the SETS sets from `first_set` on, each of shape [SETS, 1].

    Each member has `rows` rows; the last one may have fewer. (14), (15)
    """
    # Load few parts at a time. With as many parts as threads, the compiler would use the layout of this load for all code
    # that follows, and so move the caller's rows of x through shared memory.
    BLOCK: tl.constexpr = min(MEMBERS, max(128 // SETS, 1))
    s = first_set + tl.arange(0, SETS)[None, :]
    n, mean, m2 = tl.zeros((BLOCK, SETS), tl.float32), tl.zeros((BLOCK, SETS), tl.float32), tl.zeros((BLOCK, SETS), tl.float32)
    for first in range(0, members, BLOCK):
        part = first + tl.arange(0, BLOCK)[:, None]
        at, mask = parts_ptr + part * view.sets + s, (part < members) & (s < view.sets)
        n_part = tl.where(mask, tl.minimum(view.reps - part * rows, rows) * 1.0 * view.run, 0.0)
        # .cg skips the first-level cache, which does not see the stores of other multiprocessors.
        m2_part = tl.load(at + m2_offset, mask=mask, other=0.0, cache_modifier=".cg")
        mean_part = m2_part
        if CENTERED:
            mean_part = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        mean, m2, n = join(mean, m2, n, mean_part, m2_part, n_part, CENTERED)
    mean, m2 = merge(mean, m2, n, view.reps * 1.0 * view.run, 0, CENTERED)
    return tl.reshape(mean, (SETS, 1)), tl.reshape(m2, (SETS, 1))


@triton.jit
def wait_for_team(counter, member, members):
    """Wait until all members have called this function. What each stored before is then visible to all.

    Together the members add 2³¹ to the counter. That flips its sign and leaves its other bits 0, so nobody has to reset
    it. The sign flips again only when all members have called this function once more, so each of them sees this flip.
    """
    tl.debug_barrier()  # all threads of this program have stored before one of them adds to the counter
    step = tl.where(member == 0, 2147483647 - (members - 2), 1).to(tl.int32)
    before = tl.atomic_add(counter, step, sem="acq_rel", scope="gpu")
    now = before + step
    while (before ^ now) >= 0:
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
