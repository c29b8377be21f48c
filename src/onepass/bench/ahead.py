"""Compiles the kernels of drawn problems before their first run, in processes that need no GPU: Triton's cache on disk hands them over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from multiprocessing import get_context
from typing import Any

from ..device import Device
from ..families import FORWARD
from ..plan import CannotForce, Options, plan
from . import drawn
from .drawn import Problem
from .suite import Row, problem_of

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
    kernels = getattr(import_module(f"onepass.{chosen.module}"), "kernels", None)
    if kernels is None:
        return []
    return [kernel.source() for kernel in kernels(chosen, bound, problem.stats or problem.case.running, problem.case.residual)]


def admitted(seed: int, device: Device, families: Families, most: int) -> Iterator[tuple[Problem, list[Job]]]:
    """Problem by problem those that need no more than `most` kernels in all, the first to come; each with what must be compiled for it."""
    known: set[Any] = set()
    for index in count():
        problem = drawn.draw(seed, index)
        jobs: dict[Any, Job] = {}
        for family in families:
            for at, source in enumerate(sources(problem, device, family)):
                if source not in known:
                    jobs.setdefault(source, Job(seed, index, family, at))
        if len(known) + len(jobs) <= most:
            known |= jobs.keys()
            yield problem, list(jobs.values())


def prepare(
    seed: int, wanted: int, device: Device, families: Families, most: int, target: Any, workers: int = 14, seconds: float = 120
) -> tuple[list[Problem], str]:
    """So many problems with their kernels compiled, as far as that took no longer than `seconds`; and how it went, in words."""
    problems: list[Problem] = []
    compiled: list[Future[None]] = []
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))  # a fork of a process that has used CUDA may hang
    for problem, jobs in admitted(seed, device, families, most):
        problems.append(problem)
        compiled += [pool.submit(_compile, job, device, target) for job in jobs]
        if len(problems) == wanted:
            break
    done, _ = wait(compiled, seconds)
    pool.shutdown(wait=False, cancel_futures=True)
    errors = [error for future in done if (error := future.exception())]
    words = f"{len(problems)} problems, the last with index {problems[-1].index}; {len(done)} of {len(compiled)} kernels compiled ahead"
    return problems, words + (f", {len(errors)} of which failed, the first with {errors[0]!r}" if errors else "")


def _compile(job: Job, device: Device, target: Any) -> None:
    sources(drawn.draw(job.seed, job.index), device, job.family)[job.at].compile(target)
