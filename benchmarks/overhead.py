"""Measures the host time of a call by onepass and by torch: each norm on a few kilobytes, where arithmetic takes little time.

Run it with `python -m benchmarks.overhead [--device cuda]`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from onepass.bench import measure, timing
from onepass.bench.measure import Run
from onepass.bench.providers import OURS, PROVIDERS
from onepass.dispatch import front_door
from onepass.verify import tensors
from onepass.verify.cases import Case

SMALL = [
    Case("layer_norm", (4, 256)),
    Case("rms_norm", (4, 256)),
    Case("group_norm", (2, 32, 4, 4), groups=8),
    Case("instance_norm", (2, 32, 4, 4)),
    Case("batch_norm", (2, 32, 4, 4), running=True),
    Case("batch_norm", (2, 32, 4, 4), evaluate=True),
]


def runs(case: Case, device: str) -> Iterator[tuple[str, list[Run]]]:
    """Yield (direction, [call of onepass, call of torch]): a forward without autograd, then a backward alone."""
    operands, providers = tensors.make(case, device=device), [PROVIDERS[name] for name in (OURS, "torch")]
    dy = tensors.make_dy(operands)
    yield "forward", [measure.forward(provider, case, operands)[0] for provider in providers]
    yield "backward", [measure.backward(provider, case, operands, dy)[0] for provider in providers]


@torch.no_grad()
def main(args: list[str] | None = None, seconds: float = 2) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    device = parser.parse_args(args).device
    torch.set_num_threads(1)
    front_door.open_now()
    print(f"torch {torch.__version__}, {device}, one thread, microseconds per call (quartiles): no_grad forward, autograd.grad alone")
    for case in SMALL:
        for direction, both in runs(case, device):
            # On a GPU, host_times does not wait for the device, so the device's time is not included.
            times = timing.interleaved(both, seconds=seconds) if device == "cpu" else timing.host_times(both, batches=int(50 * seconds))
            ours, torchs = (f"{t.median * 1e6:6.1f} ({t.low * 1e6:.1f}-{t.high * 1e6:.1f})" for t in times)
            ratio = times[0].median / times[1].median
            print(f"{case.name:32} {direction:8} onepass {ours:22} torch {torchs:22} ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
