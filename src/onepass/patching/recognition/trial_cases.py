"""The inputs of trials: shapes, dtypes, scales and settings. A trial compares a module with a norm of onepass on one input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onepass import nn as onepass_nn

from .stand_ins import own_parameters

MAX_ELEMENTS = 2**19  # the largest inputs have about this many elements


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


MIXED_DTYPES = [(a, b) for a, b in product(DTYPES, DTYPES) if a != b]


class Case(NamedTuple):
    """The input and the settings of one trial."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    training: bool = True
    mode: str = "grad"  # or "no_grad", "inference"
    scale: float = 1.0  # a factor on x
    layout: str = "dense"  # or "strided": not contiguous
    needs_grad: str = "all"  # which tensors need a gradient: "all", "x" or "parameters"
    autocast: bool = False

    def __str__(self) -> str:
        words = [f"x of shape {list(self.shape)} in {str(self.dtype)[6:]}"]
        words += [f"parameters in {str(self.weight_dtype)[6:]}"] if self.weight_dtype != self.dtype else []
        words += ["in training" if self.training else "in evaluation"]
        words += {"grad": [], "no_grad": ["without gradients"], "inference": ["in inference mode"]}[self.mode]
        words += [f"values near {self.scale:g}"] if self.scale != 1 else []
        words += ["not contiguous"] if self.layout == "strided" else []
        words += [f"gradients only for {self.needs_grad}"] if self.needs_grad != "all" else []
        return ", ".join(words + (["under autocast"] if self.autocast else []))

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Return a context with the gradient mode and autocast of this case.

        CUDA's autocast is set, too, because a forward may ask whether it is on, although trials run on the CPU.
        """
        mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[self.mode]
        before = torch.is_autocast_enabled("cuda")
        with mode(), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            torch.set_autocast_enabled("cuda", self.autocast)
            try:
                yield
            finally:
                torch.set_autocast_enabled("cuda", before)


def quick_inputs(module: nn.Module, like: type[nn.Module]) -> list[Tensor]:
    """Return inputs that tell norms apart: of several ranks, with a nonzero mean, some so small that every usual eps matters."""
    rows, channels = _sizes(module)
    if like in (onepass_nn.LayerNorm, onepass_nn.RMSNorm):
        shapes = [(2, 3, *rows), (2, 3, 5, *rows), (7, *rows)]
    elif like in (onepass_nn.LayerNorm2d, onepass_nn.GroupNorm):
        shapes = [(2, channels, 5, 3)] + [(2, channels, 7), (4, channels)] * (like is onepass_nn.GroupNorm)
    else:
        shapes = [(3, channels, *(5, 4, 3)[: int(like.__name__[-2])])]
    normal = random_tensors(*shapes)
    return [scale * (x + 0.3) for index, x in enumerate(normal) for scale in ((1.0, 1e-2, 1e-4, 1e4) if index == 0 else (1.0,))]


def all_cases(module: nn.Module, like: type[nn.Module], registered: bool) -> Iterator[Case]:
    """Yield every case in which a module has to agree with `like`. For registered classes: no mixed dtypes, no autocast."""
    rows, channels = _sizes(module)
    if like in (onepass_nn.LayerNorm, onepass_nn.RMSNorm):
        ranks = [(*lead, *rows) for lead in ((2, 3), (), (7,), (2, 3, 5), (2, 1, 3, 2))]
        many = max(2, min(1031, MAX_ELEMENTS // max(prod(rows), 1)))
        sizes = [(1, 1, *rows), (0, 3, *rows), (1, many, *rows), (many, 1, *rows)]
    else:
        spatial = {"1d": (7,), "2d": (5, 3), "3d": (2, 5, 3)}.get(like.__name__[-2:], (5, 3))
        ranks = [(3, channels, *spatial), (4, channels), (3, channels, 7), (3, channels, 5, 3), (2, channels, 2, 5, 3)]
        many = max(2, min(37, int((MAX_ELEMENTS // max(channels, 1)) ** (1 / len(spatial)))))
        sizes = [
            (1, channels, *(1 for _ in spatial)),
            (0, channels, *spatial),
            (1, channels, *(many for _ in spatial)),
            (many, channels, *spatial),
        ]
    base, shapes = ranks[0], list(dict.fromkeys(ranks))
    for dtype, training, mode in product(DTYPES, (True, False), ("grad", "no_grad")):
        yield from (Case(shape, dtype, dtype, training, mode) for shape in (shapes if dtype == torch.float32 else [base]))
    for dtype in DTYPES:
        plain = Case(base, dtype, dtype)
        yield from (plain._replace(shape=shape) for shape in shapes[1:])
        yield from (plain._replace(scale=1e-2), plain._replace(layout="strided"), plain._replace(mode="inference", training=False))
    for training in (True, False):
        plain = Case(base, training=training)
        yield from (plain._replace(needs_grad="x"), plain._replace(needs_grad="parameters"), plain._replace(mode="inference"))
        yield from (plain._replace(layout="strided", shape=shape, mode="no_grad") for shape in shapes)
        yield from (Case(shape, training=training, mode="no_grad") for shape in sizes)
    if registered:
        return
    yield from (Case(base, dtype, weight) for dtype, weight in (MIXED_DTYPES if own_parameters(module) else []))
    for dtype, mode in product(DTYPES, ("grad", "no_grad")):
        yield Case(base, dtype, dtype, mode == "grad", mode, autocast=True)


def _sizes(module: nn.Module) -> tuple[tuple[int, ...], int]:
    """Return the normalized shape and the number of channels that a module expects."""
    given = getattr(module, "normalized_shape", ())
    shapes = [tuple(param.shape) for param in own_parameters(module).values() if param.dim()]
    rows = (given,) if isinstance(given, int) else tuple(given) or (shapes[0] if shapes else (24,))
    return rows, getattr(module, "num_channels", None) or getattr(module, "num_features", None) or rows[0]


def random_tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(1)
    return [torch.randn(shape, device="cpu", dtype=torch.float32, generator=generator) for shape in shapes]
