"""The cases that tests, `onepass verify` and benchmarks share. A case describes one call of one norm."""

from __future__ import annotations

from dataclasses import dataclass

LAYOUTS = ("contiguous", "channels_last", "strided", "transposed", "reversed", "sliced", "expanded")
INITS = ("normal", "uniform", "int", "const", "shifted", "inf", "one_inf")
AFFINES = ("both", "weight", "bias", "none")


@dataclass(frozen=True)
class Case:
    """A description of one call of one norm. `make` of tensors.py makes its tensors."""

    op: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    groups: int = 1
    rank: int = 1  # the number of trailing dimensions that layer_norm and rms_norm normalize
    affine: str = "both"
    wide: bool = False  # all tensors but x and residual are float32 even if x is float16 or bfloat16
    init: str = "normal"
    eps: float = 1e-5
    running: bool = False  # pass running statistics, to be updated
    evaluate: bool = False  # evaluation mode: pass running statistics and normalize by them
    momentum: float = 0.1
    residual: bool = False  # call add_layer_norm, add_rms_norm or add_group_norm
    modulate: bool = False
    activation: str = ""
    offset: float = 0.0  # the argument weight_offset
    granularity: str = "element"
    last: bool = False  # pass channel_dim=-1: x has the shape (N, *, C)
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
        """The dimension of the channels that `modulate` scales and shifts."""
        return len(self.shape) - self.rank if self.op in ("layer_norm", "rms_norm") else len(self.shape) - 1 if self.last else 1

    @property
    def param_shape(self) -> tuple[int, ...]:
        """The shape of weight and bias."""
        if self.op not in ("layer_norm", "rms_norm"):
            return (self.shape[self.channel_dim],)
        shape = self.shape[-self.rank :]
        return {"element": shape, "channel": shape[:1], "global": ()}[self.granularity]

    @property
    def takes_bias(self) -> bool:
        return self.op != "rms_norm"


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
    # Cases with options that torch's functions do not have.
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
    Case("group_norm", (2, 5, 7, 40), groups=4, residual=True, last=True, activation="silu", modulate=True),
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
