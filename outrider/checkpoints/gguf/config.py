"""From a GGUF file's metadata to a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from outrider.checkpoints.gguf.families import ROPE_FREQS, family_of
from outrider.checkpoints.gguf.header import Header
from outrider.checkpoints.gguf.metadata import Metadata, shortest_decimal

# The largest Gemma 2 and 3 scale queries by hidden_size / heads, all others by head_dim. The file does
# not say which; llama.cpp also goes by the layer count.
GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def hf_config(header: Header, meta: Metadata, rope_freqs: np.ndarray | None) -> dict[str, Any]:
    """The config.json of the model in a GGUF file. `rope_freqs` is the tensor of that name, where there is one."""
    arch, family = family_of(meta)
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if len(shapes.get("token_embd.weight", ())) != 2:
        raise meta.fail("the embedding token_embd.weight is missing: this is no whole language model")
    vocab, hidden = shapes["token_embd.weight"]
    heads, kv_heads = _head_counts(meta, arch)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": meta.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": _layer_count(meta, arch, shapes),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _head_dim(meta, arch, hidden // heads),
        "max_position_embeddings": meta.integer(f"{arch}.context_length"),
        "rms_norm_eps": meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": meta.number(f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in shapes,
        "dtype": "float32",
        "transformers_version": "5.0.0",  # without it Transformers warns of a Mistral bug that does not apply
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


def _head_counts(meta: Metadata, arch: str) -> tuple[int, int]:
    heads = meta.integer(f"{arch}.attention.head_count")
    kv_heads = meta.integer(f"{arch}.attention.head_count_kv", heads)
    if not heads or not kv_heads or heads % kv_heads:
        raise meta.fail(f"{heads} heads cannot share {kv_heads} heads of keys and values")
    return heads, kv_heads


def _layer_count(meta: Metadata, arch: str, names: Iterable[str]) -> int:
    layers = meta.integer(f"{arch}.block_count")
    found = {name.split(".")[1] for name in names if name.startswith("blk.")}
    if len(found) != layers or found != {str(layer) for layer in range(layers)}:
        raise meta.fail(f"{arch}.block_count is {layers}, and the tensors are not those of as many layers")
    return layers


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
    key = f"{arch}.attention.sliding_window"
    if arch == "llama" and meta.integer(key, 0):  # Hugging Face calls a llama with a window a Mistral
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": meta.integer(key)}
    if arch not in GEMMA_27B_LAYERS:
        return {}
    period = 2 if arch == "gemma2" else 6
    last = [(layer + 1) % period == 0 for layer in range(config["num_hidden_layers"])]
    found: dict[str, Any] = {
        "sliding_window": meta.integer(key),
        "layer_types": ["full_attention" if full else "sliding_attention" for full in last],
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        found[name] = meta.number(f"{arch}.{name}") if f"{arch}.{name}" in meta.values else None
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
    """The Llama 3 scaling that gives these divisors of the rotary frequencies, [head_dim / 2].

    The file holds only the divisors. All published Llama 3 models share every parameter
    but the factor, which is the largest divisor; the result is checked against the file.
    """
    original = meta.integer(f"{arch}.rope.scaling.original_context_length", 8192)
    factor, low, high = shortest_decimal(float(freqs.max())), 1.0, 4.0
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
