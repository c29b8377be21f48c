"""Compiles the kernels of drawn problems before their first run, in processes that need no GPU: Triton's cache on disk hands them over."""

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

Families = Sequence[str | None]  # None: the planner's own choice


@dataclass(frozen=True)
class Job:
    """One compilation, as another process finds it again: a kernel of JIT functions does not travel."""

    seed: int
    index: int
    family: str | None
    at: int


def sources(problem: Problem, device: Device, family: str | None) -> list[Any]:
    """The kernels of a problem by a family, in order; none where it cannot, or has none."""
    bound = problem_of(Row(problem.case, problem.dtype))
    try:
        chosen = plan(bound, device, FORWARD, Options(family))
    except CannotForce:
        return []
    if not chosen.launches:
        return []
    from onepass.backends.gpu.forward import kernels

    found = kernels(bound, chosen.launches, problem.stats or problem.case.running, problem.case.residual)
    settled = [kernel for kernel in kernels(bound, chosen.launches, False) if kernel.cooperative]  # what `check_launchable` compiles
    return [kernel.source() for kernel in (*found, *settled)]


def needs(seed: int, device: Device, families: Families, index: int) -> dict[str, Job]:
    """The kernels of a problem, each with its compilation."""
    problem = stress_problems.draw(seed, index)
    return {repr(source): Job(seed, index, family, at) for family in families for at, source in enumerate(sources(problem, device, family))}


def admit(known: set[str], needed: dict[str, Job], most: int) -> list[Job] | None:
    """What must be compiled for a problem that leaves it at `most` kernels in all, which are then known; None for another."""
    jobs = {kernel: job for kernel, job in needed.items() if kernel not in known}
    if len(known) + len(jobs) > most:
        return None
    known.update(jobs)
    return list(jobs.values())


def prepare(
    seed: int, wanted: int, device: Device, families: Families, most: int, target: Any, workers: int = 14, seconds: float = 120
) -> tuple[list[Problem], str]:
    """So many problems with their kernels compiled, as far as that took no longer than `seconds`; and how it went, in words."""
    problems: list[Problem] = []
    known: set[str] = set()
    compiled: list[Future[None]] = []
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))  # a fork of a process that has used CUDA may hang
    looked = 0
    while len(problems) < wanted and looked < 20 * wanted:
        batch = range(looked, looked + wanted - len(problems))
        looked = batch.stop
        for index, needed in zip(batch, pool.map(partial(needs, seed, device, families), batch, chunksize=20)):
            jobs = admit(known, needed, most)
            if jobs is not None:
                problems.append(stress_problems.draw(seed, index))
                compiled += [pool.submit(_compile, job, device, target) for job in jobs]
    done, _ = wait(compiled, seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    errors = [error for future in done if (error := future.exception())]
    words = f"{len(problems)} of the first {looked} problems; {len(done)} of {len(compiled)} kernels compiled ahead"
    return problems, words + (f", {len(errors)} of which failed, the first with {errors[0]!r}" if errors else "")


def _compile(job: Job, device: Device, target: Any) -> None:
    build(sources(stress_problems.draw(job.seed, job.index), device, job.family)[job.at], target)


def build(source: Any, target: Any) -> None:
    """Compile a kernel, and the C code that launches it, into Triton's cache on disk."""
    kernel = source.compile(target)
    if torch.cuda.is_available():  # Triton 3.6 compiles a launcher in C for each kernel, half a second, and keeps that on disk too
        driver: Any = triton.runtime.driver.active
        driver.launcher_cls(kernel.src, kernel.metadata)
