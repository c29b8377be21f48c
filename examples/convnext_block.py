"""A ConvNeXt block: LayerNorm over the channels at each pixel, where torch.nn needs two permuting copies."""

import torch
from torch import nn

import onepass


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm = onepass.nn.LayerNorm2d(dim)
        self.mlp = nn.Sequential(nn.Conv2d(dim, 4 * dim, 1), nn.GELU(), nn.Conv2d(4 * dim, dim, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(self.depthwise(x)))


block, x = Block(96), torch.randn(2, 96, 28, 28)
y = block(x)
y.square().mean().backward()

h = block.depthwise(x).permute(0, 2, 3, 1)
expected = x + block.mlp(nn.functional.layer_norm(h, (96,), eps=1e-6).permute(0, 3, 1, 2))
print(f"ConvNeXt block {list(y.shape)}, largest difference from torch: {(y - expected).abs().max():.1g}")
