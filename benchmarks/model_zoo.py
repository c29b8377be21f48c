"""Whole models for the benchmark of `onepass.patch`: models of diffusers and transformers with random weights.

Each model has a small version with the same modules, which runs on a CPU in about a second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

PROMPT = 77  # the number of tokens in a prompt
CACHED = 512  # the number of tokens in the cache when decoding starts
AHEAD = 256  # after decoding this many tokens, the cache is rewound to CACHED tokens

SMALL_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@dataclass(frozen=True)
class Entry:
    """A model, and what one step of it is: a forward, or a forward and a backward if `training`."""

    name: str
    title: str
    library: str
    make: Callable[[bool], nn.Module]  # make(small) returns the model
    inputs: Callable[[nn.Module, bool], tuple[Any, ...]]  # inputs(model, small), on the model's device and in its dtype
    forward: Callable[..., Tensor]  # forward(model, *inputs) returns the output, or the loss if `training`
    gigabytes: int  # how much GPU memory a step needs, roughly
    training: bool = False
    channels_last: bool = False
    rewind: Callable[..., None] | None = None  # rewind(*inputs) is called before steps 0, AHEAD, 2·AHEAD, ...

    def build(self, small: bool, device: str) -> nn.Module:
        """Return the model in bfloat16.

        Noise is added to all 1-d parameters: if all weights were 1 and all biases 0, mixing them up would change nothing.
        """
        torch.manual_seed(0)
        with torch.device(device):
            model = self.make(small)
            for param in model.parameters():
                if param.dim() == 1:
                    param.data += 0.1 * torch.randn_like(param)
        model = model.to(torch.bfloat16).train(self.training).requires_grad_(self.training)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # pyright: ignore[reportCallIssue]


def _random(model: nn.Module, *shape: int) -> Tensor:
    """Return a random tensor with the device and dtype of the model. Its values are the same for all devices and dtypes.

    Tensors of four dimensions are channels-last, like the models with convolutions.
    """
    param = next(model.parameters())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(torch.bfloat16)
    return x.to(param.device, param.dtype).contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.contiguous_format)


def _tokens(model: Any, *shape: int) -> Tensor:
    tokens = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return tokens.to(next(model.parameters()).device)


def _vae(small: bool) -> nn.Module:
    """Return the autoencoder (VAE) of Stable Diffusion (SD) and SDXL."""
    channels, groups, layers = ((16, 32), 8, 1) if small else ((128, 256, 512, 512), 32, 2)
    return import_module("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(channels), up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels, layers_per_block=layers, latent_channels=4, norm_num_groups=groups,
    )  # fmt: skip


def _decode_image(model: Any, latents: Tensor) -> Tensor:
    return model.decode(latents, return_dict=False)[0]


def _images(batch: int, side: int, small_side: int = 8) -> Callable[[nn.Module, bool], tuple[Any, ...]]:
    def inputs(model: nn.Module, small: bool) -> tuple[Any, ...]:
        return (_random(model, *((2, 3, small_side, small_side) if small else (batch, 3, side, side))),)

    return inputs


def _reconstruct(model: Any, pixels: Tensor) -> Tensor:
    """Return the mean squared error of the decoded image. The latents are the mean of the posterior, so nothing is random."""
    return (model(pixels, return_dict=False)[0].float() - pixels.float()).square().mean()


def _unet2d(small: bool) -> nn.Module:
    """Return the unconditional UNet of diffusers' training example."""
    channels, groups, layers = ((16, 32), 8, 1) if small else ((128, 128, 256, 256, 512, 512), 32, 2)
    plain = len(channels) - 2
    return import_module("diffusers").UNet2DModel(
        sample_size=8 if small else 128, block_out_channels=channels, layers_per_block=layers, norm_num_groups=groups,
        down_block_types=("DownBlock2D",) * plain + ("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * plain, attention_head_dim=8,
    )  # fmt: skip


def _noisy_images(model: nn.Module, small: bool) -> tuple[Any, ...]:
    (noisy,) = _images(16, 128)(model, small)
    return noisy, torch.arange(len(noisy), device=noisy.device) * 50, noisy.flip(0)


def _predict_noise(model: Any, noisy: Tensor, step: Tensor, noise: Tensor) -> Tensor:
    return (model(noisy, step, return_dict=False)[0].float() - noise.float()).square().mean()


def _sd15(small: bool) -> nn.Module:
    channels, groups, layers = ((16, 32), 8, 1) if small else ((320, 640, 1280, 1280), 32, 2)
    across = len(channels) - 1
    return import_module("diffusers").UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D",) * across + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * across,
        block_out_channels=channels, layers_per_block=layers, norm_num_groups=groups,
        attention_head_dim=8, cross_attention_dim=32 if small else 768,
    )  # fmt: skip


