"""The ResNet block of a diffusion UNet: GroupNorm with SiLU, and with the time embedding's scale and shift, in channels_last."""

import torch
from torch import nn

import onepass


class Block(nn.Module):
    def __init__(self, channels: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = onepass.nn.GroupNorm(32, channels, activation="silu")
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.time = nn.Linear(embedding, 2 * channels)
        self.norm2 = onepass.nn.GroupNorm(32, channels, activation="silu")
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        h = self.conv1(self.norm1(x))
        return x + self.conv2(self.norm2(h, modulate=self.time(t).chunk(2, dim=-1)))


block = Block(64, 128).to(memory_format=torch.channels_last)
x, t = torch.randn(2, 64, 16, 16).to(memory_format=torch.channels_last), torch.randn(2, 128)
y = block(x, t)
y.square().mean().backward()
assert y.is_contiguous(memory_format=torch.channels_last)  # no layout copy on the way

h = block.conv1(nn.functional.silu(nn.functional.group_norm(x, 32)))
scale, shift = block.time(t)[:, :, None, None].chunk(2, dim=1)
expected = x + block.conv2(nn.functional.silu(nn.functional.group_norm(h, 32) * (1 + scale) + shift))
print(f"diffusion ResNet block {list(y.shape)}, largest difference from torch: {(y - expected).abs().max():.1g}")
