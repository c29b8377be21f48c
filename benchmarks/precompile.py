"""Compiles the kernels of random problems before their first run.

The processes that compile need no GPU. They pass on the kernels through Triton's cache on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import triton

from onepass.backends.family import FORWARD
from onepass.bench.suite import Row, problem_of
from onepass.core.device import Device
from onepass.planning.choose import plan
from onepass.planning.options import CannotForce, Options

from . import stress_problems
from .stress_problems import Problem

Families = Sequence[str | None]  # None: the family that the planner chooses


@dataclass(frozen=True)
class Job:
    """One compilation. Another process finds the kernel by these numbers, since a JIT function cannot be pickled."""

    seed: int
    index: int
    family: str | None
    number: int  # of the kernel, in the order of `sources`


def sources(problem: Problem, device: Device, family: str | None) -> list[Any]:
    """The kernels with which a family runs a problem, in order. Empty if it cannot run the problem or has no kernels."""
    bound = problem_of(Row(problem.case, problem.dtype))
    try:
        chosen = plan(bound, device, FORWARD, Options(family))
    except CannotForce:
        return []
    if not chosen.launches:
        return []
    from onepass.backends.gpu.forward import kernels

    found = kernels(bound, chosen.launches, problem.stats or problem.case.running, problem.case.residual)
    cooperative = [kernel for kernel in kernels(bound, chosen.launches, False) if kernel.cooperative]  # what `check_launchable` compiles
    return [kernel.source() for kernel in (*found, *cooperative)]


def kernels_of(seed: int, device: Device, families: Families, index: int) -> dict[str, Job]:
    """The kernels of a problem on all families, each with the job that compiles it."""
    problem = stress_problems.draw(seed, index)
    return {repr(source): Job(seed, index, family, at) for family in families for at, source in enumerate(sources(problem, device, family))}


def new_jobs(known: set[str], needed: dict[str, Job], max_kernels: int) -> list[Job] | None:
    """The jobs of kernels that are not in `known`. Adds these kernels to `known`.

    Returns None, and adds nothing, if there would be more than `max_kernels` kernels.
    """
    jobs = {kernel: job for kernel, job in needed.items() if kernel not in known}
    if len(known) + len(jobs) > max_kernels:
        return None
    known.update(jobs)
    return list(jobs.values())


def prepare(
    seed: int, wanted: int, device: Device, families: Families, max_kernels: int, target: Any, workers: int = 14, seconds: float = 120
) -> tuple[list[Problem], str]:
    """`wanted` problems that need at most `max_kernels` kernels in all, and a sentence about the compilation.

    After `seconds`, kernels that are not compiled yet are left for the first run.
    """
    problems: list[Problem] = []
    known: set[str] = set()
    compiled: list[Future[None]] = []
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))  # a fork of a process that has used CUDA may hang
    looked = 0
    while len(problems) < wanted and looked < 20 * wanted:
        batch = range(looked, looked + wanted - len(problems))
        looked = batch.stop
        for index, needed in zip(batch, pool.map(partial(kernels_of, seed, device, families), batch, chunksize=20)):
            jobs = new_jobs(known, needed, max_kernels)
            if jobs is not None:
                problems.append(stress_problems.draw(seed, index))
                compiled += [pool.submit(_compile, job, device, target) for job in jobs]
    done, _ = wait(compiled, seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    errors = [error for future in done if (error := future.exception())]
    words = f"{len(problems)} of the first {looked} problems; {len(done)} of {len(compiled)} kernels compiled ahead"
    return problems, words + (f", {len(errors)} of which failed, the first with {errors[0]!r}" if errors else "")


def _compile(job: Job, device: Device, target: Any) -> None:
    build(sources(stress_problems.draw(job.seed, job.index), device, job.family)[job.number], target)


def build(source: Any, target: Any) -> None:
    """Compile a kernel, and the C code that launches it, into Triton's cache on disk."""
    kernel = source.compile(target)
    if torch.cuda.is_available():  # Triton 3.6 compiles a C launcher for each kernel in half a second, and caches it on disk too
        driver: Any = triton.runtime.driver.active
        driver.launcher_cls(kernel.src, kernel.metadata)