def _sdxl(small: bool) -> nn.Module:
    channels, groups, layers = ((16, 32, 32), 8, 1) if small else ((320, 640, 1280), 32, 2)
    return import_module("diffusers").UNet2DConditionModel(
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=channels, layers_per_block=layers, norm_num_groups=groups, use_linear_projection=True,
        transformer_layers_per_block=(1, 1, 2) if small else (1, 2, 10), attention_head_dim=(2, 4, 4) if small else (5, 10, 20),
        cross_attention_dim=32 if small else 2048, addition_embed_type="text_time", addition_time_embed_dim=8 if small else 256,
        projection_class_embeddings_input_dim=64 if small else 2816,
    )  # fmt: skip


def _unet_inputs(batch: int, side: int) -> Callable[[nn.Module, bool], tuple[Any, ...]]:
    def inputs(model: Any, small: bool) -> tuple[Any, ...]:
        size, width = (8 if small else side), model.config.cross_attention_dim
        latents, context = _random(model, batch, 4, size, size), _random(model, batch, PROMPT, width)
        step = torch.full((batch,), 500, device=latents.device)
        if not model.config.addition_embed_type:
            return latents, step, context
        text = model.config.projection_class_embeddings_input_dim - 6 * model.config.addition_time_embed_dim
        return latents, step, context, _random(model, batch, text), latents.new_full((batch, 6), 8.0 * side)

    return inputs


def _denoise(model: Any, latents: Tensor, step: Tensor, context: Tensor, *added: Tensor) -> Tensor:
    conditions = dict(zip(("text_embeds", "time_ids"), added)) or None
    return model(latents, step, context, added_cond_kwargs=conditions, return_dict=False)[0]


def _convnext(small: bool) -> nn.Module:
    """Return ConvNeXt-B with layer scales of 1. With the usual layer scale of 10⁻⁶, a block would hardly change its input."""
    transformers: Any = import_module("transformers")
    depths, sizes, labels = ([1, 1, 1, 1], [8, 16, 24, 32], 10) if small else ([3, 3, 27, 3], [128, 256, 512, 1024], 1000)
    config = transformers.ConvNextConfig(
        depths=depths, hidden_sizes=sizes, num_labels=labels, layer_scale_init_value=1.0, problem_type="single_label_classification"
    )
    return transformers.ConvNextForImageClassification(config)


def _vit(small: bool) -> nn.Module:
    transformers: Any = import_module("transformers")
    sizes = SMALL_ENCODER | {"image_size": 32, "patch_size": 8, "num_labels": 10} if small else {"num_labels": 1000}
    config = transformers.ViTConfig(**sizes, problem_type="single_label_classification")
    return transformers.ViTForImageClassification(config)


def _labeled(batch: int, memory_format: torch.memory_format) -> Callable[[nn.Module, bool], tuple[Any, ...]]:
    def inputs(model: Any, small: bool) -> tuple[Any, ...]:
        (pixels,) = _images(batch, 224, 32)(model, small)
        labels = torch.arange(len(pixels), device=pixels.device) % model.config.num_labels
        return pixels.contiguous(memory_format=memory_format), labels

    return inputs


