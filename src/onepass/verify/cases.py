"""The list of cases that feeds tests, `onepass verify` and benchmarks, and how a case becomes tensors and calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onepass import functional
from onepass.core import norms
from onepass.core.problem import accumulator
from onepass.core.spec import NormSpec

from . import composed

LAYOUTS = ("contiguous", "channels_last", "strided", "transposed", "reversed", "sliced", "expanded")


INITS = ("normal", "uniform", "int", "const", "shifted", "inf", "one_inf")


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
    residual: bool = False  # the add_ function of the norm
    modulate: bool = False
    activation: str = ""
    offset: float = 0.0  # weight_offset
    granularity: str = "element"
    last: bool = False  # channel_dim=-1
    using_bn: bool = True
    save: str = "x"

    @property
    def name(self) -> str:
        words = [f"add_{self.op}" if self.residual else self.op, "x".join(map(str, self.shape))]
        words += [self.layout] if self.layout != "contiguous" else []
        words += [f"groups={self.groups}"] if self.op == "group_norm" else []
        words += [f"rank={self.rank}"] if self.rank > 1 else []
        words += [self.affine] if self.affine != "both" else []
        words += ["wide"] if self.wide else []
        words += [self.init] if self.init != "normal" else []
        words += ["evaluation"] if self.evaluate else ["running"] if self.running else []
        words += ["modulated"] if self.modulate else []
        words += [self.activation] if self.activation else []
        words += [f"offset={self.offset:g}"] if self.offset else []
        words += [self.granularity] if self.granularity != "element" else []
        words += ["last"] if self.last else []
        words += ["no-bn"] if not self.using_bn else []
        words += [f"save={self.save}"] if self.save != "x" else []
        return " ".join(words)

    @property
    def channel_dim(self) -> int:
        """The dimension whose size is the channels of a modulation."""
        return len(self.shape) - self.rank if self.op in ("layer_norm", "rms_norm") else len(self.shape) - 1 if self.last else 1


class Operands(NamedTuple):
    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    residual: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    mean_weight: Tensor | None = None
    var_weight: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Operands:
        """The same values in another dtype, in memory of their own, and in no graph."""
        x, *rest = (None if t is None else t.detach().to(dtype, copy=True) for t in self)
        assert x is not None
        return Operands(x, *rest)


class _Op(NamedTuple):
    arguments: Callable[[Case, Operands], tuple[Any, ...]]  # after x, of our function and of torch's
    torch: Callable[..., Tensor]
    spec: Callable[..., NormSpec]  # with the clauses of a case
    params: Callable[[Case], tuple[int, ...]] = lambda c: (c.shape[c.channel_dim],)
    has_bias: bool = True


def _trailing(c: Case) -> tuple[int, ...]:
    shape = c.shape[-c.rank :]
    return {"element": shape, "channel": shape[:1], "global": ()}[c.granularity]


OPS = {
    "layer_norm": _Op(
        lambda c, t: (t.x.shape[-c.rank :], t.weight, t.bias, c.eps),
        F.layer_norm,
        lambda c, **clauses: norms.layer_norm(c.rank, c.eps, c.granularity, c.modulate, weight_offset=c.offset, **clauses),
        _trailing,
    ),
    "rms_norm": _Op(
        lambda c, t: (t.x.shape[-c.rank :], t.weight, c.eps),
        F.rms_norm,
        lambda c, **clauses: norms.rms_norm(c.rank, c.eps, c.modulate, weight_offset=c.offset, **clauses),
        _trailing,
        has_bias=False,
    ),
    "group_norm": _Op(
        lambda c, t: (c.groups, t.weight, t.bias, c.eps),
        composed.group_norm,
        lambda c, **clauses: norms.group_norm(c.groups, c.eps, -1 if c.last else 1, c.modulate, **clauses),
    ),
    "instance_norm": _Op(
        lambda c, t: (t.running_mean, t.running_var, t.weight, t.bias, not c.evaluate, c.momentum, c.eps),
        F.instance_norm,
        lambda c, **clauses: (norms.batch_norm if c.evaluate else norms.instance_norm)(c.eps, -1 if c.last else 1, c.modulate, **clauses),
    ),
    "batch_norm": _Op(
        lambda c, t: (t.running_mean, t.running_var, t.weight, t.bias, not c.evaluate, c.momentum, c.eps),
        F.batch_norm,
        lambda c, **clauses: norms.batch_norm(c.eps, -1 if c.last else 1, c.modulate, **clauses),
    ),
    "layer_norm2d": _Op(
        lambda c, t: (t.weight, t.bias, c.eps),
        composed.layer_norm2d,
        lambda c, **clauses: norms.layer_norm2d(c.eps, c.modulate, **clauses),
    ),
    "switchable_norm": _Op(
        lambda c, t: (
            *(t.mean_weight, t.var_weight, t.running_mean, t.running_var, t.weight, t.bias),
            *(not c.evaluate, c.momentum, c.eps, c.using_bn),
        ),
        composed.switchable_norm,
        lambda c, **clauses: norms.switchable_norm(len(c.shape) > 2, c.using_bn, c.eps, -1 if c.last else 1, c.modulate, **clauses),
    ),
}


Output = Tensor | tuple[Tensor, Tensor]  # y; with a residual, also the sum


def bound(case: Case, t: Operands) -> Callable[[], Output]:
    """The call of our function, with its arguments."""
    keywords: dict[str, Any] = {}
    if case.modulate:
        keywords["modulate"] = t.scale, t.shift
    if case.activation:
        keywords["activation"] = case.activation
    if case.offset:
        keywords["weight_offset"] = case.offset
    if case.granularity != "element":
        keywords["granularity"] = case.granularity
    if case.last:
        keywords["channel_dim"] = -1
    if case.save != "x":
        keywords["save"] = case.save
    arguments = OPS[case.op].arguments(case, t)
    if t.residual is not None:
        return partial(getattr(functional, f"add_{case.op}"), t.x, t.residual, *arguments, **keywords)
    return partial(getattr(functional, case.op), t.x, *arguments, **keywords)


def by_onepass(case: Case, t: Operands) -> Output:
    return bound(case, t)()


def by_torch(case: Case, t: Operands) -> Output:
    """The same in torch's operations, one after the other."""
    total = t.x if t.residual is None else t.x + t.residual
    x = total.movedim(-1, 1).clone(memory_format=torch.contiguous_format) if case.last else total  # else torch loses digits
    weight, bias = (None if p is None else composed.per_element(p, case.granularity, x.shape[-case.rank :]) for p in (t.weight, t.bias))
    weight = weight if weight is None or not case.offset else weight + case.offset
    u = OPS[case.op].torch(x, *OPS[case.op].arguments(case, t._replace(x=x, weight=weight, bias=bias)))
    y = composed.tail(u, t.scale, t.shift, 1 if case.last else case.channel_dim, case.activation)
    y = y.movedim(1, -1) if case.last else y
    return y if t.residual is None else (y, total)


