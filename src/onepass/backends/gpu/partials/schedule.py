from __future__ import annotations

from onepass.backends.gpu.launches import Pass, power_of_two, warps_for
from onepass.backends.gpu.walk import COMBINE, ROW, Walk
from onepass.core.device import Device


def combine_launch(w: Walk, taken: Pass, device: Device) -> Pass:
    """The moments of the parts that a reduction took."""
    size = 64 if taken.parts_r * taken.parts_t <= 64 else 1024  # few sizes, since each is compiled
    block_j = min(power_of_two(taken.parts_t), size)
    chunk_t = taken.chunk_t * taken.block_j if taken.kernel == ROW else 1
    return Pass(
        *(COMBINE, w, w.total, warps_for(size // 8, device), size // block_j, block_j, 1, 0, False, False, False),
        *(taken.parts_r, taken.parts_t, taken.chunk_r, chunk_t),
    )
