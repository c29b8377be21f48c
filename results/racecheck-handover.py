"""The textbook hand-over between two groups of warps, for compute-sanitizer's racecheck: what it says of a program that has no race.

    compute-sanitizer --tool racecheck --racecheck-report all --print-limit 400 python results/racecheck-handover.py

All threads of one group store, meet in a barrier, and one of them arrives at an mbarrier; the other group waits for that, loads, and
answers in the same way. On an H200 (2026-11-16, CUDA 13.0) a version with two lines to a turn printed `right True`, and racecheck reported
327850 hazards, those that it showed between the store and the load, or in Triton's own `warp_specialize`. In `ring_forward` it reports the
same two kinds.
"""

import torch
from onepass.kernels.gluon import barrier, fence_async_shared, gl, jit, mbarrier


@jit
def produce(line, full, empty, turns, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    for turn in range(turns):
        mbarrier.wait(empty.index(turn % 2), (turn // 2 & 1) ^ 1)
        line.index(turn % 2).store(gl.arange(0, 64, LAYOUT) + turn)
        barrier()
        mbarrier.arrive(full.index(turn % 2), count=1)


@jit
def consume(line, full, empty, out_ptr, turns, WARPS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    total = gl.zeros([64], gl.int32, LAYOUT)
    for turn in range(turns):
        mbarrier.wait(full.index(turn % 2), turn // 2 & 1)
        total += line.index(turn % 2).load(LAYOUT)
        barrier()
        mbarrier.arrive(empty.index(turn % 2), count=1)
    gl.store(out_ptr + gl.program_id(0) * 64 + gl.arange(0, 64, LAYOUT), total)


@jit
def nothing(turns):
    pass


@jit
def hand_over(out_ptr, turns, WARPS: gl.constexpr):
    MBARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    line = gl.allocate_shared_memory(gl.int32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], MBARRIER)
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (nothing, (turns,)),
            (produce, (line, full, empty, turns, WARPS)),
            (consume, (line, full, empty, out_ptr, turns, 1)),
        ],
        [WARPS, 1],
        [64, 64],
    )


if __name__ == "__main__":
    out = torch.zeros(64, 64, dtype=torch.int32, device="cuda")
    hand_over[(64,)](out, 10, 8, num_warps=8)
    print("right", torch.equal(out, (10 * torch.arange(64, device="cuda") + 45).int().expand(64, 64)))
