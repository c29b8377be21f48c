"""Channels between groups of warps: shared memory in slots, each with two barriers.

One group writes a slot, others read it. A group acquires a slot before it touches it, and releases it afterwards. Each
use of a slot has a phase, 0 or 1 in turn: the n-th value in a channel of k slots has slot n % k and phase n // k % 2.
"""

from typing import Any, NamedTuple

from .gluon import barrier, jit, mbarrier


class Channel(NamedTuple):
    buffer: Any  # the slots, in shared memory
    full: Any  # barriers: the slot is written
    empty: Any  # barriers: the slot is read


@jit
def acquire_to_write(channel, slot, phase):
    """Wait until the slot's last value has been read."""
    mbarrier.wait(channel.empty.index(slot), phase ^ 1)


@jit
def release_to_readers(channel, slot):
    """All warps of this group have written the slot."""
    barrier()
    mbarrier.arrive(channel.full.index(slot), count=1)


@jit
def acquire_to_read(channel, slot, phase):
    """Wait until the slot is written."""
    mbarrier.wait(channel.full.index(slot), phase)


@jit
def release_to_writer(channel, slot):
    """All warps of this group have read the slot."""
    barrier()
    mbarrier.arrive(channel.empty.index(slot), count=1)