def spec_of(case: Case) -> NormSpec:
    return OPS[case.op].spec(case, activation=case.activation, from_y=case.save == "y")


def make(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, there: bool = False) -> Operands:
    """The case's tensors: the same for the same seed, on every device. `there`: x and residual are normal, and drawn on the device."""
    generator = torch.Generator().manual_seed(seed + zlib.crc32(case.name.encode()))
    on_device = torch.Generator(device).manual_seed(generator.initial_seed())
    op, mixes = OPS[case.op], case.op == "switchable_norm"
    param_dtype = accumulator(dtype) if case.wide else dtype
    spread = 0.5 if case.save == "x" else 0.2  # y is divided by weight and 1 + scale, so none is near zero

    def param(wanted: bool, around: float, size: float, shape: tuple[int, ...] = op.params(case)) -> Tensor | None:
        if not wanted:
            return None
        return (around + size * torch.randn(shape, generator=generator)).to(param_dtype).to(device)

    def normal() -> Tensor:
        if there:  # for 10⁹ elements, fp64 on the CPU takes a minute
            return torch.randn(case.shape, generator=on_device, dtype=dtype, device=device)
        return torch.randn(case.shape, generator=generator, dtype=torch.float64)

    running = (case.running or case.evaluate) and case.using_bn
    mean, var = param(running, 0.0, 0.5), param(running, 1.0, 0.1)
    per_sample = (case.shape[0], case.shape[case.channel_dim]) if case.modulate else ()
    residual = normal() if case.residual else None
    x = normal() if there else _values(case, generator)
    return Operands(
        x=lay_out(x.to(dtype), case.layout, device),
        weight=param(case.affine in ("both", "weight"), 1.0 - case.offset, spread),
        bias=param(case.affine in ("both", "bias") and op.has_bias, 0.0, 0.5),
        running_mean=mean,
        running_var=None if var is None else var.abs(),
        residual=None if residual is None else residual.to(dtype).to(device),
        scale=param(case.modulate, 0.0, spread, per_sample),
        shift=param(case.modulate, 0.0, 0.5, per_sample),
        mean_weight=param(mixes, 0.0, 1.0, (2 + case.using_bn,)),
        var_weight=param(mixes, 0.0, 1.0, (2 + case.using_bn,)),
    )


