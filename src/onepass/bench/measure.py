"""Measures one row of the suite, which is one forward or backward, with every provider: onepass, torch and torch.compile.

It checks the results, times the providers in turn, and makes one record for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as functorch

from onepass.planning.explain import explain
from onepass.verify import calls, oracle, tensors
from onepass.verify.cases import Case
from onepass.verify.oracle import Outcome
from onepass.verify.tensors import Operands

from . import accuracy, timing
from .providers import OURS, PROVIDERS, Provider
from .record import Record, dtype_name, origin
from .suite import Row
from .timing import Timing

Run = Callable[[], Any]


class Measured(NamedTuple):
    time: Timing
    mode: str  # what was timed. "graph": a CUDA graph of the call; "events": the call, with waits for the host; "cpu": the call
    host: Timing | None = None


def measure(row: Row, device: str = "cpu", providers: Mapping[str, Provider] = PROVIDERS) -> list[Record]:
    """Measure a row, and return one record for each provider.

    A record has an `error` and no time if the provider raised, or if the provider is onepass and its result is wrong.

    Example: `measure(SUITE[0], "cuda")[0]["fraction"]`
    """
    with torch.no_grad(), timing.capturable_stream(device):
        return _records(row, device, providers)


def _records(row: Row, device: str, providers: Mapping[str, Provider]) -> list[Record]:
    operands = tensors.make(row.case, row.dtype, device, on_device=True)
    dy = tensors.make_dy(operands, on_device=True) if row.direction == "backward" else None
    runs, outcomes, errors = first_runs(row, operands, dy, providers)
    budgets = accuracy.largest_errors(row.case, operands, outcomes, dy)
    outcomes.clear()  # timing needs their memory
    if budgets.get(OURS, 0) > 1:
        errors[OURS] = f"wrong: the largest error is {budgets[OURS]:.3g} of the budget"
        del runs[OURS]
    memory = {name: {} if dy is None else _memory(run, operands.x.is_cuda) for name, run in runs.items()}
    copy, measured = _time(_copy(operands), runs, operands.x.is_cuda)
    common = {
        **{"row": row.name, "op": row.case.op, "shape": row.case.shape, "layout": row.case.layout, "dtype": dtype_name(row.dtype)},
        **{"direction": row.direction, "target": row.target, "unit": row.unit},
        **{"copies": row.copies, "bytes": int(2 * row.copies * row.nbytes)},
        **{"copy_us": _us(copy.median), **origin(device)},
    }
    records: list[Record] = []
    for name in providers:
        record = common | {"provider": name, "plan": None}
        if name in budgets:
            record |= {"budget": budgets[name], "correct": budgets[name] <= 1}
            record["plan"] = str(getattr(explain(calls.by_onepass, row.case, operands), row.direction)) if name == OURS else None
        records.append(record | ({"error": errors[name]} if name in errors else _numbers(row, copy, measured[name]) | memory[name]))
    return records


def first_runs(
    row: Row, operands: Operands, dy: Tensor | None, providers: Mapping[str, Provider]
) -> tuple[dict[str, Run], dict[str, Outcome], dict[str, str]]:
    """Run each provider once. Return three dicts by provider: calls to time, their outcomes, and the errors raised.

    Each provider updates its own copy of the running statistics.
    """
    runs: dict[str, Run] = {}
    outcomes: dict[str, Outcome] = {}
    errors: dict[str, str] = {}
    for name, provider in providers.items():
        running = {key: None if t is None else t.clone() for key, t in zip(("running_mean", "running_var"), operands[3:5])}
        own = operands._replace(**running)
        try:
            run, outcome = forward(provider, row.case, own) if dy is None else backward(provider, row.case, own, dy)
            _synchronize(operands.x)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            try:
                _synchronize(operands.x)
            except RuntimeError as broken:  # the device is unusable now: stop, so that the next provider is not blamed
                raise RuntimeError(f"{row.name} by {name}: {broken}") from error
        else:
            runs[name], outcomes[name] = run, outcome
    return runs, outcomes, errors


def forward(provider: Provider, case: Case, operands: Operands) -> tuple[Run, Outcome]:
    """Return a provider's forward as a call without arguments, and its outcome."""
    run = provider(case, operands)
    return run, accuracy.outcome(run(), operands)


def backward(provider: Provider, case: Case, operands: Operands, dy: Tensor) -> tuple[Run, Outcome]:
    """Return a provider's backward as a call without arguments, and its outcome. The forward runs once, here.

    `donated_buffer=False` because the backward runs many times: when compiled, it must not overwrite what the forward saved.
    """
    inputs = oracle.leaves(operands)
    with torch.enable_grad(), functorch.patch(donated_buffer=False):
        arguments = oracle.grad_arguments(provider(case, operands._replace(**inputs))(), inputs, dy)
        run = partial(torch.autograd.grad, *arguments, retain_graph=True)
        return run, Outcome(arguments[0][0].detach(), **oracle.gradients_by_name(inputs, run()))


def _memory(run: Run, on_cuda: bool) -> Record:
    """Run a backward, and return its memory in bytes: the peak, the gradients, and the difference of the two.

    Bytes are counted as requested, before the allocator rounds them up. On a CPU, only the bytes of the gradients are known.
    """
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = _requested("current") if on_cuda else 0
    # By address, so that a storage shared by dx and dresidual counts once.
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in run()}
    gradients, peak = sum(storages.values()), _requested("peak") - before if on_cuda else None
    return {"peak_bytes": peak, "gradient_bytes": gradients, "extra_bytes": None if peak is None else peak - gradients}


def _requested(which: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def _copy(operands: Operands) -> Run:
    """Return a call that copies x and the residual, if any. A forward must move at least as many bytes."""
    source = operands.x if operands.residual is None else torch.stack((operands.x, operands.residual))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _time(copy: Run, runs: Mapping[str, Run], on_cuda: bool) -> tuple[Timing, dict[str, Measured]]:
    """Time the copy and every call in turn. Return the Timing of the copy, and a Measured for each provider."""
    if not on_cuda:
        first, *times = timing.interleaved([copy, *runs.values()])
        return first, {name: Measured(time, "cpu") for name, time in zip(runs, times)}
    replays = [timing.capture(run) for run in runs.values()]
    first, *times = timing.device_times([copy, *(replay for replay, _ in replays)])
    hosts = timing.host_times(list(runs.values()))
    return first, {name: Measured(time, mode, host) for name, time, (_, mode), host in zip(runs, times, replays, hosts)}


def _numbers(row: Row, copy: Timing, measured: Measured) -> Record:
    time, host = measured.time, measured.host
    fraction = row.copies / row.copied * copy.median / time.median
    missed = row.missed_by(time.median * 1e6, fraction)
    return {
        **{"us": _us(time.median), "low_us": _us(time.low), "high_us": _us(time.high), "fraction": round(fraction, 4)},
        **{
            "host_us": None if host is None else _us(host.median),
            "mode": measured.mode,
            "met": None if missed is None else missed <= 0,
        },
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
