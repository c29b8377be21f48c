"""The rows that `onepass bench` measures. A row is one forward or backward as users run it, with our target on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch

from onepass.core.operands import OptionalOperands
from onepass.core.problem import NormProblem, bind
from onepass.verify import calls
from onepass.verify.cases import Case
from onepass.verify.tensors import lay_out

from .record import dtype_name

Unit = Literal["fraction", "us"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Row:
    """One forward or backward to measure.

    `target` is the longest time in µs if `unit` is "us", otherwise the lowest speed as a fraction of that of a copy.
    """

    case: Case
    dtype: torch.dtype
    target: float | None = None
    unit: Unit = "fraction"
    direction: Direction = "forward"

    @property
    def name(self) -> str:
        return f"{self.case.name} {dtype_name(self.dtype)}" + (" backward" if self.direction == "backward" else "")

    @property
    def nbytes(self) -> int:
        """The size of x in bytes."""
        return prod(self.case.shape) * self.dtype.itemsize

    @property
    def copied(self) -> int:
        """The number of tensors in the copy whose speed we compare with: 1 for x, or 2 for x and the residual."""
        return 2 if self.case.residual else 1

    @property
    def copies(self) -> float:
        """The least memory traffic of the row, in copies of x. A copy reads x and writes as many bytes.

        A forward reads x and writes y: 1 copy. With a residual, it also reads the residual and writes the sum: 2. A backward
        reads x and dy and writes dx: 1.5. With a residual, it also reads the incoming gradient of the sum: 2.
        `NormProblem.min_bytes` (core/problem.py) counts the same in bytes, and the parameters too.
        """
        return 1.5 if self.direction == "backward" and not self.case.residual else self.copied

    @property
    def goal(self) -> str:
        if self.target is None:
            return ""
        return f"≥ {self.target:.2f}" if self.unit == "fraction" else f"≤ {self.target:g} µs"

    def missed_by(self, us: float, fraction: float) -> float | None:
        """Return by how much a result misses the target, in the target's unit: at most 0 if met, None if there is no target."""
        if self.target is None:
            return None
        return self.target - fraction if self.unit == "fraction" else us - self.target


def _row(
    op: str,
    shape: str,
    dtype: torch.dtype,
    target: float | None = None,
    unit: Unit = "fraction",
    direction: Direction = "forward",
    **fields: Any,
) -> Row:
    return Row(Case(op, tuple(map(int, shape.split("x"))), **fields), dtype, target, unit, direction)


_back = partial(_row, direction="backward")
_FP16, _BF16 = torch.float16, torch.bfloat16
_NCHW, _NHWC = "contiguous", "channels_last"
_SILU: dict[str, Any] = {"groups": 32, "activation": "silu"}
_IMAGES = ("256x512x28x28", "64x64x112x112")
_LARGE = {"32x512x256x256": 0.78, "8x512x256x256": 0.75, "2x512x256x256": 0.75, "1x128x1024x1024": 0.62, "2x128x512x512": 0.62}
_BETWEEN = ("64x512x64x64", "32x256x128x128")
_MICROSECONDS = {"16x320x64x64": 36, "2x320x64x64": 11, "2x1280x32x32": 9, "8x1280x16x16": 8}
_LONG = {"4096x32768": 0.75, "2048x65536": 0.75, "1024x131072": 0.70, "512x262144": 0.62}

SUITE = (
    *(_row("layer_norm", shape, _BF16, 0.93) for shape in ("32768x1024", "32768x4096", "16384x8192", "8192x16384")),
    *(_row(op, shape, _BF16, 0.90) for op in ("layer_norm", "rms_norm") for shape in ("65536x256", "65536x128", "131072x64")),
    *(_row(op, shape, _BF16, target) for op in ("layer_norm", "rms_norm") for shape, target in _LONG.items()),
    _row("layer_norm", "1151x8192", _FP16, 0.85),
    _row("layer_norm", "128x4096", _BF16),
    _row("layer_norm", "1x4194304", _BF16),
    _row("layer_norm", "32768x1024", torch.float32),
    _row("layer_norm", "8x4096x1152", _BF16, 0.90, modulate=True, affine="none"),  # as in a diffusion transformer
    _row("rms_norm", "8192x4096", _BF16, residual=True),
    _row("rms_norm", "8x4096x32x128", _BF16),  # over each attention head
    *(_row("group_norm", shape, _FP16, target, layout=_NHWC, **_SILU) for shape, target in _LARGE.items()),
    _row("group_norm", "32x512x256x256", _FP16, 0.82, layout=_NHWC, groups=32),
    *(_row("group_norm", shape, _FP16, 0.80, layout=_NHWC, **_SILU) for shape in _BETWEEN),
    *(_row("group_norm", shape, _FP16, target, "us", layout=_NHWC, **_SILU) for shape, target in _MICROSECONDS.items()),
    _row("group_norm", "2x256x128x128", _FP16, layout=_NHWC, **_SILU),
    *(_row("group_norm", shape, _FP16, 0.60, **_SILU) for shape in _LARGE),
    _row("group_norm", "16x320x64x64", _FP16, 0.80, **_SILU),
    _row("group_norm", "2x320x64x64", _FP16, **_SILU),
    *(_row("instance_norm", shape, _FP16, 0.80) for shape in _IMAGES),
    *(_row("instance_norm", shape, _FP16, 0.55, layout=_NHWC) for shape in _IMAGES),
    *(_row("batch_norm", shape, _FP16, 0.55, layout=layout, running=True, wide=True) for layout in (_NCHW, _NHWC) for shape in _IMAGES),
    *(_row("batch_norm", "256x512x28x28", _FP16, layout=layout, evaluate=True, wide=True) for layout in (_NCHW, _NHWC)),
    *(_row("layer_norm2d", shape, _FP16, 0.80) for shape in ("64x96x56x56", "16x384x28x28")),
    _row("switchable_norm", "64x64x56x56", _FP16, layout=_NHWC, running=True),
)

