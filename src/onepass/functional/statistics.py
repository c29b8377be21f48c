"""Updates of running statistics."""

from __future__ import annotations

from torch import Tensor


def unbiased(var: Tensor | None, input: Tensor) -> Tensor:
    """The unbiased variance, (13): var·n/(n - 1), where n elements share one variance."""
    assert var is not None
    count = input.numel() // max(var.numel(), 1)
    return var * (count / max(count - 1, 1))


def update_running(running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor | None, var: Tensor, momentum: float) -> None:
    """running = (1 - momentum)·running + momentum·batch, (12), computed in the dtype of `mean` and `var`."""
    for running, batch in ((running_mean, mean), (running_var, var)):
        assert running is not None and batch is not None
        batch = batch.reshape(running.shape)
        if running.dtype == batch.dtype and not isinstance(momentum, Tensor):
            running.lerp_(batch, momentum)
        else:
            running.copy_(running.to(batch.dtype) * (1 - momentum) + batch * momentum)
