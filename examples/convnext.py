"""ConvNeXt, a step of training: LayerNorm over the channels at each pixel, where the model permutes, and before the classifier."""

import torch
from side_by_side import compare
from transformers import ConvNextConfig, ConvNextForImageClassification

torch.manual_seed(0)
config = ConvNextConfig(depths=[1, 1, 2, 1], hidden_sizes=[32, 48, 64, 96], num_labels=10)


def step(model: ConvNextForImageClassification, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    result = model(images, labels=labels)
    result.loss.backward()
    return result.logits


compare(step, ConvNextForImageClassification(config), torch.randn(4, 3, 64, 64), torch.arange(4), channels_last=True)