def make_dy(operands: Operands, seed: int = 0, there: bool = False) -> Tensor:
    """A gradient to send backward, in x's dtype and on its device. `there`: drawn on the device, with the strides that y has."""
    if there:
        return torch.empty_like(operands.x).normal_(generator=torch.Generator(operands.x.device).manual_seed(seed + 1))
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
        case "one_inf":
            x.view(-1)[x.numel() // 2 : x.numel() // 2 + 1] = torch.inf
            return x
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
    # Beyond torch.
    Case("layer_norm", (5, 11, 64), activation="gelu_tanh"),
    Case("layer_norm", (5, 11, 64), modulate=True, activation="silu", wide=True),
    Case("layer_norm", (5, 11, 64), "transposed", modulate=True, affine="none"),
    Case("layer_norm", (2, 3, 4, 64), "sliced", modulate=True, affine="weight", offset=1.0),
    Case("layer_norm", (6, 9, 64), offset=1.0, activation="relu"),
    Case("layer_norm", (3, 6, 5, 8), rank=3, granularity="channel", activation="gelu"),
    Case("layer_norm", (3, 6, 5, 8), "channels_last", rank=3, granularity="channel", modulate=True),
    Case("layer_norm", (3, 6, 5, 8), "channels_last", rank=3, granularity="global", wide=True),
    Case("layer_norm", (3, 6, 5, 8), "channels_last", rank=3, modulate=True, activation="silu"),
    Case("layer_norm", (3, 6, 5, 8), rank=3, granularity="global", affine="bias"),
    Case("layer_norm", (2, 6, 3, 4, 5), "channels_last", rank=4, granularity="channel"),
    Case("layer_norm", (5, 11, 64), residual=True, modulate=True, activation="gelu"),
    Case("layer_norm", (5, 11, 64), residual=True, init="shifted"),
    Case("rms_norm", (5, 11, 64), modulate=True, activation="silu", eps=1e-6),
    Case("rms_norm", (5, 11, 64), offset=1.0, wide=True, eps=1e-6),
    Case("rms_norm", (5, 11, 64), "sliced", residual=True, offset=1.0, eps=1e-6),
    Case("rms_norm", (0, 64), residual=True, modulate=True, eps=1e-6),
    Case("group_norm", (2, 320, 6, 6), groups=32, activation="silu"),
    Case("group_norm", (2, 320, 6, 6), "channels_last", groups=32, activation="silu", modulate=True),
    Case("group_norm", (2, 30, 7, 5), groups=3, modulate=True, wide=True),
    Case("group_norm", (2, 32, 24, 24), "channels_last", groups=4, activation="silu", init="shifted"),
    Case("group_norm", (4, 12, 5, 6), "strided", groups=3, modulate=True, activation="relu", affine="none"),
    Case("group_norm", (2, 5, 6, 12), groups=3, last=True, modulate=True, activation="silu"),
    Case("group_norm", (2, 5, 12), "transposed", groups=4, last=True, affine="bias"),
    Case("group_norm", (2, 12, 5, 6), "channels_last", groups=4, residual=True, activation="silu", modulate=True),
    Case("group_norm", (2, 5, 6, 12), groups=4, residual=True, last=True),
    Case("group_norm", (2, 5, 7, 40), groups=4, residual=True, last=True, activation="silu", modulate=True),  # it lies as x does
    Case("group_norm", (3, 7, 5, 21), groups=3, residual=True, last=True, modulate=True, wide=True, affine="none"),
    Case("group_norm", (2, 60, 9, 5), "channels_last", groups=2, activation="gelu", modulate=True),
    Case("instance_norm", (3, 5, 14, 14), "channels_last", modulate=True, activation="relu", affine="none"),
    Case("instance_norm", (3, 40, 5), last=True, running=True, modulate=True),
    Case("instance_norm", (3, 5, 7, 8), evaluate=True, modulate=True, activation="gelu"),
    Case("batch_norm", (4, 20, 14, 14), running=True, activation="relu"),
    Case("batch_norm", (4, 20, 14, 14), "channels_last", running=True, activation="relu", wide=True),
    Case("batch_norm", (4, 7, 7, 6), last=True, running=True, activation="gelu_tanh", modulate=True),
    Case("batch_norm", (4, 6, 6), last=True, evaluate=True, activation="silu"),
    Case("layer_norm2d", (2, 24, 9, 5), activation="gelu", modulate=True, eps=1e-6),
    Case("layer_norm", (33, 257), save="y"),
    Case("layer_norm", (2, 3, 4, 64), "sliced", modulate=True, wide=True, offset=1.0, save="y"),
    Case("layer_norm", (3, 6, 5, 8), "channels_last", rank=3, granularity="channel", affine="bias", save="y"),
    Case("layer_norm", (0, 64), save="y"),
    Case("rms_norm", (5, 11, 64), "strided", eps=1e-6, save="y"),
    Case("group_norm", (2, 30, 7, 5), "channels_last", groups=3, modulate=True, save="y"),
    Case("group_norm", (2, 32, 24, 24), groups=4, init="shifted", wide=True, save="y"),
    Case("instance_norm", (3, 5, 14, 14), "transposed", running=True, save="y"),
    Case("batch_norm", (4, 20, 14, 14), "channels_last", running=True, wide=True, save="y"),
    Case("batch_norm", (4, 6, 9, 9), "sliced", evaluate=True, modulate=True, save="y"),
    Case("layer_norm2d", (2, 24, 9, 5), affine="weight", eps=1e-6, save="y"),
    Case("switchable_norm", (4, 6, 5, 7), running=True),
    Case("switchable_norm", (4, 6, 5, 7), "channels_last", running=True, activation="relu", wide=True),
    Case("switchable_norm", (4, 5, 7, 6), last=True, modulate=True, activation="silu"),
    Case("switchable_norm", (4, 6, 5, 7), evaluate=True, affine="none"),
    Case("switchable_norm", (4, 6, 40), using_bn=False, affine="weight"),
    Case("switchable_norm", (8, 20), running=True),
    Case("switchable_norm", (3, 4, 3, 4, 5), "channels_last", evaluate=True, init="uniform"),
    Case("switchable_norm", (2, 6, 9, 8), init="shifted"),
    Case("switchable_norm", (8, 4, 260, 130), "channels_last"),
    Case("switchable_norm", (0, 6, 5), using_bn=False),
]
