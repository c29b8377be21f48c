"""Measures whole models before and after `onepass.patch`: time, peak memory and graph breaks of a step, in three modes.

Run it with `python -m benchmarks.models --device cuda --out results/models-h200.jsonl`. It needs transformers, and diffusers
for the diffusion models. `--device cpu --small --backend aot_eager` tries it on a small version of every model.

The modes are eager, torch.compile, and torch.compile with `mode="reduce-overhead"`, which replays CUDA graphs.

Weights are random and in bfloat16, the same before and after. Models with convolutions, and their inputs, are channels-last
both before and after, so that only the norms differ. A training step is a forward and a backward, without an optimizer.

The outputs of a patched model, and the gradients of all its parameters, are compared with those of the model in float32. The
relative error of each may be twice that of the unpatched model plus one rounding; `error_ratio` of model_variant.py has the
exact rule. If it is larger, no time is reported.

A variant is a model before or after `onepass.patch`. Each variant has its own process. All processes prepare at the same
time, since compiling takes minutes. Then the process of each patched model also compiles the unpatched one, with code from
inductor's cache, and times both. The models are measured one by one, while the other processes wait. Before and after take
turns, in pairs of a few steps each. A sample is the wall-clock time of its steps, with one synchronization at the end. The
ratio of a row is the median over all pairs, with a 95 % interval; step_ratio.py has the verdict. At the end a profiler adds
up the time of all GPU kernels.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from onepass.bench import record, timing
from onepass.bench.record import Record
from onepass.bench.terminal import progress
from onepass.dispatch import front_door

from .model_table import text
from .model_variant import MODES, PROVIDERS, REDUCE_OVERHEAD, error_ratio, total_error
from .model_zoo import ENTRIES, Entry
from .shared_memory import SharedMemory
from .step_ratio import LEAST_PAIRS, gpu_ratio, step_ratio, verdict
from .variant_process import BeforeInOneProcess, Failed, VariantProcess

MEMORY = 80  # GB of GPU memory for the steps of all models while they prepare: of 141 on an H200, parameters and contexts take 45
SAMPLE = 0.06  # seconds of a sample, roughly
STEPS = 2, 10  # the fewest and the most steps of a sample
PROFILING = 60  # seconds of the limit that are kept for the profiler
COMPILE_THREADS = "4"  # of each process for inductor; the default is one per core, in each of two processes per model


def measure(entry: Entry, mode: str, variants: Sequence[Any], ready: Sequence[Record | str], origin: Record, pairs: int) -> list[Record]:
    """Measure a model in a mode, before and after, and return one record for each of the two.

    The record of a variant that failed or is wrong has an `error` and no time. `variants` are two objects with a method
    `call`, and `ready` is what `Variant.ready` returned for each: a record, or the reason why there is none. `origin` has the
    fields that say where the results come from, for a variant without a record.
    """
    records = _compared(entry, mode, ready, origin)
    runs = [(found, variant) for found, variant in zip(records, variants) if not found["error"]]
    try:
        for found, variant in runs:
            found["peak_bytes"] = variant.call("peak", mode)
        taken = _samples(mode, [variant for _, variant in runs], pairs)
        for (found, variant), samples in zip(runs, taken):
            found |= _spread(samples)
            variant.call("rest")
        if len(taken) == 2:
            records[1] |= step_ratio(*taken)
            records[1]["verdict"] = verdict(records[1])
    except Failed as why:
        for found, _ in runs:
            found["error"] = f"while before and after were measured: {why}"
    for found in records:
        if not found["error"]:
            del found["error"]
    return records


def _compared(entry: Entry, mode: str, ready: Sequence[Record | str], origin: Record) -> list[Record]:
    """Return the records of a model before and after, without times. `error` is "" if the results are right."""
    layout = "channels_last" if entry.channels_last else "contiguous"
    about = {"row": entry.name, "dtype": "bfloat16", "layout": layout, "training": entry.training, "error": "", **origin}
    said = [{"error": found} if isinstance(found, str) else found for found in ready]
    records: list[Record] = [about | {"provider": name} | found for name, found in zip(PROVIDERS[mode], said)]
    before, after = (found.pop("errors", None) for found in records)
    if before and after:
        ratio, worst = error_ratio(before, after)
        for found, errors in zip(records, (before, after)):
            found["relative_error"] = total_error(errors)
        records[1] |= {"of_allowed": ratio, "worst": worst}
        if not ratio <= 1:
            records[1]["error"] = f"wrong: the error of {worst} is {ratio:.3g} of the allowed error"
    elif after:
        records[1]["error"] = "the model before gave no results to compare with"
    return records


def _samples(mode: str, variants: Sequence[Any], pairs: int) -> list[list[float]]:
    """Return the seconds of a step for each variant, in `pairs` samples. Every other round, they run in reverse order."""
    taken: list[list[float]] = [[] for _ in variants]
    slowest = max((variant.call("seconds", mode, STEPS[0], True) for variant in variants), default=SAMPLE)
    fewest, most = STEPS
    steps = max(fewest, min(most, round(SAMPLE / slowest)))
    for i in range(pairs):
        for variant, samples in list(zip(variants, taken))[:: (-1) ** i]:
            samples.append(variant.call("seconds", mode, steps, steps > fewest))  # long steps need no warm-up
    return taken


def _spread(samples: Sequence[float]) -> Record:
    median, low, high = (round(seconds * 1e3, 4) for seconds in timing.summary(samples))
    return {"ms": median, "low_ms": low, "high_ms": high, "samples": len(samples)}


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    args = _parser().parse_args(argv)
    if args.pairs < LEAST_PAIRS:
        raise SystemExit(f"--pairs {args.pairs}: too few for a 95 % interval; use {LEAST_PAIRS} or more")
    front_door.open_now()  # here, so that the processes find it compiled
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", COMPILE_THREADS)
    entries = [entry for entry in ENTRIES if entry.name in args.only]
    with tempfile.TemporaryDirectory(prefix="onepass-models-") as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        memory = SharedMemory(MEMORY)
        children = {entry: [VariantProcess(args, entry, patched, folder, memory) for patched in (False, True)] for entry in entries}
        try:
            results = _run(args, children, start)
        finally:
            for child in chain(*children.values()):
                child.end()
    print(f"\n{text(results)}")
    return 1 if any("error" in found for found in results) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [entry.name for entry in ENTRIES]
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--small", action="store_true", help="run the small models")
    parser.add_argument("--only", type=_some_of(names), default=names, help=f"only these models, with commas between: {', '.join(names)}")
    parser.add_argument("--modes", type=_some_of(MODES), default=MODES, help=f"only these modes, with commas between: {', '.join(MODES)}")
    parser.add_argument("--backend", default="inductor", help="the backend of torch.compile (inductor)")
    parser.add_argument("--pairs", type=int, default=20, help="samples before and after for each model and mode (20)")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which nothing more is measured (540)")
    parser.add_argument("--compile-limit", type=float, default=200, help="the most seconds to prepare all models in a mode (200)")
    parser.add_argument("--out", type=Path, help="write the results to this file, one JSON object per line; they replace older ones")
    parser.add_argument("--logs", type=Path, help="write the output of the processes to this folder")
    return parser


def _some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(value: str) -> list[str]:
        chosen = value.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is unknown; choose from {', '.join(known)}")
        return [name for name in known if name in chosen]

    return parse


def _run(args: argparse.Namespace, children: dict[Entry, list[VariantProcess]], start: float) -> list[Record]:
    results: dict[tuple[Entry, str], list[Record]] = {}
    origin = record.origin(args.device) | {"small": args.small}
    end = start + args.limit - (PROFILING if args.device != "cpu" else 0)
    for mode in args.modes:
        begun = time.monotonic()
        for child in chain(*children.values()):
            child.ask("ready", mode)
        latest = min(end, begun + args.compile_limit)
        ready = {entry: [_answer(child, latest) for child in pair] for entry, pair in children.items()}
        _ready_in_one_process(mode, children, ready, latest)
        print(f"{mode}: all variants are ready or late after {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
        for entry, pair in progress(children.items(), len(children), lambda item: item[0].name, log=True):
            late = time.monotonic() > end
            said = [f"not measured within {args.limit:g} s" if late and isinstance(one, dict) else one for one in ready[entry]]
            results[entry, mode] = measure(entry, mode, [BeforeInOneProcess(*pair), pair[1]], said, origin, args.pairs)
            _write(args.out, results[entry, mode])
    _profile(args, children, results, start + args.limit)
    return [found for pair in results.values() for found in pair]


def _ready_in_one_process(
    mode: str, children: dict[Entry, list[VariantProcess]], ready: dict[Entry, list[Record | str]], end: float
) -> None:
    """Let the processes of patched models also prepare the unpatched ones. If one fails, its reason replaces the answer in `ready`."""
    if mode == REDUCE_OVERHEAD:  # the CUDA graph of the unpatched model is needed only once
        for entry, (before, _) in children.items():
            if isinstance(ready[entry][0], dict):
                before.ask("drop", mode)
                _answer(before, end)
    for _, after in children.values():
        after.ask("ready_before", mode)
    for entry, (_, after) in children.items():
        why = _answer(after, end)
        if isinstance(why, str) and isinstance(ready[entry][0], dict):
            ready[entry][0] = why


def _profile(
    args: argparse.Namespace, children: dict[Entry, list[VariantProcess]], results: dict[tuple[Entry, str], list[Record]], end: float
) -> None:
    """Add the GPU's time to all records. The profiler comes last, because it slows down all later launches."""
    for _, after in children.values():
        after.ask("start_profiler")
    for _, after in children.values():
        _answer(after, max(end, time.monotonic() + 1))
    for (entry, mode), records in results.items():
        before, after = children[entry]
        for found, variant in zip(records, (BeforeInOneProcess(before, after), after)):
            if "error" not in found and time.monotonic() < end:
                try:
                    found |= variant.call("gpu", mode)
                except Failed as why:
                    found["gpu_error"] = str(why)
        before, after = records
        if "ratio" in after:
            after |= gpu_ratio(before, after)
            after["verdict"] = verdict(after)
        _write(args.out, records)


def _write(out: Path | None, records: list[Record]) -> None:
    """Write the records at once, so that an interrupted run keeps its results."""
    if out:
        record.write(out, record.merge(record.read(out) if out.exists() else [], records))


def _answer(child: VariantProcess, end: float) -> Record | str:
    try:
        return child.answer(end)
    except Failed as why:
        return str(why)


if __name__ == "__main__":
    # Exit in the usual way, so that the other processes are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    sys.exit(main())
