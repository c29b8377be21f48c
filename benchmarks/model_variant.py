"""A variant of a model: the model before or after `onepass.patch`.

It is run, compared with the model in float32, compiled and timed. A step is one forward, or one forward and backward.
The mode REDUCE_OVERHEAD is `torch.compile(mode="reduce-overhead")`, which replays CUDA graphs.
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from onepass.bench.record import Record, origin
from onepass.patching import patch

from .model_zoo import AHEAD, Entry
from .shared_memory import SharedMemory

EAGER, COMPILE, REDUCE_OVERHEAD = MODES = ("eager", "compile", "reduce-overhead")
# For each mode, the field `provider` of the records before and after `onepass.patch`.
PROVIDERS = {EAGER: ("before", "after")} | {
    mode: (f"{name} before", f"{name} after") for mode, name in ((COMPILE, "compiled"), (REDUCE_OVERHEAD, REDUCE_OVERHEAD))
}
CORES = 4  # for the threads of a step on a GPU: that of Python, that of autograd, and what CUDA starts
WARM_UP = 3  # the third step is the first that replays a CUDA graph: the first allocates, the second records
# A patched model may have GRACE times the relative error of the unpatched model, plus ROUNDING, one rounding to bfloat16.
GRACE = 2.0
# The gradient of a key's bias is 0, because softmax ignores it: all that is left is noise. Two noises differ by more than GRACE.
NOISE, NOISE_GRACE = 0.5, 16.0
ROUNDING = 2.0**-8
Errors = dict[str, tuple[float, float]]  # for each result by name: (norm of its error, norm of the result)


@contextmanager
def same_cores() -> Iterator[None]:
    """Let all threads of this process run on the first cores of the machine, as the threads of the other variant do.

    Cores differ in their speed and in their distance to the GPU. Without this, a model without one changed kernel was between 0.79
    and 1.12 times as fast as itself (BERT, compiled, H200, 2026-11-17).
    """
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        yield
        return
    allowed = os.sched_getaffinity(0)
    few = sorted(allowed)[:CORES]
    try:
        _pin(tasks, few)
        yield
    finally:
        _pin(tasks, allowed)


def _pin(tasks: Path, cores: Iterable[int]) -> None:
    for task in tasks.iterdir():
        with suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setaffinity(int(task.name), cores)


class Step:
    """One step of a model as a call: a forward or, in training, a forward and a backward. There is no optimizer."""

    def __init__(self, entry: Entry, model: nn.Module, inputs: tuple[Any, ...], forward: Callable[..., Tensor]) -> None:
        self.entry, self.model, self.inputs, self.forward = entry, model, inputs, forward
        self.taken = 0

    def __call__(self) -> Tensor:
        if self.entry.rewind and self.taken % AHEAD == 0:
            self.entry.rewind(*self.inputs)
        self.taken += 1
        torch.compiler.cudagraph_mark_step_begin()
        if not self.entry.training:
            with torch.no_grad():
                return self.forward(self.model, *self.inputs)
        self.model.zero_grad()  # sets gradients to None, since the next step overwrites the memory of a CUDA graph
        loss = self.forward(self.model, *self.inputs)
        loss.backward()
        return loss

    def results(self) -> dict[str, Tensor]:
        """Take the first step, and return copies of its results: the output or loss, and in training all gradients, by name."""
        self.taken = 0
        output = self().detach().clone()
        gradients = {name: param.grad.clone() for name, param in self.model.named_parameters() if param.grad is not None}
        self.model.zero_grad()
        return {"output": output, **gradients}


class Variant:
    """A model before or after `onepass.patch`, with methods that prepare and measure its step in each mode."""

    def __init__(self, entry: Entry, patched: bool, small: bool, device: str, backend: str, memory: SharedMemory) -> None:
        self.entry, self.device, self.backend, self.memory = entry, device, backend, memory
        self.model = entry.build(small, device)
        shared = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        self.plain = copy.deepcopy(self.model, shared)  # the unpatched model, with the same parameters
        self.counts = patch(self.model, channels_last=entry.channels_last).counts if patched else None
        self.make_inputs = lambda model: entry.inputs(model, small)
        self.inputs = self.make_inputs(self.model)
        self.steps: dict[str, Step] = {}
        self.plain_steps: dict[str, Step] = {}  # of the unpatched model
        self.peaks: dict[str, int | None] = {}
        self.expected: dict[str, Tensor] | None = None

    def ready(self, mode: str) -> Record:
        """Prepare the step of a mode: compile it if asked for, run it, and return its record, without the times of steps.

        The field `errors` of the record compares the results with those of the model in float32.
        """
        step = Step(self.entry, self.model, self.inputs, self.entry.forward)
        with self.memory(self.entry.gigabytes):
            about = {"first_s": self._timed(step)} if mode == EAGER else self._compile(step, mode)
            self.rest()
        with self.memory(self.entry.gigabytes if self.expected else 2 * self.entry.gigabytes):
            errors = self._errors(step)
            self.steps[mode], self.peaks[mode] = step, self._peak(step)
            self.rest()
        library: Any = import_module(self.entry.library)
        about |= {"norms": self.counts, "library": f"{self.entry.library} {library.__version__}"}
        return {**about, "errors": errors, **origin(self.device)}

    def ready_before(self, mode: str) -> None:
        """Prepare the step of the model before `patch`, which this process also has.

        The process of the unpatched model should have compiled it already: then inductor finds its code in the cache.
        """
        step = Step(self.entry, self.plain, self.make_inputs(self.plain), self.entry.forward)
        with self.memory(self.entry.gigabytes):
            if mode == EAGER:
                step()
            else:
                self._compile(step, mode)
            self.rest()
        self.plain_steps[mode] = step

    def drop(self, mode: str) -> None:
        """Free what the step of a mode holds. A CUDA graph holds all memory of a step."""
        del self.steps[mode]
        torch._dynamo.reset()
        self.rest()

    def _timed(self, step: Step) -> float:
        start = time.perf_counter()
        step()
        self._finish()
        return round(time.perf_counter() - start, 1)

    def _compile(self, step: Step, mode: str) -> Record:
        counters: Any = import_module("torch._dynamo.utils").counters
        counters.clear()
        # Only inductor has modes.
        inductor_mode = mode if mode == REDUCE_OVERHEAD and self.backend == "inductor" else None
        step.forward = torch.compile(_own_code(step.forward), dynamic=False, backend=self.backend, mode=inductor_mode)
        seconds = self._timed(step)
        for _ in range(WARM_UP - 1):  # so that the counts include recompilations
            step()
        breaks = counters["graph_break"]
        return {
            **{"backend": self.backend, "compile_s": seconds, "graphs": counters["stats"]["unique_graphs"]},
            **{"graph_breaks": sum(breaks.values()), "break_reasons": [reason.strip().splitlines()[0][:200] for reason in breaks]},
            **({"cudagraph_skips": counters["inductor"]["cudagraph_skips"]} if mode == REDUCE_OVERHEAD else {}),
        }

    def _errors(self, step: Step) -> Errors:
        expected = self.expected = self.expected or self._exact_results()
        found = step.results()
        if found.keys() != expected.keys():
            raise RuntimeError(f"its results and those in float32 differ: {sorted(found.keys() ^ expected.keys())[:3]}")
        return {name: (_norm(found[name].float() - (value := expected[name].to(self.device))), _norm(value)) for name in expected}

    def _exact_results(self) -> dict[str, Tensor]:
        """Return the results of the model in float32. They are kept on the CPU for all modes, since GPU memory is short."""
        exact = copy.deepcopy(self.plain).float()
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            results = Step(self.entry, exact, self.make_inputs(exact), self.entry.forward).results()
        return {name: value.cpu() for name, value in results.items()}

    def peak(self, mode: str) -> int | None:
        """Return the most bytes allocated on the GPU during a step, including the parameters, or None on a CPU."""
        return self.peaks[mode]

    def _peak(self, step: Step) -> int | None:
        """Measure the bytes for `peak`. Call it before this process has the other model's inputs and graphs, too."""
        if self.device == "cpu":
            return None
        self.rest()
        torch.cuda.reset_peak_memory_stats()
        step()
        self._finish()
        self.model.zero_grad()
        return torch.cuda.max_memory_allocated()

    def seconds(self, mode: str, steps: int, warm: bool) -> float:
        """Return the seconds of a step as a loop of steps takes them: host and GPU, with one synchronization at the end.

        With `warm`, one step comes before, because another step or process has used the machine in the meantime.
        """
        return self._seconds(self.steps[mode], steps, warm)

    def plain_seconds(self, mode: str, steps: int, warm: bool) -> float:
        """As `seconds`, for the model before `patch`."""
        return self._seconds(self.plain_steps[mode], steps, warm)

    def _seconds(self, step: Step, steps: int, warm: bool) -> float:
        with nullcontext() if self.device == "cpu" else same_cores():
            if warm:
                step()
            self._finish()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            self._finish()
            return (time.perf_counter() - start) / steps

    def start_profiler(self) -> None:
        """Run the profiler once, since its first run takes seconds. It slows down all later launches in this process."""
        if self.device != "cpu":
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
                torch.zeros(1, device=self.device)
                self._finish()

    def gpu(self, mode: str) -> Record:
        """Return the milliseconds of GPU work in a step, without the time that the GPU waits, and the number of our kernels.

        On a CPU, return {}.
        """
        return self._gpu(self.steps[mode])

    def plain_gpu(self, mode: str) -> Record:
        """As `gpu`, for the model before `patch`."""
        return self._gpu(self.plain_steps[mode])

    def _gpu(self, step: Step, steps: int = 3) -> Record:
        if self.device == "cpu":
            return {}
        for _ in range(WARM_UP):
            step()
        self._finish()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                step()
            self._finish()
        self.rest()
        events, ours = profile.key_averages(), _kernel_names()
        return {
            "gpu_ms": round(sum(event.self_device_time_total for event in events) / steps / 1e3, 4),
            "our_kernels": round(sum(event.count for event in events if event.key in ours) / steps),
        }

    def _finish(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    def rest(self) -> None:
        """Free gradients and unused memory, since other processes share this GPU."""
        self.model.zero_grad()
        gc.collect()
        if self.device != "cpu":
            torch.cuda.empty_cache()


def _own_code(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of the function with a code object of its own. Dynamo keeps compiled code by code object.

    So no mode finds what another mode compiled.
    """
    assert isinstance(forward, FunctionType)
    return FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)


def _kernel_names() -> set[str]:
    """Return the names of onepass's GPU kernels, and of their device functions, in all modules imported so far."""
    jit: Any = import_module("triton.runtime.jit").JITFunction
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("onepass.backends.gpu")]
    return {value.__name__ for module in modules for value in vars(module).values() if isinstance(value, jit)}


def _norm(t: Tensor) -> float:
    return t.norm(dtype=torch.float64).nan_to_num(nan=torch.inf).item()


def error_ratio(before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]) -> tuple[float, str]:
    """Return the largest relative error of a result after patching, as a fraction of the allowed error, and the result's name.

    The allowed error is GRACE times the error of the same result before patching, or GRACE times the usual error if that is
    larger, plus one rounding. Nine of ten results have at most the usual error before patching. It is needed because a
    result with few elements may be accurate by chance. Noise, a result with an error before of more than NOISE, may have
    NOISE_GRACE times that error.
    """
    was, now = ({name: error / max(size, 1e-30) for name, (error, size) in errors.items()} for errors in (before, after))
    results = sorted(error for error in was.values() if error <= NOISE) or [0.0]
    usual = results[round(0.9 * (len(results) - 1))]
    grace = {name: NOISE_GRACE if error > NOISE else GRACE for name, error in was.items()}
    ratios = {name: now[name] / (grace[name] * max(error, usual) + ROUNDING) for name, error in was.items()}
    worst = max(ratios, key=ratios.__getitem__)
    return ratios[worst], worst


def total_error(errors: Mapping[str, tuple[float, float]]) -> float:
    """Return the relative error of all results together: the norm of all errors divided by the norm of all results."""
    return (sum(error**2 for error, _ in errors.values()) / sum(size**2 for _, size in errors.values())) ** 0.5
