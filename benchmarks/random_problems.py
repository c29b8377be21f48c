"""Runs random problems on the CPU by one kernel family, forward and backward, and checks them with the float64 oracle.

`python -m benchmarks.random_problems --count 10000` checks each result against the error budget of verify/oracle.py, and
checks that 1 and 3 threads give the same bits. `make sanitize` runs it with C kernels compiled with sanitizers. The seed and
the index alone determine a problem, so `--only INDEX` repeats one.
"""

from __future__ import annotations

import argparse
import bisect
import sys
import time
from collections.abc import Iterator
from math import prod
from random import Random
from typing import NamedTuple

import torch

from onepass.backends.c import problem as c_problem
from onepass.bench.record import dtype_name
from onepass.core.spec import ACTIVATIONS
from onepass.planning.options import CannotForce, force
from onepass.verify import calls, cases, oracle, tensors
from onepass.verify.cases import Case
from onepass.verify.oracle import Outcome

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_ELEMENTS = 1 << 14  # the most elements of x in 98 % of the problems; the others have up to 16 times as many
THREADS = (1, 3)

# Lengths at which the C kernels begin to divide the work differently. A third of the problems have a dimension of about such a
# length.
EDGES = (1, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1 << 10, 1 << 12, 1 << 14, 1 << 15, 1 << 16, 1 << 17)


class Drawn(NamedTuple):
    case: Case
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.case.name} {dtype_name(self.dtype)}"


def draw(seed: int, index: int) -> Drawn:
    """Return problem number `index`. It is the same on every machine.

    Example: `draw(0, 17).name`
    """
    rng = Random(f"fuzz {seed} {index}")

    def maybe(chance: float) -> bool:
        return rng.random() < chance

    op = rng.choice(tuple(calls.OPS))
    rows = op in ("layer_norm", "rms_norm")
    most = MAX_ELEMENTS if maybe(0.98) else 16 * MAX_ELEMENTS
    dims = rng.randint(2, 4) if rows else rng.randint(3, 5) if op == "layer_norm2d" else rng.randint(2, 5)
    edge = maybe(0.35)
    shape = _near_an_edge(rng, dims, most) if edge else _shape(rng, dims, most)
    last = op in ("group_norm", "instance_norm", "batch_norm", "switchable_norm") and maybe(0.25)
    channel_dim = dims - 1 if last else 1
    if op == "instance_norm" and dims == 2:
        shape = (*shape[:1], shape[1], 5)
        channel_dim = 2 if last else 1
    if not edge and maybe(0.3):  # give it few channels
        shape = tuple(rng.choice((1, 3, 17)) if i == channel_dim else n for i, n in enumerate(shape))
    elif edge and not rows and maybe(0.4):  # merge all channels into one
        shape = (shape[0] * shape[channel_dim], *(1 if i == channel_dim else n for i, n in enumerate(shape) if i))
    groups = rng.choice([g for g in range(1, shape[channel_dim] + 1) if shape[channel_dim] % g == 0]) if op == "group_norm" else 1
    one_value = prod(shape) == shape[channel_dim]  # a channel has one value, so it has no variance
    tracks = op in ("instance_norm", "batch_norm", "switchable_norm")
    evaluate = tracks and (one_value or maybe(0.6 if edge else 0.25))
    running = tracks and maybe(0.4)
    activation = rng.choice(("", "", "", *ACTIVATIONS)) if not edge or maybe(0.5) else ""
    rank = rng.randint(1, min(3, dims - 1)) if rows else 1
    affine = rng.choice(cases.AFFINES)
    residual = op in ("layer_norm", "rms_norm", "group_norm") and maybe(0.2)
    return Drawn(
        Case(
            op,
            shape,
            layout=rng.choice(cases.LAYOUTS[:-1]),
            groups=groups,
            rank=rank,
            affine=affine,
            wide=maybe(0.3),
            init=rng.choice((*("normal", "normal", "uniform", "int", "const", "shifted"), *(("one_inf",) if not tracks else ()))),
            running=running,
            evaluate=evaluate,
            residual=residual,
            modulate=maybe(0.25),
            activation=activation,
            offset=1.0 if rows and affine in ("both", "weight") and maybe(0.2) else 0.0,
            granularity=rng.choice(("element", "channel", "global")) if op == "layer_norm" and rank > 1 and maybe(0.5) else "element",
            last=last,
            save="y" if not (activation or residual) and op != "switchable_norm" and maybe(0.6 if edge else 0.15) else "x",
        ),
        rng.choice(DTYPES),
    )


