"""Work in several stages (src/batches.h): one parallel region for a call, and the same bits whenever threads run."""

from __future__ import annotations

import shutil
import time
from ctypes import CFUNCTYPE, c_uint, c_void_p, cast
from threading import Thread

import pytest
import torch

import onepass.functional as F
from onepass.backends.c import build, library

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")

PARALLEL = CFUNCTYPE(None, c_void_p, c_void_p, c_uint, c_uint)  # GOMP_parallel(function, argument, threads, flags)
TASKS = CFUNCTYPE(None, c_void_p)


@pytest.fixture
def regions():
    """Replace GOMP_parallel by a function of the test: regions(run) calls run(tasks, threads), and returns how often it was called."""
    before, kept = torch.get_num_threads(), []

    def install(run):
        calls = []

        def parallel(function, argument, threads, flags):
            calls.append(threads)
            run(lambda: cast(function, TASKS)(argument), threads)

        kept.append(PARALLEL(parallel))  # ctypes does not keep it alive
        build.library().onepass_threads(kept[-1])
        return calls

    library.load()
    yield install
    build.library().onepass_threads(library._openmp()[0])
    torch.set_num_threads(before)


def by_one_thread(tasks, threads):
    tasks()


def interrupted(tasks, threads):
    """Run all threads, of which the later ones start late, as if another process were busy."""

    def late(delay):
        time.sleep(delay)
        tasks()

    workers = [Thread(target=late, args=(2e-3 * i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def norms(samples):
    """Return norms that take the tile walk and the row walk, with sets that threads share, and their operands."""
    torch.manual_seed(0)
    x = torch.randn(samples, 64, 128, 130)  # a sample is larger than a batch of 4 MB
    w, b = torch.randn(64), torch.randn(64)
    last = x.to(memory_format=torch.channels_last)
    return {
        "tiles": (lambda *p: F.group_norm(p[0], 16, *p[1:]), (last, w, b)),
        "tiles, silu": (lambda *p: F.group_norm(p[0], 16, *p[1:], activation="silu"), (last, w, b)),
        "tiles, bfloat16": (lambda *p: F.group_norm(p[0], 16, *p[1:], activation="relu"), (last.to(torch.bfloat16), w, b)),
        "batch": (lambda *p: F.batch_norm(p[0], None, None, *p[1:], training=True), (last, w, b)),
        "rows": (lambda *p: F.group_norm(p[0], 2, *p[1:]), (x, w, b)),
    }


def step(norm, operands):
    leaves = [t.detach().requires_grad_() for t in operands]
    y = norm(*leaves)
    dy = torch.randn(y.numel(), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(y.dtype)  # equal in all dtypes
    dy = dy.as_strided(y.shape, y.stride())
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("samples", [1, 4])
def test_a_call_opens_one_region(regions, samples):
    torch.set_num_threads(2)
    for name, (norm, operands) in norms(samples).items():
        calls = regions(by_one_thread)
        with torch.no_grad():
            norm(*operands)
        assert calls == [2], name
        step(norm, operands)
        assert calls == [2] * 3, name  # one for the forward of the step, one for its backward


@pytest.mark.parametrize("samples", [1, 6])  # 6 are more than BATCHES_IN_FLIGHT
def test_interrupted_threads_do_not_change_bits(regions, samples):
    for name, (norm, operands) in norms(samples).items():
        torch.set_num_threads(1)
        alone = step(norm, operands)
        torch.set_num_threads(3)
        for run in (by_one_thread, interrupted):
            calls = regions(run)
            assert all(map(torch.equal, alone, step(norm, operands))) and calls, (name, run)


def test_many_batches_are_accurate():
    for name, (norm, operands) in norms(6).items():
        exact = step(norm, [t.double() for t in operands])
        for output, found, right in zip(("y", "dx", "dweight", "dbias"), step(norm, operands), exact, strict=True):
            error = (found.double() - right).norm() / right.norm()
            assert error < (1e-2 if operands[0].dtype == torch.bfloat16 else 1e-5), (name, output)