_WIDE = {"32768x4096": 0.85, "16384x8192": 0.85, "8192x16384": 0.84}
_ROWS = {"32768x1024": 0.80, "65536x256": 0.70, "1000000x64": 0.60}
_LONG_ROWS = {"4096x32768": 0.68, "1024x131072": 0.68, "777x50257": 0.50, "33x1000003": 0.50}
_DECODER = {"8x512x256x256": (0.64, 0.70), "8x256x128x128": (0.60, 0.60), "16x320x64x64": (0.60, 0.60)}  # channels-last, NCHW
_SMALL = ("2x320x64x64", "8x1280x16x16")

BACKWARD_SUITE = (
    *(_back(op, shape, _BF16, target) for op in ("layer_norm", "rms_norm") for shape, target in _WIDE.items()),
    *(_back("layer_norm", shape, _BF16, target) for shape, target in (_ROWS | _LONG_ROWS).items()),
    *(_back("rms_norm", shape, _BF16, 0.72) for shape in ("4096x32768", "1024x131072")),
    _back("layer_norm", "1151x8192", _FP16),
    _back("layer_norm", "128x4096", _BF16),
    _back("layer_norm", "32768x1024", torch.float32),
    _back("layer_norm", "3000x5120", torch.float32, 0.68),
    _back("layer_norm", "8x4096x1152", _BF16, 0.77, modulate=True, affine="none"),  # as in a diffusion transformer
    _back("rms_norm", "8192x4096", _BF16, residual=True),
    _back("rms_norm", "8x4096x32x128", _BF16),  # over each attention head
    *(_back("group_norm", shape, _FP16, target, layout=_NHWC, **_SILU) for shape, (target, _) in _DECODER.items()),
    *(_back("group_norm", shape, _FP16, 17, "us", layout=_NHWC, **_SILU) for shape in _SMALL),
    *(_back("group_norm", shape, _FP16, target, **_SILU) for shape, (_, target) in _DECODER.items()),
    *(_back("group_norm", shape, _FP16, **_SILU) for shape in _SMALL),
    *(_back("instance_norm", "256x512x28x28", _FP16, target, layout=layout) for layout, target in ((_NCHW, 0.50), (_NHWC, 0.66))),
    *(_back("batch_norm", "256x512x28x28", _FP16, 0.62, layout=layout, running=True, wide=True) for layout in (_NCHW, _NHWC)),
    *(_back("batch_norm", "256x512x28x28", _FP16, layout=layout, evaluate=True, wide=True) for layout in (_NCHW, _NHWC)),
    *(_back("layer_norm2d", shape, _FP16, target) for shape, target in (("64x96x56x56", 0.62), ("16x384x28x28", None))),
    _back("switchable_norm", "64x64x56x56", _FP16, layout=_NHWC, running=True),
)


def problem_of(row: Row) -> NormProblem:
    """Return the NormProblem of a row, from tensors on the meta device: nothing is allocated."""
    case = row.case
    x = lay_out(torch.empty(case.shape, dtype=row.dtype, device="meta"), case.layout, "meta")
    param = torch.empty(1, dtype=torch.float32 if case.wide else row.dtype, device="meta")
    weight = param if case.affine in ("both", "weight") else None
    bias = param if case.affine in ("both", "bias") and case.takes_bias else None
    per_sample = param if case.modulate else None
    given = case.evaluate and not calls.spec_of(case).mix
    extras = OptionalOperands(x if case.residual else None, per_sample, per_sample)
    return bind(calls.spec_of(case), x, weight, bias, given, case.running and not given, extras)
