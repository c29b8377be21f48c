"""How the members of a team exchange moments: through memory, with a counter to wait for each other."""

import triton
import triton.language as tl

from onepass.backends.gpu.device.moments import join, merge


@triton.jit
def merge_members(
    parts_ptr, first_set, view, members, rows, m2_offset, CENTERED: tl.constexpr, SETS: tl.constexpr, MEMBERS: tl.constexpr
):  # fmt: skip
    """The mean and M2 of SETS sets from `first_set` on, from those of all members.

    A member has `rows` rows. (14), (15)
    """
    # If this loaded as many elements as there are threads, the compiler would use its layout for all that follows, and
    # move the rows through shared memory.
    BLOCK: tl.constexpr = min(MEMBERS, max(128 // SETS, 1))
    s = first_set + tl.arange(0, SETS)[None, :]
    n, mean, m2 = tl.zeros((BLOCK, SETS), tl.float32), tl.zeros((BLOCK, SETS), tl.float32), tl.zeros((BLOCK, SETS), tl.float32)
    for first in range(0, members, BLOCK):
        part = first + tl.arange(0, BLOCK)[:, None]
        at, mask = parts_ptr + part * view.sets + s, (part < members) & (s < view.sets)
        n_part = tl.where(mask, tl.minimum(view.reps - part * rows, rows) * 1.0 * view.run, 0.0)
        # .cg skips the first-level cache, which belongs to one multiprocessor.
        m2_part = tl.load(at + m2_offset, mask=mask, other=0.0, cache_modifier=".cg")
        mean_part = m2_part
        if CENTERED:
            mean_part = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        mean, m2, n = join(mean, m2, n, mean_part, m2_part, n_part, CENTERED)
    mean, m2 = merge(mean, m2, n, view.reps * 1.0 * view.run, 0, CENTERED)
    return tl.reshape(mean, (SETS, 1)), tl.reshape(m2, (SETS, 1))


@triton.jit
def wait_for_team(counter, member, members):
    """Wait until all members have called this. What they stored before is then visible to all.

    Together they add 2³¹, which flips the sign of the counter and leaves its other bits 0, ready for the next time. So
    nobody resets it. A member that comes early the next time cannot flip the sign again before the last member has seen
    it.
    """
    tl.debug_barrier()  # all threads have stored before one of them adds
    step = tl.where(member == 0, 2147483647 - (members - 2), 1).to(tl.int32)
    before = tl.atomic_add(counter, step, sem="acq_rel", scope="gpu")
    now = before + step
    while (before ^ now) >= 0:
        now = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
