"""The list of cases that feeds tests, `onepass verify` and benchmarks, and how a case becomes tensors and calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional, spec
from ..problem import accumulator
from ..spec import NormSpec

LAYOUTS = ("contiguous", "channels_last", "strided", "transposed", "reversed", "sliced", "expanded")
INITS = ("normal", "uniform", "int", "const", "shifted", "inf")
AFFINES = ("both", "weight", "bias", "none")


@dataclass(frozen=True)
class Case:
    """One problem: a call of one norm, with its data described rather than held."""

    op: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    groups: int = 1
    rank: int = 1  # how many trailing dimensions layer_norm and rms_norm take
    affine: str = "both"
    wide: bool = False  # parameters in the accumulator's dtype beside a half-type x
    init: str = "normal"
    eps: float = 1e-5
    running: bool = False  # with running statistics
    evaluate: bool = False  # by the running statistics
    momentum: float = 0.1

    @property
    def name(self) -> str:
        words = [self.op, "x".join(map(str, self.shape))]
        words += [self.layout] if self.layout != "contiguous" else []
        words += [f"groups={self.groups}"] if self.op == "group_norm" else []
        words += [f"rank={self.rank}"] if self.rank > 1 else []
        words += [self.affine] if self.affine != "both" else []
        words += ["wide"] if self.wide else []
        words += [self.init] if self.init != "normal" else []
        words += ["evaluation"] if self.evaluate else ["running"] if self.running else []
        return " ".join(words)


class Operands(NamedTuple):
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None

    def to(self, dtype: torch.dtype) -> Operands:
        """The same values in another dtype, in memory of their own, and in no graph."""
        x, *rest = (None if t is None else t.detach().to(dtype, copy=True) for t in self)
        assert x is not None
        return Operands(x, *rest)


class _Op(NamedTuple):
    call: Callable[[Any, Case, Operands], Tensor]  # with the functions of a namespace
    spec: Callable[[Case], NormSpec]
    params: Callable[[Case], tuple[int, ...]]
    has_bias: bool = True


def _layer_norm2d(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2], weight, bias, eps).permute(0, 3, 1, 2)


def _group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """torch 2.13 cannot take the gradient of a bias without a weight: "tensor does not have a device"."""
    return F.group_norm(x, groups, torch.ones_like(bias) if weight is None and bias is not None else weight, bias, eps)


TORCH = SimpleNamespace(
    layer_norm=F.layer_norm,
    rms_norm=F.rms_norm,
    group_norm=_group_norm,
    instance_norm=F.instance_norm,
    batch_norm=F.batch_norm,
    layer_norm2d=_layer_norm2d,
)

OPS = {
    "layer_norm": _Op(
        lambda m, c, t: m.layer_norm(t.x, t.x.shape[-c.rank :], t.weight, t.bias, c.eps),
        lambda c: spec.layer_norm(c.rank, c.eps),
        lambda c: c.shape[-c.rank :],
    ),
    "rms_norm": _Op(
        lambda m, c, t: m.rms_norm(t.x, t.x.shape[-c.rank :], t.weight, c.eps),
        lambda c: spec.rms_norm(c.rank, c.eps),
        lambda c: c.shape[-c.rank :],
        has_bias=False,
    ),
    "group_norm": _Op(
        lambda m, c, t: m.group_norm(t.x, c.groups, t.weight, t.bias, c.eps),
        lambda c: spec.group_norm(c.groups, c.eps),
        lambda c: c.shape[1:2],
    ),
    "instance_norm": _Op(
        lambda m, c, t: m.instance_norm(t.x, t.running_mean, t.running_var, t.weight, t.bias, not c.evaluate, c.momentum, c.eps),
        lambda c: (spec.batch_norm if c.evaluate else spec.instance_norm)(c.eps),
        lambda c: c.shape[1:2],
    ),
    "batch_norm": _Op(
        lambda m, c, t: m.batch_norm(t.x, t.running_mean, t.running_var, t.weight, t.bias, not c.evaluate, c.momentum, c.eps),
        lambda c: spec.batch_norm(c.eps),
        lambda c: c.shape[1:2],
    ),
    "layer_norm2d": _Op(
        lambda m, c, t: m.layer_norm2d(t.x, t.weight, t.bias, c.eps),
        lambda c: spec.layer_norm2d(c.eps),
        lambda c: c.shape[1:2],
    ),
}


def by_onepass(case: Case, operands: Operands) -> Tensor:
    return OPS[case.op].call(functional, case, operands)


def by_torch(case: Case, operands: Operands) -> Tensor:
    return OPS[case.op].call(TORCH, case, operands)


def spec_of(case: Case) -> NormSpec:
    return OPS[case.op].spec(case)


def make(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Operands:
    """The case's tensors: the same for the same seed, on every device."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(case.name.encode()))
    op = OPS[case.op]
    param_dtype = accumulator(dtype) if case.wide else dtype

    def param(wanted: bool, around: float, size: float) -> Tensor | None:
        if not wanted:
            return None
        return (around + size * torch.randn(op.params(case), generator=generator)).to(param_dtype).to(device)

    running = case.running or case.evaluate
    mean, var = param(running, 0.0, 0.5), param(running, 1.0, 0.1)
    return Operands(
        x=lay_out(_values(case, generator).to(dtype), case.layout, device),
        weight=param(case.affine in ("both", "weight"), 1.0, 0.5),
        bias=param(case.affine in ("both", "bias") and op.has_bias, 0.0, 0.5),
        running_mean=mean,
        running_var=None if var is None else var.abs(),
    )


