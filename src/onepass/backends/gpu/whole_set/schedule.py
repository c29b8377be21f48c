"""How the whole_set family cuts a problem: how many programs share a set, and how many threads they have.

Memory is x[o, r, s, t]. A set is the elements of one o and s: `reps` runs of `run` contiguous elements. A thread loads a
run in vectors. The members of a team are programs that share a set.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, log2

from onepass.backends.gpu import constants
from onepass.backends.gpu.cost import copy_rate, product_of, traffic_time
from onepass.backends.gpu.launches import VECTOR_BYTES, fastest, power_of_two, team_programs, warps_for
from onepass.backends.gpu.walk import Walk, fold, walk
from onepass.core.device import Device
from onepass.core.problem import NormProblem

from .launch import WholeSetLaunch

# The most vectors of a thread: in general, in a team that needs masks, because masks take registers, and in such a team on GPUs before
# Hopper (sm_80 spills with 7).
MOST_VECTORS, MOST_MASKED, MOST_MASKED_BEFORE_HOPPER = 20, 10, 6

MOST_WITH_OWN = 40  # the most elements of a thread in a team, if each loads parameters of its own: sm_100 spills with 48

PER_THREAD, PER_THREAD_ON_AMD = (20, 40, 64), (16, 32)  # elements per thread to choose from; with more, AMD's compiler spills

THREADS = 512  # threads of a multiprocessor in teams, in one program or several: it has MAX_REGISTERS registers (launch.py) for each

# For the model. With more threads than LEAST_THREADS, a program takes longer to add up their sums. A multiprocessor has REGISTERS
# registers. A thread needs OTHER_REGISTERS of them, and more for its elements.
LEAST_THREADS, REGISTERS, OTHER_REGISTERS = 128, 65536, 32

# If a set is one run, the walk is folded: the run is read as rows that follow one another.
SHORTEST = 4097  # elements of the shortest run that is folded: `row` is as fast for shorter ones
FOLD, LEAST_FOLD = 64, 8  # elements of a row: the largest power of two in this range that divides the run

UNLIMITED = 2**20  # programs on each multiprocessor, if they need not run at the same time


def whole_set_unsupported(problem: NormProblem, device: Device) -> list[str]:
    w = walk(problem)
    if w.reps == 1 and (w.run < SHORTEST or w.run % LEAST_FOLD):
        return [f"a set is one run of fewer than {SHORTEST} elements, or its length is no multiple of {LEAST_FOLD}"]
    if w.total >= 2**30:
        return ["there are 2**30 sets or more, and programs are counted in 32 bits"]
    if not any(candidates(problem, w, device)):
        reason = f"a set of {w.reps} x {w.run} is too large for the registers of one team"
        return [reason + (device.no_team and f": {device.no_team}")]
    return []


@lru_cache(256)  # the planner needs the launches for the cost, and again for the plan
def whole_set_launches(problem: NormProblem, device: Device, invariant: bool) -> tuple[WholeSetLaunch, ...]:
    return fastest(problem, device, invariant, candidates, modelled_time)


def whole_set_cost(problem: NormProblem, device: Device, invariant: bool) -> float:
    if device.kind == "cpu":  # Triton's interpreter runs only if `onepass.force` asks for it
        return float("inf")
    (launch,) = whole_set_launches(problem, device, invariant)
    if invariant:  # then the choice of a family must not depend on the batch size
        return 1 / _rate(problem, launch) / 1e3
    return constants.WHOLE_SCALE * modelled_time(problem, launch, device)


def candidates(problem: NormProblem, w: Walk, device: Device) -> Iterator[WholeSetLaunch]:
    """Yield launches with teams of several sizes, and with few or many elements for each thread."""
    if w.reps == 1:
        w = fold(w, min(w.run & -w.run, FOLD))
    vector = min(w.run & -w.run, VECTOR_BYTES // problem.dtype.itemsize)
    most = 1 if device.kind == "cpu" or device.no_team else device.sms  # interpreted programs run one by one
    choice = PER_THREAD if device.prefetches else PER_THREAD_ON_AMD
    for size in sorted({most // teams for teams in range(1, most + 1)}):
        rows = ceil(w.reps / size)
        members, vectors = ceil(w.reps / rows), rows * w.run // vector
        for elements in choice:
            warps = warps_for(min(power_of_two(ceil(vectors * vector / elements)), THREADS), device)
            threads = warps * device.warp
            per_thread = ceil(vectors / threads)
            even = per_thread * threads == vectors and members * rows == w.reps
            masked = MOST_MASKED if device.chains else MOST_MASKED_BEFORE_HOPPER
            if per_thread * vector <= choice[-1] and per_thread <= (MOST_VECTORS if even or members == 1 else masked):
                programs_per_sm = THREADS // threads if members > 1 else UNLIMITED
                launch = WholeSetLaunch(
                    walk=w,
                    programs=team_programs(w.total, members, device, programs_per_sm),
                    warps=warps,
                    block_i=threads,
                    block_j=vector,
                    members=members,
                    programs_per_sm=programs_per_sm,
                    rows=rows,
                    vectors=per_thread,
                )
                if members == 1 or per_thread * vector <= MOST_WITH_OWN or not launch.own_parameters(problem):
                    yield launch


def modelled_time(problem: NormProblem, launch: WholeSetLaunch, device: Device) -> float:
    """Return the modelled time of a launch, in microseconds.

    Programs of teams wait for each other, and take one set after another. Other programs take one set each, and start as soon as
    another one ends.
    """
    own, elements = launch.own_parameters(problem), launch.vectors * launch.block_j  # elements of a thread
    each = constants.WHOLE_ELEMENT + constants.WHOLE_OWN * own + constants.WHOLE_ACTIVATION * bool(problem.spec.activation)
    factors = (
        (constants.WHOLE_CENTERED, own and problem.spec.centered),
        (constants.WHOLE_MASKED, not launch.even),
        (constants.WHOLE_ONE_BY_ONE, launch.block_j * problem.dtype.itemsize < 4),
        (constants.WHOLE_ADDED, problem.addends is not None),
        (constants.WHOLE_GELU, "gelu" in problem.spec.activation and problem.dtype.itemsize == 2),
        (constants.WHOLE_CROWDED, own and launch.block_i * elements >= REGISTERS // 2),
    )
    slower = product_of(factors)
    if problem.spec.centered:
        slower *= constants.WHOLE_THREADS ** max(log2(launch.block_i / LEAST_THREADS), 0.0)
    if launch.members > 1:
        at_once = max(device.sms * (THREADS // launch.block_i) // launch.members, 1)  # teams that can run at the same time
        rounds = ceil(launch.units / min(launch.teams, at_once))
        waits = constants.WHOLE_EXCHANGE + (rounds - 1) * constants.WHOLE_STALL
        waits += constants.WHOLE_ALONE * (launch.programs_per_sm == 1)
        waits += launch.members * (constants.WHOLE_MEMBER if launch.walk.sets == 1 else constants.WHOLE_MEMBER_APART)
    else:
        fit = max(REGISTERS // (launch.block_i * (OTHER_REGISTERS + elements * 5 // 4)), 1)  # programs on a multiprocessor
        turns = max(launch.units / (device.sms * fit), 1.0)
        rounds = ceil(launch.units / device.sms) if turns <= 2 else launch.units / device.sms  # the last programs matter less
        waits = (turns - 1) / fit * constants.WHOLE_REFILL
    moved = traffic_time(problem, launch, device, rounds * launch.rows * launch.walk.run, constants.WHOLE_BANDWIDTH, constants.WHOLE_FEW)
    return constants.WHOLE_LAUNCH + waits + each * elements + moved * slower / _rate(problem, launch)


def _rate(problem: NormProblem, launch: WholeSetLaunch) -> float:
    return 1.0 if launch.walk.folded else copy_rate(launch.walk.run * problem.dtype.itemsize)
