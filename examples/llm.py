"""A language model as Qwen3: RMSNorm before attention and MLP, fused with the residual sums, and of the heads of queries and keys."""

import torch
from side_by_side import compare
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
)


def step(model: Qwen3ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    result = model(tokens, labels=tokens, use_cache=False)
    result.loss.backward()
    return result.logits


compare(step, Qwen3ForCausalLM(config), torch.randint(512, (2, 64)))
