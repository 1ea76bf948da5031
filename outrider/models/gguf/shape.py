"""A GGUF file's metadata as a config.json in Hugging Face's form, and its tensor names as Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outrider.errors import ConfigError
from outrider.models.gguf.header import Header, Value


@dataclass(frozen=True, slots=True)
class Family:
    """How one llama.cpp architecture is called and stored on the other side."""

    architecture: str
    model_type: str
    rotary_pairs: bool = False
    """q and k rows are stored for rotary pairs (0, 1), (2, 3), ...; Hugging Face pairs i with i + head_dim / 2."""
    norm_offset: float = 0.0
    """llama.cpp stores this much more than the norm weight of the checkpoint."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tensor names that differ from NAMES below."""
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Entries of config.json that the architecture implies and the file does not state."""


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
NOT_WEIGHTS = {ROPE_FREQS}  # said in config.json instead

GEMMA_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SILU = {"hidden_act": "silu"}
GELU = {"hidden_activation": "gelu_pytorch_tanh"}

FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", rotary_pairs=True, extra=SILU),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", extra=SILU),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", extra=SILU),
    "gemma": Family("GemmaForCausalLM", "gemma", norm_offset=1.0, extra={**GELU, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", norm_offset=1.0, names=GEMMA_FOUR_NORMS, extra=GELU),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norm_offset=1.0,
        names=GEMMA_FOUR_NORMS,
        extra={**GELU, "rope_local_base_freq": 10000.0},
    ),
}
# The largest Gemma 2 and 3 scale queries by hidden_size / heads, all others by head_dim. The file does
# not say which; llama.cpp, too, knows them by their layer count.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


class Metadata:
    """Typed access to a file's metadata. ConfigError where a key is missing or of the wrong kind."""

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, why: str) -> ConfigError:
        return ConfigError(f"{self.where}: {why}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one number for each layer, all alike
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.fail(f"{key} should be one whole number, found {self._shown(key)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(f"{key} should be a number, found {self._shown(key)}")
        return _shortest(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"{key} should be a string, found {self._shown(key)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key} should be true or false, found {self._shown(key)}")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.values.get(key)
        if not isinstance(value, list):
            raise self.fail(f"{key} should be a list, found {self._shown(key)}")
        return value

    def token(self, name: str, size: int) -> int | None:
        """The id of a special token (`bos`, `eos`, ...), or None where the file names none it has."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.values:
            return None
        token = self.values[key]
        return token if isinstance(token, int) and 0 <= token < size else None

    def _shown(self, key: str) -> str:
        return f"{self.values[key]!r:.60}" if key in self.values else "nothing"


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32, since the file stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def family_of(meta: Metadata) -> tuple[str, Family]:
    """The file's architecture. ConfigError, with the list of what is read, where it is another one."""
    name = meta.text("general.architecture")
    if name not in FAMILIES:
        raise meta.fail(f"architecture {name!r} is not read from GGUF; what is: {', '.join(FAMILIES)}")
    if (parts := meta.integer("split.count", 1)) > 1:
        raise meta.fail(f"this is one of {parts} parts; join them first with llama.cpp's `llama-gguf-split --merge`")
    if meta.integer(f"{name}.expert_count", 0):
        raise meta.fail(f"this {name} is a mixture of experts, which is not read from GGUF; use its safetensors")
    return name, FAMILIES[name]


def hf_name(gguf_name: str, family: Family) -> str | None:
    """The name of a tensor in a Hugging Face checkpoint, or None where such a model has no such tensor."""
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if not found:
        return None
    layer, part, leaf = found.groups()
    name = family.names.get(part) or NAMES.get(part)
    return f"model.layers.{layer}.{name}.{leaf}" if name else None


def hf_config(header: Header, meta: Metadata, rope_freqs: np.ndarray | None) -> dict[str, Any]:
    """The config.json of the model in a GGUF file. `rope_freqs` is the tensor of that name, where there is one."""
    arch, family = family_of(meta)
    shapes = {t.name: t.shape for t in header.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise meta.fail("the embedding token_embd.weight is missing: this is no whole language model")
    vocab, hidden = shapes["token_embd.weight"]
    heads = meta.integer(f"{arch}.attention.head_count")
    if not heads or hidden != meta.integer(f"{arch}.embedding_length"):
        raise meta.fail(f"{heads} heads and an embedding of width {hidden} do not fit the metadata")
    layers = meta.integer(f"{arch}.block_count")
    if {name.split(".")[1] for name in shapes if name.startswith("blk.")} != {
        str(i) for i in range(min(layers, len(shapes)))
    }:
        raise meta.fail(f"the metadata says {layers} layers, and the tensors are not those of so many")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": meta.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": _head_dim(meta, arch, hidden // heads),
        "max_position_embeddings": meta.integer(f"{arch}.context_length"),
        "rms_norm_eps": meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number(f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": "float32",
        **{f"{name}_token_id": meta.token(name, vocab) for name in ("bos", "eos")},
        "pad_token_id": meta.token("padding", vocab),
        **family.extra,
    }
    if arch == "llama" and "blk.0.attn_q.bias" in shapes:
        config["attention_bias"] = True
    if scaling := _rope_scaling(meta, arch, config, rope_freqs):
        config["rope_scaling"] = scaling
    config |= _windows(meta, arch, config)
    if arch in GEMMA_27B_LAYERS:
        config["query_pre_attn_scalar"] = _query_scale(arch, config)
    return config


def _head_dim(meta: Metadata, arch: str, default: int) -> int:
    head_dim = meta.integer(f"{arch}.attention.key_length", default)
    if head_dim != meta.integer(f"{arch}.attention.value_length", head_dim):
        raise meta.fail("keys and values of different width are not read from GGUF")
    if head_dim != meta.integer(f"{arch}.rope.dimension_count", head_dim):
        raise meta.fail("a rotary embedding of part of each head is not read from GGUF")
    return head_dim


def _query_scale(arch: str, config: Mapping[str, Any]) -> int:
    if config["num_hidden_layers"] == GEMMA_27B_LAYERS[arch]:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _windows(meta: Metadata, arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sliding windows and the soft caps that come with them."""
    window = meta.integer(f"{arch}.attention.sliding_window", 0)
    if arch == "llama":  # a llama with a window is what Hugging Face calls a Mistral
        named = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
        return named if window else {}
    if arch not in GEMMA_27B_LAYERS:
        return {}
    period = 2 if arch == "gemma2" else 6
    full = {layer for layer in range(config["num_hidden_layers"]) if (layer + 1) % period == 0}
    layers = range(config["num_hidden_layers"])
    found: dict[str, Any] = {
        "sliding_window": window,
        "layer_types": ["full_attention" if layer in full else "sliding_attention" for layer in layers],
    }
    for ours, theirs in (("attn", "attn"), ("final", "final")):
        key = f"{arch}.{theirs}_logit_softcapping"
        found[f"{ours}_logit_softcapping"] = meta.number(key) if key in meta.values else None
    return found


def _rope_scaling(
    meta: Metadata, arch: str, config: Mapping[str, Any], freqs: np.ndarray | None
) -> dict[str, Any] | None:
    if freqs is not None:
        return _llama3_scaling(meta, arch, config, freqs)
    kind = meta.text(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = meta.number(f"{arch}.rope.scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = meta.integer(f"{arch}.rope.scaling.original_context_length", config["max_position_embeddings"])
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise meta.fail(f"rope scaling {kind!r} is not read from GGUF; what is: linear, yarn, llama3")


def _llama3_scaling(meta: Metadata, arch: str, config: Mapping[str, Any], freqs: np.ndarray) -> dict[str, Any]:
    """Find the Llama 3 scaling that gives these divisors of the rotary frequencies, [head_dim / 2].

    The file keeps only the result. All published Llama 3 models share every number
    but the factor, which is the largest divisor; the result is checked against the file.
    """
    original = meta.integer(f"{arch}.rope.scaling.original_context_length", 8192)
    factor, low, high = _shortest(float(freqs.max())), 1.0, 4.0
    dim = config["head_dim"]
    turns = original / (2 * np.pi * config["rope_theta"] ** (np.arange(0, dim, 2) / dim))  # in the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if freqs.shape != expected.shape or not np.allclose(freqs, expected, rtol=1e-3):
        raise meta.fail(f"{ROPE_FREQS} is no scaling of the Llama 3 kind; use the model's safetensors")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