def _classify(model: Any, pixels: Tensor, labels: Tensor) -> Tensor:
    return model(pixel_values=pixels, labels=labels).loss


def _bert(small: bool) -> nn.Module:
    transformers: Any = import_module("transformers")
    config = transformers.BertConfig(**(SMALL_ENCODER | {"vocab_size": 128} if small else {}))
    return transformers.BertModel(config, add_pooling_layer=False)


def _sentence(model: Any, small: bool) -> tuple[Any, ...]:
    return (_tokens(model, 1, 32),)


def _encode(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens).last_hidden_state


def _llama(small: bool) -> nn.Module:
    transformers: Any = import_module("transformers")
    layers, width, inner, heads, vocabulary = (2, 64, 128, 4, 128) if small else (8, 4096, 11008, 32, 32000)
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads, vocab_size=vocabulary,
        max_position_embeddings=4096, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _text(model: Any, small: bool) -> tuple[Any, ...]:
    return (_tokens(model, *((2, 16) if small else (4, 2048))),)


def _learn(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def _cached(model: Any, small: bool) -> tuple[Any, ...]:
    """Return a token, and a cache that the model has filled with CACHED tokens."""
    transformers: Any = import_module("transformers")
    cache = transformers.StaticCache(config=model.config, max_cache_len=CACHED + AHEAD)
    with torch.no_grad():
        model(input_ids=_tokens(model, 1, CACHED), past_key_values=cache, use_cache=True, logits_to_keep=1)
    return _tokens(model, 1, 1), cache


def _decode_token(model: Any, token: Tensor, cache: Any) -> Tensor:
    return model(input_ids=token, past_key_values=cache, use_cache=True).logits


def _rewind(token: Tensor, cache: Any) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(CACHED)


ENTRIES = (
    Entry(
        "vae-decode", "SD/SDXL VAE decode to 1024², batch 1", "diffusers", _vae,
        lambda model, small: (_random(model, 1, 4, *((16, 16) if small else (128, 128))),), _decode_image, 6, channels_last=True,
    ),
    Entry("sd15-b2", "SD 1.5 UNet step at 512², batch 2", "diffusers", _sd15, _unet_inputs(2, 64), _denoise, 3, channels_last=True),
    Entry("sd15-b16", "SD 1.5 UNet step at 512², batch 16", "diffusers", _sd15, _unet_inputs(16, 64), _denoise, 7, channels_last=True),
    Entry("sdxl-b2", "SDXL UNet step at 1024², batch 2", "diffusers", _sdxl, _unet_inputs(2, 128), _denoise, 9, channels_last=True),
    Entry(
        "vae-train", "SD/SDXL VAE forward and backward, 4 × 256²", "diffusers", _vae, _images(4, 256), _reconstruct, 10,
        training=True, channels_last=True,
    ),
    Entry(
        "unet2d-train", "UNet2D forward and backward, 16 × 128²", "diffusers", _unet2d, _noisy_images, _predict_noise, 12,
        training=True, channels_last=True,
    ),
    Entry(
        "convnext-train", "ConvNeXt-B forward and backward, 64 × 224²", "transformers", _convnext,
        _labeled(64, torch.channels_last), _classify, 16, training=True, channels_last=True,
    ),
    Entry(
        "vit-train", "ViT-B forward and backward, 32 × 224²", "transformers", _vit,
        _labeled(32, torch.contiguous_format), _classify, 5, training=True,
    ),
    Entry("bert", "BERT-base, one sentence of 32 tokens", "transformers", _bert, _sentence, _encode, 1),
    Entry(
        "llama-train", "8-layer Llama forward and backward, 4 × 2048 tokens", "transformers", _llama, _text, _learn, 34, training=True
    ),
    Entry("llama-decode", "8-layer Llama, one token after 512, batch 1", "transformers", _llama, _cached, _decode_token, 2, rewind=_rewind),
)  # fmt: skip
