"""Work that keeps a GPU busy while something else is tested on the same GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from onepass import functional
from onepass.planning.options import CannotForce, force

from .precompile import Families

SHAPES = (2, 320, 64, 64), (1, 96, 61, 67), (4, 1280, 16, 16)


def bits(t: Tensor) -> Tensor:
    """Return the bits of a tensor as integers. Compared in this way, NaN equals itself and -0 differs from 0."""
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


class BackgroundWork:
    """Work on two streams of the GPU, besides the stream of the test. Call `refill` often, to keep both busy.

    One stream runs matrix products and copies. The other runs norms by the given kernel families, eagerly and in a CUDA
    graph. The results of the norms must have the same bits as in their first run.
    """

    def __init__(self, families: Families) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        self.queues = [
            (torch.cuda.Stream(), work, deque([torch.cuda.Event(), torch.cuda.Event()], 2)) for work in (self._other_work(), self._norms)
        ]
        inputs = [torch.randn(shape, device="cuda").half().to(memory_format=torch.channels_last) for shape in SHAPES]
        norms = [partial(_norm, family, x) for family in families if family for x in inputs]
        self.norms = [norm for norm in norms if _can_run(norm)] or [partial(_norm, None, x) for x in inputs]
        self.firsts = [norm() for norm in self.norms]
        stream = self.queues[1][0]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            self._eager()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            for _ in range(4):
                self._eager()
        torch.cuda.synchronize()

    def refill(self) -> None:
        for stream, work, events in self.queues:
            if events[0].query():  # the last but one batch of work has finished
                with torch.cuda.stream(stream):
                    work()
                    event = torch.cuda.Event()
                    event.record()
                events.append(event)

    def check(self) -> str:
        """Wait for all streams. Return how many elements of the norms were wrong, in words, or "" if none were."""
        torch.cuda.synchronize()
        wrong = int(self.wrong.item())
        self.wrong.zero_()
        return f"{wrong} elements differ from their first run" if wrong else ""

    def _other_work(self) -> Callable[[], None]:
        a, big = torch.randn(2048, 2048, device="cuda").half(), torch.zeros(2**24, device="cuda")
        product, copy = torch.empty_like(a), torch.empty_like(big)

        def work() -> None:
            for _ in range(12):
                torch.mm(a, a, out=product)
                copy.copy_(big)

        return work

    def _norms(self) -> None:
        self._eager()
        self.graph.replay()

    def _eager(self) -> None:
        for norm, first in zip(self.norms, self.firsts):
            self.wrong.add_((bits(norm()) != bits(first)).sum())


def _norm(family: str | None, x: Tensor) -> Tensor:
    with torch.no_grad(), force(family):
        return functional.group_norm(x, 32, activation="silu")


def _can_run(norm: Callable[[], Tensor]) -> bool:
    try:
        norm()
    except CannotForce:
        return False
    return True
