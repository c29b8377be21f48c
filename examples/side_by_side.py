"""What the examples share: a model as it is and a patched copy, side by side."""

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import onepass

# A patched model sums in another order, above all where convolutions are channels-last: its distance from the model in float64 may be
# this many times that of the model before (2.4 was seen, on a CPU). Another eps or formula is much farther off.
TIMES = 4


def compare(run: Callable[..., Tensor], model: nn.Module, *inputs: Tensor, channels_last: bool = False, rounds: int = 5) -> None:
    """Patch a copy of a model; print what was done, how far its output and gradients are off, and the times of both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # norms begin with ones and zeros, which hide mistakes
                param += torch.randn_like(param) / 5
    before, inputs = model.to(device), tuple(x.to(device) for x in inputs)
    after = copy.deepcopy(before)
    print(onepass.patch(after, channels_last=channels_last))

    double = [x.double() if x.is_floating_point() else x for x in inputs]
    exact, theirs, ours = (
        _results(run, copy.deepcopy(before).double(), *double),
        _results(run, before, *inputs),
        _results(run, after, *inputs),
    )
    ratios = []
    for name, value in exact.items():
        apart, off, torchs = _apart(ours[name], theirs[name]), _apart(ours[name], value), _apart(theirs[name], value)
        print(f"{name}, largest difference from torch: {apart:.1e} of the largest value; from float64 {off:.1e}, torch's {torchs:.1e}")
        ratios.append(off / max(torchs, torch.finfo(torch.float32).eps))

    seconds = [(_seconds(run, before, *inputs), _seconds(run, after, *inputs)) for _ in range(rounds)]
    medians = [1e3 * statistics.median(column) for column in zip(*seconds)]
    print(f"{medians[0]:.1f} ms before, {medians[1]:.1f} ms after, on {device}: medians of {rounds} runs in turn")
    if not all(ratio <= TIMES for ratio in ratios):
        raise SystemExit(f"more than {TIMES} times as far from float64 as torch")


def _results(run: Callable[..., Tensor], model: nn.Module, *inputs: Tensor) -> dict[str, list[Tensor]]:
    output = run(model, *inputs).detach()
    gradients = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    return {"output": [output], "gradients": gradients} if gradients else {"output": [output]}


def _apart(found: list[Tensor], expected: list[Tensor]) -> float:
    largest = max(b.abs().max() for b in expected)
    return float(max((a - b).abs().max() for a, b in zip(found, expected)) / largest)


def _seconds(run: Callable[..., Tensor], model: nn.Module, *inputs: Tensor) -> float:
    model.zero_grad()
    start = time.perf_counter()
    run(model, *inputs).sum().item()  # which waits for a GPU
    return time.perf_counter() - start
