"""Measures whole models before and after `onepass.patch`: time, peak memory and graph breaks of a step, eager and compiled.

Run it with `python -m benchmarks.models --device cuda --out results/models-h200.jsonl`. It needs transformers, and diffusers
for the diffusion models. `--device cpu --small --backend aot_eager` tries it on a small version of every model.

Weights are random and in bfloat16, the same before and after. Models with convolutions, and their inputs, are channels-last
both before and after, so that only the norms differ. A training step is a forward and a backward, without an optimizer.

The outputs of a patched model, and the gradients of all its parameters, are compared with those of the model in float32. The
relative error of each may be twice that of the unpatched model plus one rounding (`error_ratio` of model_variant.py). If it
is larger, no time is reported.

A variant is a model before or after `onepass.patch`. Each variant has its own process. All processes prepare at the same
time, since compiling takes minutes. Then the models are measured one by one, before and after in turn, while the other
processes wait.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from onepass.bench import record, timing
from onepass.bench.record import Record
from onepass.bench.terminal import progress, table

from .model_variant import COMPILE, EAGER, MODES, SharedMemory, Variant, error_ratio, total_error
from .model_zoo import ENTRIES, Entry

BEFORE, AFTER = "before", "after"
PROVIDERS = {EAGER: (BEFORE, AFTER), COMPILE: ("compiled before", "compiled after")}
ROUNDS = 4  # rounds of measurement; in each, before and after take a turn
PATIENCE = 60  # seconds that one measurement may take
MEMORY = 80  # GB of GPU memory for the steps of all models while they prepare: of 141 on an H200, parameters and contexts take 45
_processes = get_context("spawn")  # a fork of a process that has used CUDA may hang


class Failed(Exception):
    """Raised if a variant has no answer: its process raised, was too late or ended. The message is the reason."""


class VariantProcess:
    """A Variant of model_variant.py in a process of its own. The output of the process goes to a file."""

    def __init__(self, args: argparse.Namespace, entry: Entry, patched: bool, folder: Path, memory: SharedMemory) -> None:
        self._answers, theirs = _processes.Pipe()
        log = folder / f"{entry.name}-{AFTER if patched else BEFORE}.log"
        about = entry.name, patched, args.small, args.device, args.backend, memory
        self._process = _processes.Process(target=_serve, args=(theirs, log, *about))
        self._process.start()
        theirs.close()
        self._dead = ""

    def ask(self, method: str, *args: Any) -> None:
        if not self._dead:
            with suppress(OSError):  # `answer` then reports that the process has ended
                self._answers.send((method, args))

    def answer(self, end: float) -> Any:
        """Return the answer to `ask`, and wait for it until `end`.

        If the process is late or has ended, end it and raise Failed, also in all later calls.
        """
        if self._dead:
            raise Failed(self._dead)
        try:
            if not self._answers.poll(max(0.1, end - time.monotonic())):
                self.end("timed out")
                raise Failed(self._dead)
            error, value = self._answers.recv()
        except (EOFError, OSError):
            self._process.join(5)
            self.end(f"its process ended with exit code {self._process.exitcode}")
            raise Failed(self._dead) from None
        if error:
            raise Failed(error)
        return value

    def call(self, method: str, *args: Any) -> Any:
        self.ask(method, *args)
        return self.answer(time.monotonic() + PATIENCE)

    def end(self, why: str = "ended") -> None:
        """End the process and its children, the workers that inductor starts."""
        self._dead = self._dead or why
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def _serve(asked: Connection, log: Path, name: str, patched: bool, *args: Any) -> None:
    os.setsid()
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    entry = next(entry for entry in ENTRIES if entry.name == name)
    variant: Variant | None = None
    while True:
        try:
            method, arguments = asked.recv()
        except EOFError:
            return
        try:
            variant = variant or Variant(entry, patched, *args)
            asked.send(("", getattr(variant, method)(*arguments)))
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
            asked.send((f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}", None))


def measure(
    entry: Entry, mode: str, variants: Sequence[Any], ready: Sequence[Record | str], origin: Record, seconds: float
) -> list[Record]:
    """Measure a model in a mode, before and after, and return one record for each of the two.

    The record of a variant that failed or is wrong has an `error` and no time. `variants` are two objects with a method
    `call`, and `ready` is what `Variant.ready` returned for each: a record, or the reason why there is none. `origin` has the
    fields that say where the results come from, for a variant without a record.
    """
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
    runs = [(found, variant) for found, variant in zip(records, variants) if not found["error"]]
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in runs]
    try:
        for found, variant in runs:
            found["peak_bytes"] = variant.call("peak", mode)
        for _ in range(ROUNDS):
            for (_, variant), (samples, hosts) in zip(runs, taken):
                samples += variant.call("samples", mode, seconds / ROUNDS)
                hosts += variant.call("host", mode)
        for (found, _), (samples, hosts) in zip(runs, taken):
            found |= _spread(samples) | (_spread(hosts, "host_") if hosts else {})
    except Failed as why:
        for found, _ in runs:
            found["error"] = f"while before and after were measured: {why}"
    for found in records:
        if not found["error"]:
            del found["error"]
    return records


def _spread(samples: Sequence[float], prefix: str = "") -> Record:
    median, low, high = (round(seconds * 1e3, 4) for seconds in timing.summary(samples))
    return {f"{prefix}ms": median, f"{prefix}low_ms": low, f"{prefix}high_ms": high, f"{prefix}samples": len(samples)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--small", action="store_true", help="run the small models")
    parser.add_argument("--only", action="append", choices=[entry.name for entry in ENTRIES], help="only this model; may be repeated")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--backend", default="inductor", help="the backend of torch.compile (inductor)")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of timing for each variant (1)")
    parser.add_argument("--limit", type=float, default=120, help="the most seconds for the first run of all models (120)")
    parser.add_argument("--compile-limit", type=float, default=300, help="the most seconds to compile all models (300)")
    parser.add_argument("--out", type=Path, help="write the results to this file, one JSON object per line; they replace older ones")
    parser.add_argument("--logs", type=Path, help="write the output of the processes to this folder")
    args = parser.parse_args(argv)
    entries = [entry for entry in ENTRIES if args.only is None or entry.name in args.only]
    with tempfile.TemporaryDirectory(prefix="onepass-models-") as scratch:
        folder = args.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        memory = SharedMemory(MEMORY)
        children = {entry: [VariantProcess(args, entry, patched, folder, memory) for patched in (False, True)] for entry in entries}
        try:
            results = _run(args, children)
        finally:
            for child in chain(*children.values()):
                child.end()
    print(f"\n{table([_HEAD, *map(_line, results)])}")
    print("ms: median of whole steps (quartiles); GPU ms: kernels only; peak: includes parameters; error: fraction of the allowed error")
    failed = [found for found in results if "error" in found]
    for found in failed:
        print(f"FAILED {found['row']} {found['provider']}: {found['error']}")
    return 1 if failed else 0


def _run(args: argparse.Namespace, children: dict[Entry, list[VariantProcess]]) -> list[Record]:
    results: list[Record] = []
    origin = record.origin(args.device) | {"small": args.small}
    for mode in args.modes:
        start = time.monotonic()
        for child in chain(*children.values()):
            child.ask("ready", mode)
        end = start + (args.compile_limit if mode == COMPILE else args.limit)
        ready = {entry: [_answer(child, end) for child in pair] for entry, pair in children.items()}
        print(f"{mode}: all variants are ready or late after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        for entry, pair in progress(children.items(), len(children), lambda item: item[0].name, log=True):
            found = measure(entry, mode, pair, ready[entry], origin, args.seconds)
            results += found
            if args.out:  # written after every model, so that an interrupted run keeps its results
                record.write(args.out, record.merge(record.read(args.out) if args.out.exists() else [], found))
    for found in results:  # the profiler comes last, because it slows down all later launches
        child = children[next(entry for entry in children if entry.name == found["row"])][not found["provider"].endswith(BEFORE)]
        if "error" not in found:
            found["gpu_ms"] = child.call("gpu_milliseconds", COMPILE if found["provider"] in PROVIDERS[COMPILE] else EAGER)
    if args.out:
        record.write(args.out, record.merge(record.read(args.out), results))
    return results


def _answer(child: VariantProcess, end: float) -> Record | str:
    try:
        return child.answer(end)
    except Failed as why:
        return str(why)


_HEAD = [
    "model",
    "variant",
    "ms",
    "(quartiles)",
    "GPU ms",
    "host ms",
    "peak MB",
    "error",
    "norms, fused, left",
    "graphs",
    "breaks",
    "compile s",
]


def _line(found: Record) -> list[str]:
    def number(field: str, form: str = ".2f", per: float = 1) -> str:
        value = found.get(field)
        return "–" if value is None else f"{value / per:{form}}"

    time = "FAILED" if "error" in found else number("ms", ".3f")
    spread = f"{found['low_ms']:.3f}-{found['high_ms']:.3f}" if "ms" in found else ""
    counts = found.get("norms")
    norms = " ".join(str(counts[key]) for key in ("found", "fused", "left")) if counts else "–"
    compiled = number("graphs", ".0f"), number("graph_breaks", ".0f"), number("compile_s", ".0f")
    measured = time, spread, number("gpu_ms", ".3f"), number("host_ms", ".3f"), number("peak_bytes", ".0f", 1e6), number("of_allowed")
    return [found["row"], found["provider"], *measured, norms, *compiled]


if __name__ == "__main__":
    # Exit in the usual way, so that the other processes are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    sys.exit(main())
