"""Tiny random models of every family, saved as Transformers saves them, and an attention to run them with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from outrider.models.config import DecoderConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}

# What each configuration adds to SHAPE. Windows are shorter than the text; soft caps bite.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama-wide-heads": ("Llama", {"head_dim": 20, "num_key_value_heads": 1}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 3.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}, "head_dim": 16}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN | {"original_max_position_embeddings": 16}, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral-whole": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN | {"original_max_position_embeddings": 16, "truncate": False}}),
    "qwen3": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}),
    "gemma": ("Gemma", {"num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": 5,
            "query_pre_attn_scalar": 13,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            },
            "final_logit_softcapping": 4.0,
        },
    ),
}


def make(name: str, spread: float = 0.3, **changes: Any) -> Any:
    """The Transformers model, float32, every parameter random: biases and norms too."""
    family, extra = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra, **changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


def save(name: str, folder: Path, **changes: Any) -> Any:
    """Write the model to `folder` and return it."""
    model = make(name, **changes)
    model.save_pretrained(folder)
    return model


class DenseAttend:
    """The plainest attention there is: one text, keys and values in lists, a float32 softmax over all of them."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.keys: list[Tensor] = [torch.empty(0)] * len(config.layers)
        self.values: list[Tensor] = [torch.empty(0)] * len(config.layers)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        config = self.config
        self.keys[layer] = torch.cat((self.keys[layer].to(k.dtype), k)) if len(self.keys[layer]) else k.clone()
        self.values[layer] = torch.cat((self.values[layer], v)) if len(self.values[layer]) else v.clone()
        repeats = config.heads // config.kv_heads
        keys = self.keys[layer].float().repeat_interleave(repeats, 1)  # [T, heads, dim]
        values = self.values[layer].float().repeat_interleave(repeats, 1)
        scores = torch.einsum("nhd,thd->hnt", q.float(), keys) * config.attention_scale
        if config.attention_softcap is not None:
            scores = (scores / config.attention_softcap).tanh() * config.attention_softcap
        here = torch.arange(len(keys) - len(q), len(keys)).unsqueeze(1)  # [N, 1]
        there = torch.arange(len(keys))
        window = config.layers[layer].window or len(keys)
        hidden = (there > here) | (there <= here - window)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hnt,thd->nhd", weights, values).flatten(1).to(q.dtype)
