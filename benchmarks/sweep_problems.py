"""The problems of the sweep (sweep.py), drawn from a seed. No kernel is tuned on them.

A third are norms of diffusion models and their autoencoders, a third norms of LLMs, ViTs, ConvNeXts and ResNets, and a third have random
sizes, odd ones, too. The seed and the index alone determine a problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from random import Random

import torch

from onepass.backends.family import BACKWARD, FORWARD, Direction
from onepass.bench.record import dtype_name
from onepass.bench.suite import Row, problem_of
from onepass.core.problem import NormProblem
from onepass.verify.cases import Case

KINDS = ("diffusion", "language and vision", "random")
BATCHES = (1, 2, 4, 8, 16)
HALF = (torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "channels_last")
LARGEST = 2**28  # elements of x

# Side of the image, and the channels of the group norms there. Skip connections add their channels.
SD15 = {64: (320, 640, 960), 32: (320, 640, 960, 1280, 1920), 16: (640, 1280, 1920, 2560), 8: (1280, 2560)}
SDXL = {128: (320, 640, 960), 64: (320, 640, 960, 1280, 1920), 32: (640, 1280, 1920, 2560)}
VAE = {1024: (128, 256), 512: (128, 256, 512), 256: (256, 512), 128: (512,)}
SVD = {(72, 128): (320, 640), (36, 64): (640, 1280), (18, 32): (1280, 1920)}  # height and width; 14 or 25 frames
TOKENS = ((4096, 320), (1024, 640), (256, 1280), (4096, 640), (1024, 1280))  # layer norms of SD 1.5 and SDXL
TRANSFORMERS = ((4608, 3072), (4429, 1536), (1178, 2432), (16384, 1152))  # modulated: FLUX, SD3 in two sizes, DiT
WIDTHS = (1024, 2048, 2304, 2560, 3072, 3584, 4096, 5120, 7168, 8192, 12288, 16384)  # of LLMs
VIT = ((197, 384), (197, 768), (257, 1024), (577, 1024), (257, 1280), (257, 1408), (729, 1152))  # tokens and width
CONVNEXT = ((56, 96), (28, 192), (14, 384), (7, 768), (56, 128), (28, 256), (14, 512), (7, 1024), (56, 192), (14, 768))  # side, channels
RESNET = ((112, 64), (56, 64), (56, 256), (28, 128), (28, 512), (14, 256), (14, 1024), (7, 512), (7, 2048))


@dataclass(frozen=True)
class Problem:
    seed: int
    index: int
    kind: str
    case: Case
    dtype: torch.dtype
    shift: int = 0  # x starts this many elements after an aligned address
    stats: bool = False  # as in stress_problems.py
    direction: Direction = FORWARD

    @property
    def row(self) -> Row:
        return Row(self.case, self.dtype, direction=self.direction)

    @property
    def bound(self) -> NormProblem:
        return replace(problem_of(self.row), aligned=not self.shift)

    @property
    def name(self) -> str:
        shifted = f" shifted by {self.shift}" if self.shift else ""
        return f"{self.case.name} {dtype_name(self.dtype)}{shifted}{' backward' * (self.direction == BACKWARD)}"


def draw(seed: int, index: int) -> Problem:
    rng, kind = Random(f"sweep {seed} {index}"), KINDS[index % len(KINDS)]
    while True:
        case, dtype, shift = {"diffusion": _diffusion, "random": _random}.get(kind, _language_and_vision)(rng)
        if prod(case.shape) <= LARGEST:
            return Problem(seed, index, kind, case, dtype, shift)


def draw_backward(seed: int, index: int) -> Problem:
    """Return the backward of the problem that `draw` returns."""
    return replace(draw(seed, index), direction=BACKWARD)


def _diffusion(rng: Random) -> tuple[Case, torch.dtype, int]:
    batch, dtype, choice = rng.choice(BATCHES), rng.choice(HALF), rng.random()
    activation = rng.choice(("silu", "silu", ""))
    if choice < 0.6:  # a UNet or an autoencoder
        table = rng.choice((SD15, SD15, SDXL, SDXL, VAE))
        side = rng.choice(list(table))
        shape = batch, rng.choice(table[side]), side, side
    elif choice < 0.7:
        size = rng.choice(list(SVD))
        shape = rng.choice((1, 2)), rng.choice(SVD[size]), rng.choice((14, 25)), *size
    elif choice < 0.8:
        return Case("layer_norm", (batch, *rng.choice(TOKENS))), dtype, 0
    elif choice < 0.9:
        return Case("layer_norm", (batch, *rng.choice(TRANSFORMERS)), affine="none", modulate=True, eps=1e-6), dtype, 0
    else:
        return Case("rms_norm", (batch, 24, 4608, rng.choice((64, 128))), eps=1e-6), dtype, 0  # of queries and keys
    return Case("group_norm", shape, rng.choice(LAYOUTS), groups=32, activation=activation), dtype, 0


def _language_and_vision(rng: Random) -> tuple[Case, torch.dtype, int]:
    choice, dtype = rng.random(), rng.choice((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32))
    batch = rng.choice((8, 16, 32, 64, 128))
    if choice < 0.35:
        tokens, width = rng.choice((1, 8, 64, 333, 512, 2048, 4096, 8192, 16384)), rng.choice(WIDTHS)
        op = rng.choice(("rms_norm", "rms_norm", "layer_norm"))
        return Case(op, (tokens, width), residual=rng.random() < 0.4, eps=1e-6), dtype, 0
    if choice < 0.42:
        return Case("rms_norm", (rng.choice((512, 4096, 8192)), rng.choice((8, 32, 64)), 128), eps=1e-6), dtype, 0
    if choice < 0.6:
        return Case("layer_norm", (batch, *rng.choice(VIT)), eps=1e-6), dtype, 0
    if choice < 0.8:
        side, channels = rng.choice(CONVNEXT)
        if rng.random() < 0.5:
            return Case("layer_norm", (batch, side, side, channels), eps=1e-6), dtype, 0
        return Case("layer_norm2d", (batch, channels, side, side), rng.choice(LAYOUTS), eps=1e-6), dtype, 0
    side, channels = rng.choice(RESNET)
    evaluate, wide = rng.random() < 0.4, dtype != torch.float32
    layout = rng.choice(LAYOUTS)
    return Case("batch_norm", (batch, channels, side, side), layout, running=not evaluate, evaluate=evaluate, wide=wide), dtype, 0


def _random(rng: Random) -> tuple[Case, torch.dtype, int]:
    op = rng.choice(("layer_norm", "layer_norm", "rms_norm", "group_norm", "group_norm", "group_norm", "instance_norm", "batch_norm"))
    dtype, shift = rng.choice((*HALF, torch.float32)), rng.choice((0, 0, 0, 0, 1, 3))
    elements = 2 ** rng.uniform(17, 27)
    activation = rng.choice(("", "", "silu", "gelu"))
    if op in ("layer_norm", "rms_norm"):
        width = max(1, round(2 ** rng.uniform(4, 24))) if rng.random() < 0.7 else rng.choice((50257, 1000003, 5120, 96, 65536, 32000))
        return Case(op, (max(1, round(elements / width)), width), activation=activation), dtype, shift
    groups, each = rng.choice((1, 2, 3, 8, 16, 32, 40)), rng.choice((1, 2, 3, 4, 7, 10, 16, 20, 30, 40, 60, 80))
    batch = rng.choice((1, 2, 3, 4, 6, 8, 12, 16, 32))
    side = max(1, round((elements / (batch * groups * each)) ** 0.5))
    shape = batch, groups * each, side, max(1, side + rng.choice((0, 0, -1, 1, 5)))
    layout = rng.choice(LAYOUTS)
    if op == "group_norm":
        return Case(op, shape, layout, groups=groups, activation=activation), dtype, shift
    if op == "batch_norm":
        return Case(op, (max(batch, 2), *shape[1:]), layout, running=True, wide=dtype != torch.float32), dtype, shift
    return Case(op, (*shape[:3], max(shape[3], 2)), layout), dtype, shift
