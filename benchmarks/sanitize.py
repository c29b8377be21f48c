"""Runs small problems by every GPU family, at aligned and at odd addresses: for compute-sanitizer, which makes kernels very slow.

    python -m benchmarks.sanitize  # compiles the kernels
    compute-sanitizer --tool memcheck python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck python -m benchmarks.sanitize --without ring

racecheck reports hazards in correct code like that of `ring`: see docs/measured.md.

Each forward runs by one family. `--direction backward` runs these problems, and some more, by every family that can. It computes all
gradients. The forward before it runs by the same family.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

import onepass
from onepass.backends.family import BACKWARD, FORWARD, Direction
from onepass.bench.suite import Row, problem_of
from onepass.core.device import Device, describe
from onepass.verify import oracle, tensors
from onepass.verify.cases import Case

from .sweep import able, shifted

HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
LAST = "channels_last"
SHIFTS = 0, 1, 3  # x begins this many elements after an aligned address

PROBLEMS = {
    "row": [
        (Case("layer_norm", (33, 1152)), BFLOAT),
        (Case("layer_norm", (70, 95), activation="gelu"), HALF),
        (Case("layer_norm", (300, 192)), BFLOAT),
        (Case("rms_norm", (9, 12288)), FULL),
        (Case("layer_norm", (5, 10240)), FULL),
        (Case("layer_norm", (5, 12288), residual=True), BFLOAT),
        (Case("batch_norm", (8, 16, 9, 9), running=True, wide=True), BFLOAT),
        (Case("layer_norm", (200, 4227)), BFLOAT),  # this one and the next two: whole vectors and ends
        (Case("rms_norm", (90, 9113)), FULL),
        (Case("group_norm", (36, 64, 27, 27), groups=16, activation="silu"), HALF),
    ],
    "tile": [
        (Case("group_norm", (2, 64, 9, 9), LAST, groups=8, activation="silu"), HALF),
        (Case("instance_norm", (3, 40, 7, 9), LAST), BFLOAT),
    ],
    "apply": [
        (Case("batch_norm", (16, 64, 7, 7), evaluate=True, wide=True), BFLOAT),
        (Case("batch_norm", (5, 24, 14, 13), evaluate=True), FULL),
        (Case("batch_norm", (3, 24, 30, 30), LAST, evaluate=True), FULL),
        (Case("batch_norm", (2, 7, 560, 561), LAST, evaluate=True), FULL),  # rows abreast
    ],
    "whole_set": [
        (Case("layer_norm", (7, 8200)), BFLOAT),
        (Case("layer_norm", (1, 262144)), FULL),
        (Case("group_norm", (2, 32, 24, 24), groups=4, activation="gelu"), FULL),
        (Case("batch_norm", (6, 10, 31, 30), running=True, wide=True), HALF),
    ],
    "team": [
        (Case("group_norm", (2, 64, 32, 32), LAST, groups=8, activation="silu"), HALF),
        (Case("instance_norm", (2, 40, 60, 33), LAST), HALF),
        (Case("batch_norm", (8, 16, 50, 50), LAST, running=True), FULL),
    ],
    "ring": [
        (Case("layer_norm", (4, 32776)), BFLOAT),
        (Case("layer_norm", (9, 33001)), BFLOAT),
        (Case("rms_norm", (3, 40001), activation="silu"), FULL),
        (Case("group_norm", (2, 32, 64, 64), groups=2, activation="gelu"), HALF),
        (Case("group_norm", (3, 64, 40, 40), LAST, groups=8), HALF),
        (Case("instance_norm", (6, 72, 40, 40), LAST), FULL),
        (Case("batch_norm", (60, 8, 28, 28), running=True, wide=True), HALF),
        (Case("layer_norm2d", (3, 200, 20, 20)), FULL),
    ],
    "row_reread": [
        (Case("layer_norm", (5, 70001)), BFLOAT),
        (Case("group_norm", (4, 12, 83, 84), groups=3, activation="gelu"), FULL),
        (Case("rms_norm", (40, 20000)), HALF),
        (Case("batch_norm", (3, 40, 103, 103), running=True, wide=True), HALF),  # the ends of runs are peeled off
    ],
    "tile_reread": [
        (Case("batch_norm", (8, 80, 30, 31), LAST, running=True), FULL),
        (Case("instance_norm", (2, 10, 90, 91), LAST), HALF),
        (Case("group_norm", (1, 3, 1201, 1203), LAST, groups=3, activation="gelu"), HALF),  # rows abreast
    ],
}

BACKWARDS = [  # problems that run only backwards
    (Case("group_norm", (2, 160, 20, 20), LAST, groups=2, activation="silu", modulate=True), HALF),  # `ring`: units of two tiles
    (Case("instance_norm", (3, 40, 33, 31), LAST), FULL),  # `ring`: each column is a set
    (Case("group_norm", (2, 32, 128, 128), groups=4, activation="silu"), HALF),  # `ring`: a block has one channel
    (Case("batch_norm", (64, 5, 28, 28), running=True, wide=True), HALF),  # `ring`: a unit is one set
    (Case("layer_norm", (20, 20480)), BFLOAT),  # `ring`: each element has its own parameters; two runs in a unit
    (Case("layer_norm", (9, 18432)), BFLOAT),  # one run in a unit
    (Case("rms_norm", (5, 32768)), FULL),
    (Case("layer_norm", (9, 16384)), BFLOAT),  # `row`: two blocks
    (Case("group_norm", (2, 64, 32, 32), groups=4, activation="silu"), HALF),  # `whole_set`
    (Case("layer_norm", (70, 4227)), BFLOAT),  # this one and the next two: odd rows
    (Case("layer_norm", (40, 20011)), BFLOAT),
    (Case("layer_norm", (9, 50257)), BFLOAT),
    (Case("group_norm", (2, 64, 16, 16), LAST, groups=8), HALF),  # `tile_reread`: one launch adds up both kinds of cells
    (Case("switchable_norm", (4, 16, 14, 14), LAST, running=True), HALF),
    (Case("switchable_norm", (4, 16, 14, 14), running=True), FULL),
]


def jobs(direction: Direction, device: Device) -> list[tuple[str, Case, torch.dtype]]:
    """Return what runs: a family, a case and a dtype."""
    listed = [(family, *problem) for family, problems in PROBLEMS.items() for problem in problems]
    if direction == FORWARD:
        return listed
    problems = [*((case, dtype) for _, case, dtype in listed), *BACKWARDS]
    return [(family, *problem) for problem in problems for family in able(problem_of(Row(*problem)), direction, device)]


def run(family: str, case: Case, dtype: torch.dtype, shift: int, direction: Direction) -> None:
    operands = tensors.make(case, dtype, "cuda", on_device=True)
    operands = operands._replace(x=shifted(operands.x, shift))
    dy = shifted(tensors.make_dy(operands, on_device=True), shift) if direction == BACKWARD else None
    with onepass.force(family):
        oracle.evaluate(case, operands, dy)
    torch.cuda.synchronize()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without", choices=list(PROBLEMS), action="append", default=[], help="leave a family out; may be given twice")
    parser.add_argument("--direction", choices=[FORWARD, BACKWARD], default=FORWARD)
    args = parser.parse_args(argv)
    wanted = [job for job in jobs(args.direction, describe(torch.device("cuda"))) if job[0] not in args.without]
    for job in wanted:
        for shift in SHIFTS:
            run(*job, shift, args.direction)
    print(f"{len(wanted) * len(SHIFTS)} {args.direction}s ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
