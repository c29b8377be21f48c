"""A Llama block with QK-norm: RMSNorm of the heads of a fused QKV where they lie, without a copy, and residual sums fused into norms."""

import torch
from torch import nn

import onepass
import onepass.functional as F


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, onepass.nn.RMSNorm(dim, 1e-6), onepass.nn.RMSNorm(dim, 1e-6)
        self.q_norm, self.k_norm = onepass.nn.RMSNorm(dim // heads, 1e-6), onepass.nn.RMSNorm(dim // heads, 1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate, self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def attend(self, x: torch.Tensor, q_norm: nn.Module, k_norm: nn.Module) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)  # (N, tokens, heads, head), strided
        q, k, v = (t.transpose(1, 2) for t in (q_norm(q), k_norm(k), v))
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(-2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attend(self.norm1(x), self.q_norm, self.k_norm)
        h, x = F.add_rms_norm(h, x, x.shape[-1:], self.norm2.weight, self.norm2.eps)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


block, x = Block(128, 4), torch.randn(2, 32, 128)
y = block(x)
y.square().mean().backward()
heads = block.qkv(x).unflatten(-1, (3, 4, -1)).unbind(-3)[1]
assert not onepass.explain(block.k_norm, heads).problem.copied

rms = nn.RMSNorm(128, 1e-6), nn.RMSNorm(32, 1e-6)
middle = x + block.attend(rms[0](x), rms[1], rms[1])
h = rms[0](middle)
expected = middle + block.down(nn.functional.silu(block.gate(h)) * block.up(h))
print(f"Llama block {list(y.shape)}, largest difference from torch: {(y - expected).abs().max():.1g}")
