"""What the modules share: the extras, in their constructors, their repr and their calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onepass.check import extras as check_extras
from onepass.functional.call import Modulation


class Extended(nn.Module):
    """A module with extras, which stand in its repr where they are not the default.

    The defaults are the class's, so that a module of torch.nn can become one of ours by its class alone.
    """

    activation: str | None = None
    save: str = "x"
    channel_dim: int = 1
    weight_offset: float = 0.0
    granularity: str = "element"

    def _extend(self, **extras: Any) -> None:
        check_extras.activation(extras["activation"])
        check_extras.from_y(extras.get("save", "x"), extras["activation"])
        check_extras.either_end(extras.get("channel_dim", 1))
        for name, value in extras.items():
            setattr(self, name, value)

    def extra_repr(self) -> str:
        names = ("activation", "save", "channel_dim", "weight_offset", "granularity")
        shown = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != getattr(Extended, name)]
        return ", ".join(filter(None, [super().extra_repr(), *shown]))

    def _start_at_one(self, weight: Tensor | None) -> None:
        """Where the weight is stored as its distance from an offset, it starts where their sum is one."""
        check_extras.weight_offset(weight, self.weight_offset)
        if weight is not None and self.weight_offset:
            nn.init.constant_(weight, 1 - self.weight_offset)


class ChannelNorm(Extended):
    def _keywords(self, modulate: Modulation | None, activation: str | None) -> dict[str, Any]:
        return {"channel_dim": self.channel_dim, "activation": activation or self.activation, "modulate": modulate}
