"""A variant of a model: the model before or after `onepass.patch`.

It is run, compared with the model in float32, compiled and timed. A step is one forward, or one forward and backward.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

from onepass.bench import timing
from onepass.bench.record import Record, origin
from onepass.patching import patch

from .model_zoo import AHEAD, Entry

EAGER, COMPILE = MODES = ("eager", "compile")
# A patched model may have GRACE times the relative error of the unpatched model, plus ROUNDING, one rounding to bfloat16.
GRACE = 2.0
ROUNDING = 2.0**-8
Errors = dict[str, tuple[float, float]]  # for each result by name: (norm of its error, norm of the result)


class SharedMemory:
    """GPU memory that processes share: `with memory(gigabytes)` waits until so much is free, and takes it for the block.

    A request for more than there is takes all.
    """

    def __init__(self, gigabytes: int) -> None:
        processes = get_context("spawn")
        self._turn, self._free, self._all = processes.Lock(), processes.Semaphore(gigabytes), gigabytes

    @contextmanager
    def __call__(self, gigabytes: int) -> Iterator[None]:
        gigabytes = min(gigabytes, self._all)
        with self._turn:
            for _ in range(gigabytes):
                self._free.acquire()
        try:
            yield
        finally:
            for _ in range(gigabytes):
                self._free.release()


class Step:
    """One step of a model as a call: a forward or, in training, a forward and a backward. There is no optimizer."""

    def __init__(self, entry: Entry, model: nn.Module, inputs: tuple[Any, ...], forward: Callable[..., Tensor]) -> None:
        self.entry, self.model, self.inputs, self.forward = entry, model, inputs, forward
        self.taken = 0

    def __call__(self) -> Tensor:
        if self.entry.rewind and self.taken % AHEAD == 0:
            self.entry.rewind(*self.inputs)
        self.taken += 1
        if not self.entry.training:
            with torch.no_grad():
                return self.forward(self.model, *self.inputs)
        self.model.zero_grad()
        loss = self.forward(self.model, *self.inputs)
        loss.backward()
        return loss

    def results(self) -> dict[str, Tensor]:
        """Take the first step, and return its results by name: the output or loss, and in training all gradients."""
        self.taken = 0
        output = self().detach()
        gradients = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        self.model.zero_grad()
        return {"output": output, **gradients}


class Variant:
    """A model before or after `onepass.patch`, with methods that prepare and measure its eager and its compiled step."""

    def __init__(self, entry: Entry, patched: bool, small: bool, device: str, backend: str, memory: SharedMemory) -> None:
        self.entry, self.device, self.backend, self.memory = entry, device, backend, memory
        self.model = entry.build(small, device)
        shared = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        self.plain = copy.deepcopy(self.model, shared)  # the unpatched model, with the same parameters
        self.counts = patch(self.model, channels_last=entry.channels_last).counts if patched else None
        self.make_inputs = lambda model: entry.inputs(model, small)
        self.inputs = self.make_inputs(self.model)
        self.steps: dict[str, Step] = {}

    def ready(self, mode: str) -> Record:
        """Prepare the step of a mode: compile it if asked for, run it, and return its record, without the times of steps.

        The field `errors` of the record compares the results with those of the model in float32.
        """
        step = Step(self.entry, self.model, self.inputs, self.entry.forward)
        with self.memory(self.entry.gigabytes):
            about = self._compile(step) if mode == COMPILE else {"first_s": self._timed(step)}
            self._tidy()
        with self.memory(2 * self.entry.gigabytes):
            errors = self._errors(step)
            self._tidy()
        self.steps[mode] = step
        library: Any = import_module(self.entry.library)
        about |= {"norms": self.counts, "library": f"{self.entry.library} {library.__version__}"}
        return {**about, "errors": errors, **origin(self.device)}

    def _timed(self, step: Step) -> float:
        start = time.perf_counter()
        step()
        self._finish()
        return round(time.perf_counter() - start, 1)

    def _compile(self, step: Step) -> Record:
        counters: Any = import_module("torch._dynamo.utils").counters
        counters.clear()
        step.forward = torch.compile(step.forward, dynamic=False, backend=self.backend)
        seconds = self._timed(step)
        step()  # a second step, so that the counts include recompilations
        breaks = counters["graph_break"]
        return {
            **{"backend": self.backend, "compile_s": seconds, "graphs": counters["stats"]["unique_graphs"]},
            **{"graph_breaks": sum(breaks.values()), "break_reasons": [reason.strip().splitlines()[0][:200] for reason in breaks]},
        }

    def _errors(self, step: Step) -> Errors:
        exact = copy.deepcopy(self.plain).float()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            expected = Step(self.entry, exact, self.make_inputs(exact), self.entry.forward).results()
        del exact
        found = step.results()
        if found.keys() != expected.keys():
            raise RuntimeError(f"its results and those in float32 differ: {sorted(found.keys() ^ expected.keys())[:3]}")
        return {name: (_norm(found[name].float() - value), _norm(value)) for name, value in expected.items()}

    def peak(self, mode: str) -> int | None:
        """Return the most bytes allocated on the GPU during a step, including the parameters, or None on a CPU."""
        if self.device == "cpu":
            return None
        self._tidy()
        torch.cuda.reset_peak_memory_stats()
        self.steps[mode]()
        self._finish()
        self.model.zero_grad()
        return torch.cuda.max_memory_allocated()

    def gpu_milliseconds(self, mode: str, steps: int = 3) -> float | None:
        """Return the milliseconds of GPU work in a step, without the time that the GPU waits for the host. None on a CPU."""
        if self.device == "cpu":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                self.steps[mode]()
            self._finish()
        return round(sum(event.self_device_time_total for event in profile.key_averages()) / steps / 1e3, 4)

    def samples(self, mode: str, seconds: float) -> list[float]:
        """Time whole steps for about `seconds`, and return the seconds of each.

        On CUDA, events time a step, so the slower of host and GPU counts. On a CPU, 3 steps are timed.
        """
        step = self.steps[mode]
        if self.device != "cpu":
            return timing.device_samples([step], samples=int(seconds / 2e-3))[0]
        step()
        return [timing.once(step, 1) for _ in range(3)]

    def host(self, mode: str) -> list[float]:
        """Return samples of the host time of a step in seconds, or [] on a CPU or if the model does not decode tokens."""
        if self.device == "cpu" or not self.entry.rewind:
            return []
        # 4 steps make fewer than 1024 launches, at which CUDA would make the host wait.
        return timing.host_samples([self.steps[mode]], batches=5, max_calls=4)[0]

    def _finish(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _tidy(self) -> None:
        """Free gradients and unused memory, since other processes share this GPU."""
        self.model.zero_grad()
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()


def _norm(t: Tensor) -> float:
    return t.norm(dtype=torch.float64).nan_to_num(nan=torch.inf).item()


def error_ratio(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """Return the largest relative error of a result after patching, as a fraction of the allowed error, and the result's name.

    The allowed error is GRACE times the error of the same result before patching, or GRACE times the median error of all
    results if that is larger, plus one rounding. The median is needed because a result with few elements may be accurate by
    chance.
    """
    was, now = ({name: error / max(size, 1e-30) for name, (error, size) in errors.items()} for errors in (before, after))
    usual = statistics.median(was.values())
    ratios = {name: now[name] / (GRACE * max(error, usual) + ROUNDING) for name, error in was.items()}
    worst = max(ratios, key=ratios.__getitem__)
    return ratios[worst], worst


def total_error(errors: Mapping[str, tuple[float, float]]) -> float:
    """Return the relative error of all results together: the norm of all errors divided by the norm of all results."""
    return (sum(error**2 for error, _ in errors.values()) / sum(size**2 for _, size in errors.values())) ** 0.5
