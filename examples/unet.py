"""The UNet of Stable Diffusion, in small: GroupNorm with SiLU around a time embedding, and transformer blocks with LayerNorm."""

import torch
from diffusers import UNet2DConditionModel
from side_by_side import compare

torch.manual_seed(0)
unet = UNet2DConditionModel(
    block_out_channels=(32, 64),
    layers_per_block=2,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=64,
    attention_head_dim=4,
).eval()


@torch.no_grad()
def denoise(unet: UNet2DConditionModel, latent: torch.Tensor, step: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    return unet(latent, step, text).sample


compare(denoise, unet, torch.randn(2, 4, 16, 16), torch.tensor([10, 500]), torch.randn(2, 16, 64), channels_last=True)
