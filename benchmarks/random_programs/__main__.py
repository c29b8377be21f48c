"""Runs random programs: one call of a norm, and what users do to its tensors before the call and before the backward.

`python -m benchmarks.random_programs --count 5000` runs each program with torch and with onepass on equal tensors.
Either both must raise, or both must give the same numbers. `make sanitize` runs it with C kernels compiled with sanitizers.
The seed and the index alone determine a program, so `--only INDEX` repeats one. If a program crashes the process, repeat
with `--loud`: the last line printed then names that program.
"""

from __future__ import annotations

import argparse
import sys
import time

from .program import draw
from .raw_ops import is_raw
from .run import run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.random_programs", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first index")
    parser.add_argument("--only", type=int, help="one index")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--loud", action="store_true", help="name each program before it runs")
    options = parser.parse_args(arguments)
    indices = range(options.start, options.start + options.count) if options.only is None else [options.only]
    failed, started = 0, time.perf_counter()
    for index in indices:
        if options.loud:
            print(index, "raw" if is_raw(index) else draw(options.seed, index).name, flush=True)
        wrong = run(options.seed, index, options.device)
        if wrong:
            failed += 1
            print(f"{index} {'raw' if is_raw(index) else draw(options.seed, index).name}: {wrong}", flush=True)
        if (index + 1) % 1000 == 0:
            print(f"{index + 1}: {failed} failed, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    print(f"{len(indices)} programs, seed {options.seed}: {failed} failed, {time.perf_counter() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
