"""Makes the tensors of a case: its operands, with x in any memory layout, and dy, the incoming gradient of y."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from onepass.core.problem import accumulator

from .cases import Case


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
        """Return copies in another dtype, detached from the autograd graph."""
        x, *rest = (None if t is None else t.detach().to(dtype, copy=True) for t in self)
        assert x is not None
        return Operands(x, *rest)


def make(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, on_device: bool = False) -> Operands:
    """Return the operands of a case. The same seed gives the same values on every device.

    With `on_device`, x and residual are drawn on the device from a normal distribution, whatever `case.init` is. This is
    faster for large cases, but their values depend on the device.
    """
    generator = torch.Generator().manual_seed(seed + zlib.crc32(case.name.encode()))
    device_generator = torch.Generator(device).manual_seed(generator.initial_seed())
    mixes = case.op == "switchable_norm"
    param_dtype = accumulator(dtype) if case.wide else dtype
    # With save="y" the backward divides by weight and by 1 + scale, so keep both away from zero.
    spread = 0.5 if case.save == "x" else 0.2

    def param(wanted: bool, around: float, size: float, shape: tuple[int, ...] = case.param_shape) -> Tensor | None:
        if not wanted:
            return None
        return (around + size * torch.randn(shape, generator=generator)).to(param_dtype).to(device)

    def normal() -> Tensor:
        if on_device:  # on a CPU, drawing 10⁹ elements in float64 takes about a minute
            return torch.randn(case.shape, generator=device_generator, dtype=dtype, device=device)
        return torch.randn(case.shape, generator=generator, dtype=torch.float64)

    running = (case.running or case.evaluate) and case.using_bn
    mean, var = param(running, 0.0, 0.5), param(running, 1.0, 0.1)
    per_sample = (case.shape[0], case.shape[case.channel_dim]) if case.modulate else ()
    residual = normal() if case.residual else None
    x = normal() if on_device else _values(case, generator)
    return Operands(
        x=lay_out(x.to(dtype), case.layout, device),
        weight=param(case.affine in ("both", "weight"), 1.0 - case.offset, spread),
        bias=param(case.affine in ("both", "bias") and case.takes_bias, 0.0, 0.5),
        running_mean=mean,
        running_var=None if var is None else var.abs(),
        residual=None if residual is None else residual.to(dtype).to(device),
        scale=param(case.modulate, 0.0, spread, per_sample),
        shift=param(case.modulate, 0.0, 0.5, per_sample),
        mean_weight=param(mixes, 0.0, 1.0, (2 + case.using_bn,)),
        var_weight=param(mixes, 0.0, 1.0, (2 + case.using_bn,)),
    )


def make_dy(operands: Operands, seed: int = 0, on_device: bool = False) -> Tensor:
    """Return a random gradient of y, with the dtype and the device of x.

    With `on_device`, the gradient is drawn on the device and has the strides of y; otherwise it is contiguous.
    """
    if on_device:
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
    """Return a tensor on `device` with the values of a contiguous x, in the memory layout `layout`.

    With "expanded", every sample has the values of the first.
    """
    x = x.to(device)
    match layout:
        case "channels_last":
            return x.movedim(1, -1).contiguous().movedim(-1, 1)
        case "strided":  # every other element of a last dimension that is twice as long; NaN between them
            return torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2]
        case "transposed":  # the first two dimensions swapped in memory
            return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x
        case "reversed":  # all dimensions in the opposite order in memory
            return x.permute(*range(x.dim() - 1, -1, -1)).contiguous().permute(*range(x.dim() - 1, -1, -1))
        case "sliced":  # the middle third of a last dimension that is three times as long; NaN around it
            edge = torch.full_like(x, torch.nan)
            return torch.cat((edge, x, edge), -1)[..., x.shape[-1] : 2 * x.shape[-1]]
        case "expanded":  # the first sample in the place of every sample, with stride 0
            return x[:1].expand(x.shape)
    return x
