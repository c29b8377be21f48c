"""`onepass.patch` on models of other libraries with random weights: the same answers, and exactly these counts."""

import copy
import functools
import math
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn

import onepass
from tests.ranks import leave

pytest.importorskip("diffusers"), pytest.importorskip("transformers"), pytest.importorskip("monai")
warnings.filterwarnings("ignore", category=DeprecationWarning)


class Sample(NamedTuple):
    model: nn.Module
    inputs: dict


class Counts(NamedTuple):
    found: int
    replaced: int
    fused: int
    left: int = 0
    already: int = 0


IDS = torch.arange(18).reshape(2, 9) % 17
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def unet():
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=8,
    )
    return Sample(model, {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor(3), "encoder_hidden_states": torch.randn(2, 7, 32)})


def vae():
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = AutoencoderKL(**blocks, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8, latent_channels=4)
    return Sample(model, {"sample": torch.randn(1, 3, 16, 16)})


def dit():
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=2, sample_size=8, norm_num_groups=4
    )
    return Sample(model, {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2])})


def from_transformers(name, config_name=None, **config):
    import transformers

    torch.manual_seed(0)
    inputs = {"input_ids": IDS}
    if "image_size" in config or "hidden_sizes" in config:
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    elif "d_model" in config:
        inputs["decoder_input_ids"] = IDS
    config = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **config} if "input_ids" in inputs else config
    return Sample(getattr(transformers, name)(getattr(transformers, config_name)(**config)), inputs)


def monai_unet():
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    return Sample(UNet(3, 1, 2, (4, 8, 8), (2, 2), num_res_units=2, act="RELU", norm="INSTANCE"), {"x": torch.randn(2, 1, 8, 8, 8)})


HEADS = {"num_key_value_heads": 1, "head_dim": 16}
T5 = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 50}
MODELS = {
    "unet": (unet, Counts(33, 33, 17)),
    "vae": (vae, Counts(24, 24, 22)),
    "dit": (dit, Counts(5, 5, 0)),
    "llama": (functools.partial(from_transformers, "LlamaForCausalLM", "LlamaConfig", **SMALL, **HEADS), Counts(5, 5, 2)),
    "qwen3": (functools.partial(from_transformers, "Qwen3ForCausalLM", "Qwen3Config", **SMALL, **HEADS), Counts(9, 9, 2)),
    "gemma": (functools.partial(from_transformers, "GemmaForCausalLM", "GemmaConfig", **SMALL, **HEADS), Counts(5, 5, 2)),
    "gemma3": (functools.partial(from_transformers, "Gemma3ForCausalLM", "Gemma3TextConfig", **SMALL, **HEADS), Counts(13, 13, 2)),
    "t5": (functools.partial(from_transformers, "T5ForConditionalGeneration", "T5Config", **T5), Counts(12, 12, 0)),
    "bert": (functools.partial(from_transformers, "BertModel", "BertConfig", **SMALL), Counts(5, 5, 5)),
    "vit": (functools.partial(from_transformers, "ViTModel", "ViTConfig", **SMALL, image_size=32, patch_size=8), Counts(5, 5, 2)),
    "convnext": (
        functools.partial(from_transformers, "ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 2, 1]),
        Counts(10, 10, 0),
    ),
    "monai": (monai_unet, Counts(9, 9, 9)),
}
CONVOLUTIONAL = ("unet", "vae", "convnext", "monai")


@functools.cache
def original(name, draw=0):
    make, _ = MODELS[name]
    model, inputs = make()
    torch.manual_seed(draw)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:  # norms start with ones and zeros, which hide mistakes
                param += torch.randn_like(param) / 5
            elif draw:
                param.copy_(torch.randn_like(param) * param.std())
    return Sample(model.eval(), inputs)


def copied(name, dtype=torch.float32, draw=0):
    model, inputs = original(name, draw)
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    return Sample(copy.deepcopy(model).to(dtype), inputs)


def outcome(sample):
    """The output and the gradients of all parameters, by name."""
    result = sample.model(**sample.inputs)
    y = next((getattr(result, key) for key in ("logits", "last_hidden_state", "sample") if hasattr(result, key)), result)
    generator = torch.Generator().manual_seed(5)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return {"output": y.detach(), **{name: p.grad for name, p in sample.model.named_parameters() if p.grad is not None}}


@functools.cache
def exact(name, draw=0):
    return outcome(copied(name, torch.float64, draw))


@functools.cache
def before(name, dtype, draw=0):
    return outcome(copied(name, dtype, draw))


def error(found, name, draw=0):
    """The distance from the fp64 run, relative to its norm: of the output, and of all gradients together."""
    value = exact(name, draw)
    assert found.keys() == value.keys()
    off, length = ({key: t.double().norm().item() for key, t in part.items()} for part in ({k: found[k] - value[k] for k in value}, value))
    output = off.pop("output") / length.pop("output")
    return output, math.hypot(*off.values()) / math.hypot(*length.values())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_same_answers(name, channels_last):
    if channels_last and name not in CONVOLUTIONAL:
        pytest.skip("no convolutions")
    sample = copied(name)
    report = onepass.patch(sample.model, channels_last=channels_last)
    assert Counts(**report.counts) == MODELS[name][1]
    found, old = outcome(sample), before(name, torch.float32)
    for key, value in found.items():
        assert value.dtype == old[key].dtype and value.shape == old[key].shape
    for mine, theirs in zip(error(found, name), error(old, name)):
        assert mine <= 2 * theirs + 2e-6  # never more than twice torch's error


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "unet")) for name in MODELS])
def test_no_further_from_fp64_in_bf16(name):
    """Several draws of the weights are compared. With one draw, chance decides which is closer."""
    mine, theirs = [], []
    for draw in range({"unet": 1, "vae": 1, "monai": 24}.get(name, 6)):  # monai's gradients have outliers, so six draws are too few
        sample = copied(name, torch.bfloat16, draw)
        onepass.patch(sample.model)
        found, old = outcome(sample), before(name, torch.bfloat16, draw)
        assert {key: value.dtype for key, value in found.items()} == {key: value.dtype for key, value in old.items()}
        mine.append(error(found, name, draw)), theirs.append(error(old, name, draw))
    for found, old in zip(zip(*mine), zip(*theirs)):
        assert math.hypot(*found) <= 1.05 * math.hypot(*old)


