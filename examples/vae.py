"""The decoder of a latent diffusion model: GroupNorm with SiLU up to the size of the image, where it costs most."""

import torch
from diffusers import AutoencoderKL
from side_by_side import compare

torch.manual_seed(0)
vae = AutoencoderKL(
    block_out_channels=(32, 64, 64),
    down_block_types=("DownEncoderBlock2D",) * 3,
    up_block_types=("UpDecoderBlock2D",) * 3,
    layers_per_block=1,
).eval()


@torch.no_grad()
def decode(vae: AutoencoderKL, latent: torch.Tensor) -> torch.Tensor:
    return vae.decode(latent).sample


compare(decode, vae, torch.randn(1, 4, 16, 16), channels_last=True)
