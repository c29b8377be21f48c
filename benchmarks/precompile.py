"""Compiles the kernels of random problems (stress_problems.py, sweep_problems.py) before they run.

Other processes compile, and need no GPU. The process that runs the kernels finds them in Triton's cache on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, TimeoutError, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from sys import maxsize
from typing import Any

import torch
import triton

from onepass.backends.family import BACKWARD, FORWARD, Launches
from onepass.bench.suite import Row, problem_of
from onepass.bench.terminal import progress
from onepass.core.device import Device
from onepass.core.problem import NormProblem
from onepass.planning.choose import plan
from onepass.planning.options import CannotForce, Options

from . import stress_problems
from .stress_problems import Problem

Families = Sequence[str | None]  # names of kernel families; None stands for the family that the planner chooses
Draw = Callable[[int, int], Any]  # returns the problem of a seed and an index: an object with `case`, `dtype` and `stats`


@dataclass(frozen=True)
class Job:
    """The kernel that another process is to compile, described by numbers, since a Triton function cannot be pickled."""

    seed: int
    index: int
    family: str | None
    number: int  # the index of the kernel in the list that `sources` returns
    draw: Draw = stress_problems.draw


def sources(problem: Any, device: Device, family: str | None) -> list[Any]:
    """Return the kernels with which a family runs a problem. The list is empty if the family cannot run it or has no kernels.

    A problem may have a `direction`. For a backward, these are the kernels of the forward and of the backward, both by the same family. A
    backward at an odd address compiles its kernels when it runs.
    """
    odd = bool(getattr(problem, "shift", 0))
    bound = replace(problem_of(Row(problem.case, problem.dtype)), aligned=not odd)
    try:
        chosen = plan(bound, device, FORWARD, Options(family))
        back = plan(bound, device, BACKWARD, Options(family)) if getattr(problem, "direction", FORWARD) == BACKWARD else None
    except CannotForce:
        return []
    if not chosen.launches:
        return []
    from onepass.backends.gpu.forward import kernels

    case = problem.case
    tracks = case.running and case.op == "batch_norm" and not (case.modulate or problem.stats)
    tracks = tracks and (case.wide or problem.dtype == torch.float32)  # kernels update running statistics in float32 only
    momentum = 0.1 if tracks else None  # any value will do
    statistics = bool(back) or problem.stats or (case.running and not momentum)
    found = kernels(bound, chosen.launches, statistics, case.residual, momentum=momentum)
    unaligned = odd and not chosen.launches[0].needs_aligned_x(bound)
    # Dispatch compiles these too, in `check_launchable`.
    pairs = zip(chosen.launches, kernels(bound, chosen.launches, False))
    checked = [kernel for launch, kernel in pairs if kernel.cooperative or launch.experimental]
    backward = _backward_kernels(bound, back.launches) if back and back.launches else []
    return [*(kernel.source() for kernel in (*found, *checked, *backward)), *(kernel.source(["x"]) for kernel in found if unaligned)]


def _backward_kernels(bound: NormProblem, launches: Launches) -> list[Any]:
    """Return the kernels of a backward with all gradients, and those that dispatch compiles in `check_launchable`."""
    from onepass.backends.gpu.backward import ALL, kernels

    found = [kernel for _, kernel in kernels(bound, launches, ALL, bool(bound.addends))]
    checked = [kernel for _, kernel in kernels(bound, launches, ALL) if kernel.cooperative or launches[0].experimental]
    return [*found, *(checked if bound.addends else [])]


def kernels_of(seed: int, device: Device, families: Families, index: int, draw: Draw = stress_problems.draw) -> dict[str, Job]:
    """Return the kernels with which all families run problem number `index`, each with the Job that compiles it."""
    found = ((family, sources(draw(seed, index), device, family)) for family in families)
    return {repr(source): Job(seed, index, family, at, draw) for family, kernels in found for at, source in enumerate(kernels)}


def new_jobs(known: set[str], needed: dict[str, Job], max_kernels: int) -> list[Job] | None:
    """Return the jobs of the `needed` kernels that are not in `known`, and add these kernels to `known`.

    If `known` would then have more than `max_kernels` kernels, return None and add nothing.
    """
    jobs = {kernel: job for kernel, job in needed.items() if kernel not in known}
    if len(known) + len(jobs) > max_kernels:
        return None
    known.update(jobs)
    return list(jobs.values())


def prepare(
    draw: Draw,
    seed: int,
    wanted: int,
    device: Device,
    families: Families,
    max_kernels: int,
    target: Any,
    workers: int = 14,
    seconds: float = 120,
) -> tuple[list[Problem], str]:
    """Draw problems, compile their kernels, and return the problems and a sentence about the compilation.

    There are `wanted` problems, or fewer if not enough are found that need at most `max_kernels` kernels in all. Kernels that
    are not compiled after `seconds` are compiled when they first run.
    """
    problems: list[Problem] = []
    known: set[str] = set()
    compiled: list[Future[None]] = []
    pool = new_pool(workers)
    looked = 0
    while len(problems) < wanted and looked < 20 * wanted:
        batch = range(looked, looked + wanted - len(problems))
        looked = batch.stop
        for index, needed in zip(batch, pool.map(partial(kernels_of, seed, device, families, draw=draw), batch, chunksize=20)):
            jobs = new_jobs(known, needed, max_kernels)
            if jobs is not None:
                problems.append(draw(seed, index))
                compiled += [pool.submit(_compile, job, device, target) for job in jobs]
    return problems, f"{len(problems)} of the first {looked} problems; {finish(pool, compiled, seconds)}"


def compile_ahead(
    draw: Draw,
    seed: int,
    indices: Sequence[int],
    device: Device,
    families: Families,
    target: Any,
    workers: int = 14,
    seconds: float | None = 120,
) -> str:
    """Compile the kernels of all these problems, for at most `seconds` if that is not None. Return a sentence about it."""
    pool, known = new_pool(workers), set[str]()
    compiled: list[Future[None]] = []
    for needed in pool.map(partial(kernels_of, seed, device, families, draw=draw), indices, chunksize=5):
        compiled += [pool.submit(_compile, job, device, target) for job in new_jobs(known, needed, maxsize) or ()]
    return finish(pool, compiled, seconds)


def new_pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))  # a fork of a process that has used CUDA may hang


def finish(pool: ProcessPoolExecutor, compiled: Sequence[Future[None]], seconds: float | None) -> str:
    """Wait until all kernels are compiled, or for `seconds` if that is not None. Return a sentence about them."""
    done: list[Future[None]] = []
    with suppress(TimeoutError):
        done.extend(progress(as_completed(compiled, seconds), len(compiled), lambda _: "kernels compiled"))
    pool.shutdown(wait=False, cancel_futures=True)
    errors = [error for future in done if (error := future.exception())]
    words = f"{len(done)} of {len(compiled)} kernels compiled ahead"
    return words + (f"; {len(errors)} failed, such as {errors[0]!r}" if errors else "")


def _compile(job: Job, device: Device, target: Any) -> None:
    build(sources(job.draw(job.seed, job.index), device, job.family)[job.number], target)


def build(source: Any, target: Any) -> None:
    """Compile a kernel, and on CUDA the C code that launches it. Triton caches both on disk."""
    kernel = source.compile(target)
    if torch.cuda.is_available():  # Triton 3.6 compiles a launcher in C for each kernel, which takes half a second
        driver: Any = triton.runtime.driver.active
        driver.launcher_cls(kernel.src, kernel.metadata)