def step(sample, autocast, wrap=lambda model: model):
    """Two training steps with gradient checkpointing. Returns how far each parameter moved."""
    model, start = sample.model.train(), {name: p.detach().clone() for name, p in sample.model.named_parameters()}
    model.enable_gradient_checkpointing()
    wrapped, optimizer = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(7)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (wrapped(**sample.inputs).sample - torch.randn_like(sample.inputs["sample"])).float().square().mean()
        loss.backward()
        optimizer.step()
    return torch.cat([(p.detach() - start[name]).flatten() for name, p in model.named_parameters()])


def steps_agree(autocast, channels_last, wrap=lambda model: model):
    plain, patched = copied("unet"), copied("unet")
    assert onepass.patch(patched.model, channels_last=channels_last).counts["fused"] == 17
    expected, found = step(plain, autocast, wrap), step(patched, autocast, wrap)
    assert (found - expected).norm() <= (0.05 if autocast else 1e-5) * expected.norm()


# In bfloat16, convolutions take 40 s on a CPU without instructions for it.
@pytest.mark.parametrize("autocast, channels_last", [(False, False), pytest.param(True, True, marks=pytest.mark.slow)])
def test_a_diffusion_training_step(autocast, channels_last):
    steps_agree(autocast, channels_last)


def _rank(rank, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    original("unet").inputs["sample"].mul_(rank + 1)  # each process has its own data
    steps_agree(False, False, nn.parallel.DistributedDataParallel)
    leave()


def test_a_training_step_on_two_processes(tmp_path):
    torch.multiprocessing.spawn(_rank, (tmp_path / "meet",), nprocs=2)


def test_a_wrapped_model_is_patched_inside(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    try:
        sample = copied("llama")
        wrapped = nn.parallel.DistributedDataParallel(sample.model)
        assert Counts(**onepass.patch(wrapped).counts) == MODELS["llama"][1]
        for mine, theirs in zip(
            error(outcome(Sample(wrapped.module, sample.inputs)), "llama"), error(before("llama", torch.float32), "llama")
        ):
            assert mine <= 2 * theirs + 2e-6
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "monai"])
def test_no_graph_breaks_under_compile(name):
    from torch._dynamo.utils import counters

    graphs = []
    for patched in (False, True):
        sample = copied(name)
        if patched:
            onepass.patch(sample.model)
        torch._dynamo.reset(), counters.clear()
        with torch.no_grad():
            expected = sample.model(**sample.inputs)
            found = torch.compile(sample.model, backend="eager", fullgraph=True)(**sample.inputs)
            found, expected = (y if isinstance(y, torch.Tensor) else y.logits for y in (found, expected))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        graphs.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert graphs == [(1, 0), (1, 0)]
