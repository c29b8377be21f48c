"""Channels, which pass values from one group of warps to others through slots in shared memory.

Each slot has two barriers. A group acquires a slot before it reads or writes the slot, and releases the slot afterwards.
Each use of a slot has a phase, 0 or 1 in turn: in a channel of k slots, value n (from 0) has slot n % k and phase
n // k % 2.
"""

from typing import Any, NamedTuple

from .gluon import barrier, fence_async_shared, gl, jit, mbarrier
from .stress import fenced


class Channel(NamedTuple):
    buffer: Any  # the slots, in shared memory
    full: Any  # one barrier for each slot: the slot holds a value to read
    empty: Any  # one barrier for each slot: its value was read, and may be overwritten


@jit
def acquire_to_write(channel, slot, phase):
    """Wait until the previous value of the slot has been read."""
    mbarrier.wait(channel.empty.index(slot), phase ^ 1)


@jit
def release_to_readers(channel, slot):
    """Wait for all warps of this group, then mark the slot as written."""
    barrier()
    mbarrier.arrive(channel.full.index(slot), count=1)


@jit
def acquire_to_read(channel, slot, phase):
    """Wait until the slot has been written."""
    mbarrier.wait(channel.full.index(slot), phase)


@jit
def release_to_writer(channel, slot):
    """Wait for all warps of this group, then mark the slot as read."""
    barrier()
    mbarrier.arrive(channel.empty.index(slot), count=1)


@jit
def release_block(ring, slot, mode: gl.constexpr):
    """Allow a slot of the ring to be refilled, after this group has loaded the block in it."""
    if fenced(mode.stress, "readers"):
        fence_async_shared()
    release_to_writer(ring, slot)
