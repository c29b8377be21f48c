"""One model before or after `onepass.patch`: runs it, compares it with float32, compiles it and times it."""

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
# A patched model may be off by GRACE times the error of the model before, plus one rounding to bfloat16.
GRACE = 2.0
ROUNDING = 2.0**-8
Errors = dict[str, tuple[float, float]]  # for each result, the norm of its error and its own norm


class SharedMemory:
    """GPU memory that processes share. A process waits until enough is free; a request larger than all takes all."""

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
    """One step of a model as a call: a forward, or a training step (forward and backward) without an optimizer."""

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
        """The results of the first step: its output, or the loss and all gradients."""
        self.taken = 0
        output = self().detach()
        gradients = {name: param.grad for name, param in self.model.named_parameters() if param.grad is not None}
        self.model.zero_grad()
        return {"output": output, **gradients}


class Variant:
    """A model with its steps, eager and compiled, and the measurements of them."""

    def __init__(self, entry: Entry, patched: bool, small: bool, device: str, backend: str, memory: SharedMemory) -> None:
        self.entry, self.device, self.backend, self.memory = entry, device, backend, memory
        self.model = entry.build(small, device)
        shared = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        self.plain = copy.deepcopy(self.model, shared)  # the unpatched modules, with the same parameters
        self.counts = patch(self.model, channels_last=entry.channels_last).counts if patched else None
        self.make_inputs = lambda model: entry.inputs(model, small)
        self.inputs = self.make_inputs(self.model)
        self.steps: dict[str, Step] = {}

    def ready(self, mode: str) -> Record:
        """Run the model once, compiled or not. Returns its record without times.

        `errors` are against the model in float32.
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
        step()  # the counts include recompilations
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
        """The most bytes allocated during a step, including the parameters."""
        if self.device == "cpu":
            return None
        self._tidy()
        torch.cuda.reset_peak_memory_stats()
        self.steps[mode]()
        self._finish()
        self.model.zero_grad()
        return torch.cuda.max_memory_allocated()

    def gpu_milliseconds(self, mode: str, steps: int = 3) -> float | None:
        """Milliseconds that the GPU works on a step. The rest of the time it waits for the host."""
        if self.device == "cpu":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                self.steps[mode]()
            self._finish()
        return round(sum(event.self_device_time_total for event in profile.key_averages()) / steps / 1e3, 4)

    def samples(self, mode: str, seconds: float) -> list[float]:
        """Seconds of whole steps.

        On CUDA, they are measured between events: the time of the slower of host and device.
        """
        step = self.steps[mode]
        if self.device != "cpu":
            return timing.device_samples([step], samples=int(seconds / 2e-3))[0]
        step()
        return [timing.once(step, 1) for _ in range(3)]

    def host(self, mode: str) -> list[float]:
        """Seconds of host time of short steps."""
        if self.device == "cpu" or not self.entry.rewind:
            return []
        return timing.host_samples([self.steps[mode]], batches=5, max_calls=4)[0]  # 4 steps: less than 1024 launches

    def _finish(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def _tidy(self) -> None:
        """Free unused memory, since other processes share this GPU."""
        self.model.zero_grad()
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()


def _norm(t: Tensor) -> float:
    return t.norm(dtype=torch.float64).nan_to_num(nan=torch.inf).item()


def error_ratio(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """The largest relative error of a result, as a fraction of the allowed error, and the name of the result.

    The allowed error is twice the error before, or twice the median error before if that is larger, plus one rounding. The
    median counts because a result with few elements may be right by chance.
    """
    was, now = ({name: error / max(size, 1e-30) for name, (error, size) in errors.items()} for errors in (before, after))
    usual = statistics.median(was.values())
    ratios = {name: now[name] / (GRACE * max(error, usual) + ROUNDING) for name, error in was.items()}
    worst = max(ratios, key=ratios.__getitem__)
    return ratios[worst], worst


def total_error(errors: Mapping[str, tuple[float, float]]) -> float:
    """The relative error of all results together."""
    return (sum(error**2 for error, _ in errors.values()) / sum(size**2 for _, size in errors.values())) ** 0.5
