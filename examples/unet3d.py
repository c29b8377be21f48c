"""A 3-D UNet for medical images, a step of training: convolution, InstanceNorm, activation, at every level."""

import torch
from monai.networks.nets import UNet
from side_by_side import compare

torch.manual_seed(0)
unet = UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(8, 16, 32), strides=(2, 2), num_res_units=2, act="relu")


def step(unet: UNet, volume: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = unet(volume)
    torch.nn.functional.cross_entropy(logits, labels).backward()
    return logits


compare(step, unet, torch.randn(1, 1, 24, 24, 24), torch.randint(2, (1, 24, 24, 24)), channels_last=True)
