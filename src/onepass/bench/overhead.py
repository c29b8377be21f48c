"""What a call costs beside its arithmetic: each norm on a few kilobytes, onepass and torch interleaved in one run.

Run it with `python -m onepass.bench.overhead`.
"""

from __future__ import annotations

import torch

from .. import functional
from . import cases, timing
from .cases import Case

SMALL = [
    Case("layer_norm", (4, 256)),
    Case("rms_norm", (4, 256)),
    Case("group_norm", (2, 32, 4, 4), groups=8),
    Case("instance_norm", (2, 32, 4, 4)),
    Case("batch_norm", (2, 32, 4, 4), running=True),
    Case("batch_norm", (2, 32, 4, 4), evaluate=True),
]


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, microseconds per no_grad call (quartiles)")
    for case in SMALL:
        operands, op = cases.make(case), cases.OPS[case.op]
        arguments = operands.x, *op.arguments(case, operands)
        with torch.no_grad():
            functions = getattr(functional, case.op), op.torch
            ours, torchs = timing.interleaved([lambda f=f, a=arguments: f(*a) for f in functions], seconds=2)
        spread = [f"{t.median * 1e6:6.1f} ({t.low * 1e6:.1f}-{t.high * 1e6:.1f})" for t in (ours, torchs)]
        print(f"{case.name:32} onepass {spread[0]:22} torch {spread[1]:22} ratio {ours.median / torchs.median:.2f}")


if __name__ == "__main__":
    main()
