"""Measures one row of the suite with every provider: checks the results, times all in turn, and makes the records."""

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
    mode: str  # "graph": a replay; "events": the call itself, whose time is that of the slower of host and GPU; "cpu"
    host: Timing | None = None


def measure(row: Row, device: str = "cpu", providers: Mapping[str, Provider] = PROVIDERS) -> list[Record]:
    """One record for each provider. It has an `error` and no time if the call raised, or if our result is wrong.

    Example: `measure(SUITE[0], "cuda")[0]["fraction"]`
    """
    with torch.no_grad(), timing.capturable_stream(device):
        return _records(row, device, providers)


def _records(row: Row, device: str, providers: Mapping[str, Provider]) -> list[Record]:
    operands = tensors.make(row.case, row.dtype, device, on_device=True)
    dy = tensors.make_dy(operands, on_device=True) if row.direction == "backward" else None
    runs, outcomes, errors = _first_runs(row, operands, dy, providers)
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


def _first_runs(
    row: Row, operands: Operands, dy: Tensor | None, providers: Mapping[str, Provider]
) -> tuple[dict[str, Run], dict[str, Outcome], dict[str, str]]:
    """The call of each provider and its first outcome, or the error it raised.

    Each provider has its own running statistics.
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
            except RuntimeError as broken:  # the device is unusable now: do not blame the next provider
                raise RuntimeError(f"{row.name} by {name}: {broken}") from error
        else:
            runs[name], outcomes[name] = run, outcome
    return runs, outcomes, errors


def forward(provider: Provider, case: Case, operands: Operands) -> tuple[Run, Outcome]:
    """The call of a provider, and its outcome."""
    run = provider(case, operands)
    return run, accuracy.outcome(run(), operands)


def backward(provider: Provider, case: Case, operands: Operands, dy: Tensor) -> tuple[Run, Outcome]:
    """The backward as a call of its own, and its outcome. The forward runs once, here, and its graph is kept.

    Donated buffers are off: a compiled backward that runs again must not overwrite what the forward saved.
    """
    inputs = oracle.leaves(operands)
    with torch.enable_grad(), functorch.patch(donated_buffer=False):
        arguments = oracle.grad_arguments(provider(case, operands._replace(**inputs))(), inputs, dy)
        run = partial(torch.autograd.grad, *arguments, retain_graph=True)
        return run, Outcome(arguments[0][0].detach(), **oracle.gradients_by_name(inputs, run()))


def _memory(run: Run, on_cuda: bool) -> Record:
    """Bytes of the gradients, and other bytes at the peak of a backward, before the allocator rounds them up."""
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = _requested("current") if on_cuda else 0
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in run()}  # x and residual may share one
    gradients, peak = sum(storages.values()), _requested("peak") - before if on_cuda else None
    return {"peak_bytes": peak, "gradient_bytes": gradients, "extra_bytes": None if peak is None else peak - gradients}


def _requested(which: str) -> int:
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def _copy(operands: Operands) -> Run:
    """The smallest possible traffic: read x and write y. With a residual, also read it and write the sum."""
    source = operands.x if operands.residual is None else torch.stack((operands.x, operands.residual))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _time(copy: Run, runs: Mapping[str, Run], on_cuda: bool) -> tuple[Timing, dict[str, Measured]]:
    """Time the copy and every call, in turn."""
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
