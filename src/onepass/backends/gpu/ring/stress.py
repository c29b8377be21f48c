"""What a stress test changes in the ring: it delays one hand-over, and moves the fence.

None of this is compiled in production.

STRESS is "hand-over/fence", or None in production. benchmarks/ring_stress.py lists both. `late` and `crowded` stand
before the access that a hand-over orders. There the last warp of a group waits, so that the others run ahead of it. If
nothing orders that access, results become wrong.
"""

from typing import Any

from triton import constexpr_function

from .gluon import gl, jit

# Waits 2,000 to 6,095 cycles, 1 to 3.5 us on an H200: longer than a copy into shared memory. The time varies from call
# to call. The barrier keeps the assembler from moving later code ahead of it.
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


# Stores with 32-way bank conflicts. They return no result, so only later accesses in the same pipe wait for them.
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
    """Whether the fence stands here. In production it stands where a slot is refilled."""
    return here == ("load" if stress is None else stress.partition("/")[2])


@constexpr_function
def spare(stress: Any) -> int:
    """How many slots follow the ring for the stores of `crowded`. The ring begins at the start of shared memory."""
    return int(stress is not None and "crowd" in stress)


@jit
def late(STRESS: gl.constexpr, HERE: gl.constexpr, WARPS: gl.constexpr):
    """Delay the last warp of a group, if the stress test delays this hand-over."""
    if is_late(STRESS, HERE):
        thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0])) - 32 * (WARPS - 1)
        gl.inline_asm_elementwise(SPIN, "=r,r,~{memory}", [thread], dtype=gl.int32, is_pure=False, pack=1)


@jit
def crowded(STRESS: gl.constexpr, HERE: gl.constexpr, ring, WARPS: gl.constexpr):
    """Delay the loads that follow, if the stress test delays this hand-over: they are issued, but wait behind stores.

    Three of four warps store. The first does not, because it arrives for its group: no store delays its quarter of the
    multiprocessor.
    """
    if is_late(STRESS, HERE):
        SLOT: gl.constexpr = ring.shape[1] * ring.shape[2] * ring.dtype.primitive_bitwidth // 8
        thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
        at = gl.where(thread // 32 % 4 == 0, -1, (ring.shape[0] - 1) * SLOT + thread % 32 * 128)
        gl.inline_asm_elementwise(CROWD, "=r,r,~{memory}", [at], dtype=gl.int32, is_pure=False, pack=1)