def make_dy(operands: Operands, seed: int = 0) -> Tensor:
    """A gradient to send backward, in x's dtype and on its device."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(operands.x.shape, generator=generator).to(operands.x.dtype).to(operands.x.device)


def _values(case: Case, generator: torch.Generator) -> Tensor:
    x = torch.randn(case.shape, generator=generator, dtype=torch.float64)
    match case.init:
        case "uniform":
            return torch.rand(case.shape, generator=generator, dtype=torch.float64)
        case "int":
            return torch.randint(-8, 9, case.shape, generator=generator).double()
        case "const":
            return torch.full(case.shape, 3.0, dtype=torch.float64)
        case "shifted":
            return x + 1e4
        case "inf":
            flat = x.view(-1)
            flat[: min(3, flat.numel())] = torch.tensor([torch.inf, -torch.inf, torch.nan])[: min(3, flat.numel())]
            return x
    return x


def lay_out(x: Tensor, layout: str, device: str = "cpu") -> Tensor:
    """The values of a contiguous x in another memory layout."""
    x = x.to(device)
    match layout:
        case "channels_last":
            return x.movedim(1, -1).contiguous().movedim(-1, 1)
        case "strided":  # every other element of the last dimension
            return torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2]
        case "transposed":  # the first two dimensions swapped in memory
            return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x
        case "reversed":  # all dimensions in the opposite order in memory
            return x.permute(*range(x.dim() - 1, -1, -1)).contiguous().permute(*range(x.dim() - 1, -1, -1))
        case "sliced":  # the middle third of a wider last dimension
            edge = torch.full_like(x, torch.nan)
            return torch.cat((edge, x, edge), -1)[..., x.shape[-1] : 2 * x.shape[-1]]
        case "expanded":  # the first dimension repeated without memory
            return x[:1].expand(x.shape)
    return x


CASES = [
    Case("layer_norm", (64, 257)),
    Case("layer_norm", (3, 17, 256), wide=True),
    Case("layer_norm", (4, 5, 6, 7), rank=3, affine="weight"),
    Case("layer_norm", (2, 6, 5, 8), "channels_last", rank=2, affine="bias"),
    Case("layer_norm", (2, 6, 5, 8), "channels_last", rank=4),
    Case("layer_norm", (6, 9, 64), "transposed"),
    Case("layer_norm", (6, 9, 64), "sliced"),
    Case("layer_norm", (33, 40), "strided", affine="none"),
    Case("layer_norm", (8, 64), "expanded"),
    Case("layer_norm", (3, 70001)),
    Case("layer_norm", (5000, 16)),
    Case("layer_norm", (32, 512), init="shifted"),
    Case("layer_norm", (4, 64), init="const"),
    Case("layer_norm", (4, 64), init="inf"),
    Case("layer_norm", (7, 1)),
    Case("layer_norm", (1, 24), "sliced", rank=2),
    Case("layer_norm", (0, 64)),
    Case("rms_norm", (64, 257), eps=1e-6),
    Case("rms_norm", (2, 7, 3, 128), "sliced", wide=True),
    Case("rms_norm", (4, 6, 8), rank=2, affine="none", init="uniform"),
    Case("rms_norm", (32, 512), init="shifted"),
    Case("group_norm", (2, 320, 6, 6), groups=32),
    Case("group_norm", (2, 320, 6, 6), "channels_last", groups=32),
    Case("group_norm", (2, 30, 7, 5), "channels_last", groups=3, wide=True),
    Case("group_norm", (3, 12, 50), groups=4, affine="bias"),
    Case("group_norm", (5, 24), groups=6, affine="none"),
    Case("group_norm", (2, 8, 3, 4, 5), "channels_last", groups=8, init="int"),
    Case("group_norm", (1, 6, 300, 301), groups=1),
    Case("group_norm", (2, 32, 24, 24), groups=4, init="shifted"),
    Case("group_norm", (2, 32, 24, 24), "channels_last", groups=4, init="shifted"),
    Case("group_norm", (4, 12, 5, 6), "transposed", groups=3),
    Case("group_norm", (4, 12, 5, 6), "strided", groups=3),
    Case("group_norm", (4, 12, 5, 6), "sliced", groups=3),
    Case("group_norm", (0, 12, 5, 6), groups=3),
    Case("instance_norm", (3, 5, 14, 14)),
    Case("instance_norm", (3, 5, 14, 14), "channels_last", affine="none"),
    Case("instance_norm", (3, 5, 40), running=True),
    Case("instance_norm", (2, 5, 9, 9), "channels_last", init="shifted"),
    Case("instance_norm", (3, 5, 7, 8), evaluate=True),
    Case("batch_norm", (8, 20)),
    Case("batch_norm", (4, 20, 14, 14), running=True),
    Case("batch_norm", (4, 20, 14, 14), "channels_last", running=True, wide=True),
    Case("batch_norm", (8, 4, 260, 130), "channels_last"),
    Case("batch_norm", (4, 6, 3, 4, 5), affine="weight"),
    Case("batch_norm", (4, 6, 13, 13), init="shifted"),
    Case("batch_norm", (4, 6, 13, 13), "channels_last", init="shifted"),
    Case("batch_norm", (5, 6, 5), "reversed"),
    Case("batch_norm", (5, 6, 5), "reversed", evaluate=True),
    Case("batch_norm", (3, 5, 2), "channels_last", evaluate=True),
    Case("batch_norm", (4, 6, 9, 9), evaluate=True),
    Case("batch_norm", (4, 6, 9, 9), "channels_last", evaluate=True, affine="none"),
    Case("batch_norm", (4, 6, 9, 9), "sliced", evaluate=True, wide=True),
    Case("layer_norm2d", (2, 96, 7, 7), eps=1e-6),
    Case("layer_norm2d", (2, 96, 7, 7), "channels_last", eps=1e-6),
    Case("layer_norm2d", (2, 24, 9, 5), "sliced", eps=1e-6, affine="weight"),
    Case("layer_norm2d", (2, 24, 9, 5), init="shifted", eps=1e-6),
]
