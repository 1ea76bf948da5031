"""The supported architectures: how llama.cpp and Hugging Face name and store the same model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.checkpoints.gguf.metadata import Metadata


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How Hugging Face names and stores one llama.cpp architecture."""

    architecture: str
    model_type: str
    rotary_pairs: bool = False
    """q and k rows are stored for rotary pairs (0, 1), (2, 3), ...; Hugging Face pairs i with i + head_dim / 2."""
    norm_offset: float = 0.0
    """What llama.cpp adds to the checkpoint's norm weights."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tensor names that differ from NAMES below."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Entries of config.json that the architecture implies and the file does not hold."""


NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FREQS = "rope_freqs.weight"
NOT_WEIGHTS = {ROPE_FREQS}  # part of config.json instead

GEMMA_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SILU = {"hidden_act": "silu"}
GELU = {"hidden_activation": "gelu_pytorch_tanh"}

GGUF_FAMILIES = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", rotary_pairs=True, extra=SILU),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2", extra=SILU),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3", extra=SILU),
    "gemma": GGUFFamily(
        "GemmaForCausalLM", "gemma", norm_offset=1.0, extra={**GELU, "hidden_act": "gelu_pytorch_tanh"}
    ),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", "gemma2", norm_offset=1.0, names=GEMMA_FOUR_NORMS, extra=GELU),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norm_offset=1.0,
        names=GEMMA_FOUR_NORMS,
        extra={**GELU, "rope_local_base_freq": 10000.0},
    ),
}


def family_of(meta: Metadata) -> tuple[str, GGUFFamily]:
    """The file's architecture. Raises ConfigError, with the list of supported ones, where it is another."""
    name = meta.text("general.architecture")
    if name not in GGUF_FAMILIES:
        raise meta.fail(f"architecture {name!r} is not read from GGUF; what is: {', '.join(GGUF_FAMILIES)}")
    if (parts := meta.integer("split.count", 1)) > 1:
        raise meta.fail(f"this is one of {parts} parts; join them first with llama.cpp's `llama-gguf-split --merge`")
    if meta.integer(f"{name}.expert_count", 0):
        raise meta.fail(f"this {name} is a mixture of experts, which is not read from GGUF; use its safetensors")
    return name, GGUF_FAMILIES[name]


def hf_name(gguf_name: str, family: GGUFFamily) -> str | None:
    """The name of a tensor in a Hugging Face checkpoint; None where the model has no such tensor."""
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if not found:
        return None
    layer, part, leaf = found.groups()
    name = family.names.get(part) or NAMES.get(part)
    return f"model.layers.{layer}.{name}.{leaf}" if name else None


def hf_shape(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape a tensor of this Hugging Face name has in a model of this config."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    k_rows = config["num_key_value_heads"] * config["head_dim"]
    part, leaf = name.split(".")[-2:]
    rows_columns = {
        "embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "q_proj": (q_rows, hidden),
        "k_proj": (k_rows, hidden),
        "v_proj": (k_rows, hidden),
        "o_proj": (hidden, q_rows),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    if part in rows_columns:
        return rows_columns[part] if leaf == "weight" else rows_columns[part][:1]
    return (config["head_dim"] if part in ("q_norm", "k_norm") else hidden,)