def _shape(rng: Random, dims: int, most: int) -> tuple[int, ...]:
    """Return a random shape of about `most` elements or fewer. The logarithm of its sizes is roughly uniform."""
    shape, left = [], float(most)
    for i in range(dims):
        n = max(2, round(left ** (rng.random() * 1.6 / (dims - i)))) if left > 2 else 2
        shape.append(min(n, 4096))
        left /= shape[-1]
    rng.shuffle(shape)
    return tuple(shape)


def _near_an_edge(rng: Random, dims: int, most: int) -> tuple[int, ...]:
    """Return a random shape with one long dimension, whose length is near one of EDGES or between two. The others are short."""
    edges = bisect.bisect(EDGES, most)
    at = max(rng.randrange(edges), rng.randrange(edges))  # the larger of two draws: prefer long lengths
    n = EDGES[at] + rng.choice((-1, 0, 1)) if at == 0 or rng.random() < 0.5 else rng.randint(EDGES[at - 1] + 1, EDGES[at])
    n = max(n, 1)
    shape, left = [n], most // n
    for _ in range(dims - 1):
        shape.append(rng.choice([size for size in (1, 1, 1, 2, 3, 17) if size <= max(left, 1)]))
        left //= shape[-1]
    rng.shuffle(shape)
    return tuple(shape)


def run(problem: Drawn, family: str, index: int) -> str:
    """Run a problem by a family. Return what is wrong, "" if nothing is, or "-" if the family or torch cannot run the problem."""
    operands = tensors.make(problem.case, problem.dtype, seed=index)
    dy = tensors.make_dy(operands, index)
    try:
        exact = oracle.exact(problem.case, operands, dy)
    except (RuntimeError, ValueError):  # torch cannot run it, for example a batch_norm with one value per channel
        return "-"
    outcomes = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        with force(family):
            try:
                outcomes.append(oracle.evaluate(problem.case, operands, dy))
            except CannotForce:
                return "-"
    worst = oracle.worst(outcomes[0], exact.value, exact.allowed)
    errors = dict(zip(Outcome._fields, worst.parts))
    wrong = [f"{name} {error:.3g} of the budget" for name, error in errors.items() if error is not None and not error <= 1]
    if wrong:  # with save="y" and a weight near zero even the definition exceeds the budget: then allow 1.05 times its error
        with force("reference"):
            least = oracle.worst(oracle.evaluate(problem.case, operands, dy), exact.value, exact.allowed)
        wrong = wrong if any(ours > 1.05 * max(theirs, 1) for ours, theirs in zip(worst.parts, least.parts) if ours and theirs) else []
    wrong += [f"{name} differs by threads" for name in _differing(*outcomes)]
    return "; ".join(wrong)


def _differing(p: Outcome, q: Outcome) -> Iterator[str]:
    for name, a, b in zip(Outcome._fields, p, q):
        if a is not None and b is not None and not torch.equal(a.nan_to_num(nan=-12345.0), b.nan_to_num(nan=-12345.0)):
            yield name


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_problems", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first index")
    parser.add_argument("--only", type=int, help="one index")
    parser.add_argument("--family", default="c")
    options = parser.parse_args(arguments)
    c_problem.share_from(0)  # small problems, too, run on several threads
    indices = range(options.start, options.start + options.count) if options.only is None else [options.only]
    ran, failed, started = 0, 0, time.perf_counter()
    for index in indices:
        problem = draw(options.seed, index)
        wrong = run(problem, options.family, index)
        ran += wrong != "-"
        if wrong not in ("", "-"):
            failed += 1
            print(f"{index} {problem.name}: {wrong}", flush=True)
        if (index + 1) % 1000 == 0 and sys.stderr.isatty():
            print(f"{index + 1}: {ran} ran, {failed} failed, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    took = f"{time.perf_counter() - started:.0f} s"
    print(f"{len(indices)} problems, seed {options.seed}: {ran} ran by {options.family}, {failed} failed, {took}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
