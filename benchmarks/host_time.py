"""The host time of a call on a GPU, compared with torch: eager, with gradients, and under torch.compile.

Run it with `python -m benchmarks.host_time --out results/host-h200.jsonl`. A call is timed until it returns, not until the GPU has
finished. Tensors are small, so that the GPU never waits. onepass and torch run in turn, and the ratio is the median over all pairs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import functional as O
from onepass.bench import record, timing
from onepass.dispatch import front_door

CHAIN = 30  # norms in a compiled function


class Row(NamedTuple):
    name: str
    gate: float  # the ratio that issue 20 asks for
    grad: bool
    ours: Callable[[], Any]
    torchs: Callable[[], Any]
    norms: int = 1  # that one call computes


def rows(device: str) -> Iterator[Row]:
    """Yield the rows, each with tensors of its own."""

    def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def channels_last(*shape: int) -> Tensor:
        return new(*shape).to(memory_format=torch.channels_last)

    x, residual, w, b, scale = new(128, 1024), new(128, 1024), new(1024), new(1024), new(1, 1024)
    samples, c, d, g = x[None], new(320), new(320), channels_last(2, 320, 16, 16)
    shared = channels_last(4, 320, 64, 64)  # its sets are shared by a team of programs
    v, u = new(320, dtype=torch.float32), new(320, dtype=torch.float32)
    running = torch.zeros(320, device=device), torch.ones(320, device=device)
    forward: list[tuple[str, float, Callable[[], Any], Callable[[], Any]]] = [
        ("layer_norm", 1.1, lambda: O.layer_norm(x, (1024,), w, b), lambda: F.layer_norm(x, (1024,), w, b)),
        ("rms_norm", 1.1, lambda: O.rms_norm(x, (1024,), w, 1e-6), lambda: F.rms_norm(x, (1024,), w, 1e-6)),
        ("add_rms_norm", 0.9, lambda: O.add_rms_norm(x, residual, (1024,), w, 1e-6), lambda: F.rms_norm(x + residual, (1024,), w, 1e-6)),
        (
            "layer_norm, modulated",
            0.9,
            lambda: O.layer_norm(samples, (1024,), modulate=(scale, scale)),
            lambda: F.layer_norm(samples, (1024,)) * (1 + scale) + scale,
        ),
        (
            "group_norm + SiLU by a team",
            0.6,
            lambda: O.group_norm(shared, 32, c, d, activation="silu"),
            lambda: F.silu(F.group_norm(shared, 32, c, d)),
        ),
        ("batch_norm, evaluation", 1.3, lambda: O.batch_norm(g, *running, v, u), lambda: F.batch_norm(g, *running, v, u)),
        ("batch_norm, training", 1.3, lambda: O.batch_norm(g, *running, v, u, True), lambda: F.batch_norm(g, *running, v, u, True)),
    ]
    both: list[tuple[str, float, Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = [
        ("layer_norm", 1.25, lambda x, w, b: O.layer_norm(x, (1024,), w, b), lambda x, w, b: F.layer_norm(x, (1024,), w, b), [x, w, b]),
        ("rms_norm", 1.25, lambda x, w: O.rms_norm(x, (1024,), w, 1e-6), lambda x, w: F.rms_norm(x, (1024,), w, 1e-6), [x, w]),
        (
            "group_norm + SiLU",
            0.5,
            lambda x, w, b: O.group_norm(x, 32, w, b, activation="silu"),
            lambda x, w, b: F.silu(F.group_norm(x, 32, w, b)),
            [g, c, d],
        ),
        (
            "batch_norm",
            1.3,
            lambda x, w, b: O.batch_norm(x, *running, w, b, True),
            lambda x, w, b: F.batch_norm(x, *running, w, b, True),
            [g, v, u],
        ),
    ]
    for name, gate, ours, torchs in forward:
        yield Row(name, gate, False, ours, torchs)
    for name, gate, ours, torchs, tensors in both:
        yield Row(f"{name}, forward and backward", gate, True, _with_gradients(ours, tensors), _with_gradients(torchs, tensors))
    if device != "cpu":
        yield from _compiled(g, c, d)


def _with_gradients(norm: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Callable[[], Any]:
    """Return a call of the norm and of its backward."""
    leaves, dy = [t.clone().requires_grad_() for t in tensors], torch.randn_like(tensors[0])
    return lambda: torch.autograd.grad(norm(*leaves), leaves, dy)


def _compiled(g: Tensor, c: Tensor, d: Tensor) -> Iterator[Row]:
    """A chain of norms under torch.compile, against inductor's own. A forced family makes sure that ours stay in the graph."""

    def chain(norm: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for _ in range(CHAIN):
                x = norm(x)
            return x

        return torch.compile(run, fullgraph=True)

    def norm(x: Tensor) -> Tensor:
        return O.group_norm(x, 32, c, d, activation="silu")

    ours = chain(norm)
    with onepass.force(onepass.explain(norm, g).forward.family), torch.no_grad():
        ours(g)
    torchs = chain(lambda x: F.silu(F.group_norm(x, 32, c, d)))
    yield Row("group_norm + SiLU, compiled", 1.0, False, lambda: ours(g), lambda: torchs(g), CHAIN)


def measure(row: Row, batches: int) -> record.Record:
    """Time a row. The ratio is the median of the ratios of pairs."""
    with torch.set_grad_enabled(row.grad):
        for _ in range(20):
            row.ours()
            row.torchs()
        sample = timing.host_samples if torch.cuda.is_available() else _cpu_samples
        ours, torchs = sample([row.ours, row.torchs], batches)
    ratio = statistics.median(a / b for a, b in zip(ours, torchs))
    times = {name: round(statistics.median(taken) * 1e6 / row.norms, 2) for name, taken in (("ours_us", ours), ("torch_us", torchs))}
    return {"row": row.name, "provider": "onepass", "gate": row.gate, "ratio": round(ratio, 3), **times, "pairs": batches}


def _cpu_samples(variants: Sequence[Callable[[], Any]], batches: int) -> list[list[float]]:
    """Return the seconds of each call, for tests without a GPU."""
    pairs = [[timing.once(run, 3) for run in variants] for _ in range(batches)]
    return [list(taken) for taken in zip(*pairs)]


def main(args: list[str] | None = None, batches: int = 200) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_time", description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="merge the results into this file, one JSON object per line")
    options = parser.parse_args(args)
    front_door.open_now()
    origin, found = record.origin(options.device), []
    print(f"{'':44} {'onepass':>9} {'torch':>9}   ratio   gate   (µs a norm, {origin['name']}, torch {origin['torch']})")
    for row in rows(options.device):
        found.append(measure(row, batches) | origin)
        f = found[-1]
        print(f"{f['row']:44} {f['ours_us']:9.1f} {f['torch_us']:9.1f} {f['ratio']:7.2f} {f['gate']:6.2f}", flush=True)
    if options.out:
        record.write(options.out, record.merge(record.read(options.out) if options.out.exists() else [], found))


if __name__ == "__main__":
    main()
