"""The kernel that updates running statistics. (12) and (13) are equations of docs/theory.md."""

import triton
import triton.language as tl

from .launch import RunningStatistics, Update


@triton.jit
def update_running(stats: RunningStatistics, by: Update, block: tl.constexpr):
    """Update the running mean and variance of a block of channels with those of the batch, (12) and (13)."""
    SIZE: tl.constexpr = block.size
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = at < by.channels
    _update(stats.running_mean_ptr + at, tl.load(stats.mean_ptr + at, mask=mask, other=0.0), by.momentum, mask)
    _update(stats.running_var_ptr + at, tl.load(stats.var_ptr + at, mask=mask, other=0.0) * by.unbiased, by.momentum, mask)


@triton.jit
def _update(running_ptr, batch, momentum, mask):
    """running = (1 - momentum)·running + momentum·batch, rounded as torch.lerp does."""
    running = tl.load(running_ptr, mask=mask, other=0.0)
    step = batch - running
    found = tl.where(momentum < 0.5, running + momentum * step, batch - step * (1.0 - momentum))
    tl.store(running_ptr, found, mask=mask)
