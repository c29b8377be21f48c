"""Base classes for the extras of the modules: the options that torch.nn's modules do not have, such as `activation`."""

import warnings
from typing import Any

from torch import Tensor, nn

from onepass.check.extras import as_activation, check_module_channel_dim, check_weight_offset, saves_output
from onepass.functional.extras import Modulation


class ExtrasMixin(nn.Module):
    """A base class that stores the extras of a module, and shows those that are not at their default in its repr.

    The defaults are class attributes. So `onepass.patch` can turn a torch.nn module into one of ours by setting its `__class__`.
    """

    activation: str | None = None
    save: str = "x"
    channel_dim: int = 1
    weight_offset: float = 0.0
    granularity: str = "element"

    def extra_repr(self) -> str:
        names = ("activation", "save", "channel_dim", "weight_offset", "granularity")
        shown = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != getattr(ExtrasMixin, name)]
        return ", ".join(filter(None, [super().extra_repr(), *shown]))

    def _set_extras(self, **extras: Any) -> None:
        as_activation(extras["activation"])  # raises if the activation is unknown
        saves_output(extras.get("save", "x"), extras["activation"])
        check_module_channel_dim(extras.get("channel_dim", 1))
        for name, value in extras.items():
            setattr(self, name, value)

    def _reset_offset_weight(self, weight: Tensor | None) -> None:
        """Set all elements of the weight to 1 - weight_offset, so that weight + weight_offset is 1."""
        check_weight_offset(weight, self.weight_offset)
        if weight is not None and self.weight_offset:
            nn.init.constant_(weight, 1 - self.weight_offset)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])  # torch stores the version of a module there
        if metadata is not None:
            metadata["weight_offset"] = self.weight_offset

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs: list[str]
    ) -> None:  # fmt: skip
        stored, own = local_metadata.get("weight_offset"), self.weight_offset
        if prefix + "weight" in state_dict and stored != own:
            if stored is not None:
                error_msgs.append(
                    f"{prefix}weight was saved by a norm with weight_offset={stored}, but this {type(self).__name__} has weight_offset="
                    f"{own}; expected the same: create it with weight_offset={stored}, or add {stored - own} to the saved weight"
                )
                return
            if own:
                warnings.warn(
                    f"{prefix}weight was loaded into a {type(self).__name__} with weight_offset={own}, but the state_dict does not say "
                    f"with which offset it was saved. If it is the weight of an ordinary norm, subtract {own} from it, or create the norm "
                    "without weight_offset",
                    stacklevel=2,
                )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


class ChannelExtrasMixin(ExtrasMixin):
    """A base class for the norms of (N, C, *): their functions also take `channel_dim`."""

    def _call_keywords(self, modulate: Modulation | None, activation: str | None) -> dict[str, Any]:
        return {"channel_dim": self.channel_dim, "activation": activation or self.activation, "modulate": modulate}
