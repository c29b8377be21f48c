"""Updates of running statistics: equations (12) and (13) of docs/theory.md."""

from __future__ import annotations

from torch import Tensor


def unbiased(var: Tensor | None, input: Tensor) -> Tensor:
    """Return the unbiased variance var·n/(n - 1), (13). n is how many elements of `input` share one variance."""
    assert var is not None
    count = input.numel() // max(var.numel(), 1)
    return var * (count / max(count - 1, 1))


def update_running(running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor | None, var: Tensor, momentum: float) -> None:
    """Update running_mean with `mean` and running_var with `var`, in place, by (12).

    That is running = (1 - momentum)·running + momentum·batch, computed in the dtype of `mean` and `var`.
    """
    for running, batch in ((running_mean, mean), (running_var, var)):
        assert running is not None and batch is not None
        batch = batch if batch.shape == running.shape else batch.reshape(running.shape)
        if running.dtype == batch.dtype and not isinstance(momentum, Tensor):
            running.lerp_(batch, momentum)
        else:
            running.copy_(running.to(batch.dtype) * (1 - momentum) + batch * momentum)
