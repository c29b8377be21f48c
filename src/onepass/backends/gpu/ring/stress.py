"""What a stress test changes in the ring kernel: it delays one hand-over, and may move the fence.

A hand-over is one place where a group of warps waits for another. STRESS is None in production: then no delay is compiled
in. In a stress test, STRESS is "hand-over/fence", such as "reduce block/none": which hand-over is delayed, and where the
fence of `_load_block` (ring/kernel.py) is. benchmarks/ring_stress.py lists the hand-overs and the places.

`late` and `crowded` are called just before the memory access that a hand-over orders. They delay a part of a group, so
that the other warps run ahead. If nothing orders the access, the results become wrong.
"""

from typing import Any

from triton import constexpr_function

from .gluon import gl, jit

# PTX code that waits 2,000 to 6,095 clock cycles: 1 to 3.5 us on an H200, longer than a copy into shared memory. The time
# varies from call to call. Threads with a negative input do not wait. `bar.warp.sync` keeps later code after the wait.
SPIN = gl.constexpr("""{
    .reg .u64 start, now, span;
    .reg .pred p;
    setp.lt.s32 p, $1, 0;
    @p bra done;
    mov.u64 start, %clock64;
    and.b64 span, start, 4095;
    add.u64 span, span, 2000;
again:
    mov.u64 now, %clock64;
    sub.u64 now, now, start;
    setp.lt.u64 p, now, span;
    @p bra again;
done:
    bar.warp.sync -1;
    mov.b32 $0, 0;
}""")


# 32 stores to shared memory, each with a 32-way bank conflict. A store returns no result, so only later accesses to shared
# memory wait for these.
_STORES = "\n".join(f"    st.volatile.shared.b32 [at+{4 * i}], $1;" for i in range(32))


CROWD = gl.constexpr(f"""{{
    .reg .b32 at;
    .reg .pred p;
    setp.lt.s32 p, $1, 0;
    @p bra done;
    mov.u32 at, global_smem;
    add.u32 at, at, $1;
{_STORES}
done:
    bar.warp.sync -1;
    mov.b32 $0, 0;
}}""")


@constexpr_function
def is_late(stress: Any, here: Any) -> bool:
    return stress is not None and stress.partition("/")[0] == here


@constexpr_function
def fenced(stress: Any, here: Any) -> bool:
    """Return whether the fence is at the place `here`. In production it is at "load", where a slot is refilled."""
    return here == ("load" if stress is None else stress.partition("/")[2])


@constexpr_function
def spare(stress: Any) -> int:
    """Return how many extra slots follow the ring, to which `crowded` stores: 0 or 1.

    `crowded` can compute the address of that slot, because the ring begins at the start of shared memory.
    """
    return int(stress is not None and "crowd" in stress)


@jit
def late(STRESS: gl.constexpr, HERE: gl.constexpr, WARPS: gl.constexpr):
    """Delay the last warp of a group, if the stress test delays the hand-over HERE."""
    if is_late(STRESS, HERE):
        thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0])) - 32 * (WARPS - 1)
        gl.inline_asm_elementwise(SPIN, "=r,r,~{memory}", [thread], dtype=gl.int32, is_pure=False, pack=1)


@jit
def crowded(STRESS: gl.constexpr, HERE: gl.constexpr, ring, WARPS: gl.constexpr):
    """Delay the loads that follow, if the stress test delays the hand-over HERE: they are issued, but wait behind stores.

    Warps 0, 4, 8, ... do not store. They share a quarter of the multiprocessor, which must not be delayed, because warp 0
    releases the slot for its group.
    """
    if is_late(STRESS, HERE):
        SLOT: gl.constexpr = ring.shape[1] * ring.shape[2] * ring.dtype.primitive_bitwidth // 8
        thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
        at = gl.where(thread // 32 % 4 == 0, -1, (ring.shape[0] - 1) * SLOT + thread % 32 * 128)
        gl.inline_asm_elementwise(CROWD, "=r,r,~{memory}", [at], dtype=gl.int32, is_pure=False, pack=1)
