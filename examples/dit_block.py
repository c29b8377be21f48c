"""A DiT block with AdaLN: the condition's scale and shift go into the norm, and so does the residual sum before the second one."""

import torch
from torch import nn

import onepass.functional as F


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(approximate="tanh"), nn.Linear(4 * dim, dim))
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:  # (N, tokens, dim), (N, dim)
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(c).chunk(6, dim=-1)
        h = F.layer_norm(x, x.shape[-1:], eps=1e-6, modulate=(scale1, shift1))
        h = gate1[:, None] * self.attention(h, h, h, need_weights=False)[0]
        h, x = F.add_layer_norm(h, x, x.shape[-1:], eps=1e-6, modulate=(scale2, shift2))
        return x + gate2[:, None] * self.mlp(h)


block, x, c = Block(128, 4), torch.randn(2, 64, 128), torch.randn(2, 128)
y = block(x, c)
y.square().mean().backward()


def norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale[:, None]) + shift[:, None]


shift1, scale1, gate1, shift2, scale2, gate2 = block.condition(c).chunk(6, dim=-1)
h = norm(x, scale1, shift1)
x = x + gate1[:, None] * block.attention(h, h, h, need_weights=False)[0]
expected = x + gate2[:, None] * block.mlp(norm(x, scale2, shift2))
print(f"DiT block {list(y.shape)}, largest difference from torch: {(y - expected).abs().max():.1g}")
