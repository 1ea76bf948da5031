"""From config.json to a DecoderConfig, for the families the native decoder speaks.

Every key of a config.json is either honoured, known to change nothing at inference, or empty.
Anything else makes the checkpoint "not ours": better the slower fallback than a wrong model.

Dynamic NTK scaling is not ours: past the trained length its frequencies depend on the length of
the text, so keys cached earlier, or shared between texts, would be turned by the wrong angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.models.config import Activation, DecoderConfig, LayerConfig, RopeConfig
from outrider.models.fields import (
    MAX_LAYERS,
    FieldError,
    NotOurs,
    flag,
    group,
    number,
    optional_number,
    text,
    texts,
    whole,
)


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type implies beyond its config.json."""

    architecture: str
    defaults: Mapping[str, Any]
    """The further keys this family honours, and their values where config.json is silent."""
    facts: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Fields of DecoderConfig that no key of config.json decides."""


REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHARED: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": 1.0,
}
QWEN: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
GEMMA_2: dict[str, Any] = GEMMA | {
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA_3: dict[str, Any] = {key: value for key, value in GEMMA_2.items() if key != "attn_logit_softcapping"} | {
    "max_position_embeddings": 131_072,
    "final_logit_softcapping": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": None,
    "_sliding_window_pattern": None,
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}),
    "mistral": Family(
        "MistralForCausalLM",
        {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family("Qwen2ForCausalLM", QWEN, {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", QWEN | {"head_dim": 128, "attention_bias": False}, {"qk_norm": True}),
    "gemma": Family("GemmaForCausalLM", GEMMA | {"num_key_value_heads": 16}, {"unit_offset": True}),
    "gemma2": Family("Gemma2ForCausalLM", GEMMA_2, {"unit_offset": True, "sandwich_norms": True}),
    "gemma3_text": Family("Gemma3ForCausalLM", GEMMA_3, {"unit_offset": True, "sandwich_norms": True, "qk_norm": True}),
}

HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    bos_token_id cache_implementation chunk_size_feed_forward
    diversity_penalty dtype early_stopping eos_token_id hidden_dropout id2label initializer_range is_decoder
    is_llama_config label2id length_penalty max_length max_sequence_length min_length model_type
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states
    pad_token_id pretraining_tp repetition_penalty return_dict temperature tokenizer_class top_k top_p
    torch_dtype transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed
    unsloth_version use_cache
    """.split()  # noqa: SIM905 - fifty quoted lines would read worse
)
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
}


def understand(config_json: Mapping[str, Any]) -> DecoderConfig:
    """The decoder this config.json describes. NotOurs says why it is none of ours, and the fallback takes it.

    FieldError, a ConfigError, names a value that is wrong for any decoder.
    """
    model_type = text(config_json, "model_type")
    if model_type is None or (family := FAMILIES.get(model_type)) is None:
        raise NotOurs(f"model_type {model_type!r} is none of {', '.join(FAMILIES)}")
    for name in texts(config_json, "architectures"):
        if name.lower() != family.architecture.lower():
            raise NotOurs(f"architecture {name} is not {family.architecture}")
    defaults = SHARED | dict(family.defaults)
    _refuse_unknown(config_json, honoured={*REQUIRED, *defaults})
    values = defaults | {key: config_json[key] for key in (*REQUIRED, *defaults) if key in config_json}
    sizes = _read_sizes(values)
    ropes = _read_ropes(values, nested=model_type == "gemma3_text")
    scalar = values.get("query_pre_attn_scalar")
    bias = flag(values, "attention_bias")
    return DecoderConfig(
        model_type=model_type,
        **sizes,
        ropes=ropes,
        layers=_read_layers(model_type, values, apart=len(ropes) > 1),
        norm_eps=number(values, "rms_norm_eps"),
        activation=_read_activation(model_type, config_json, str(defaults["hidden_act"])),
        attention_scale=(sizes["head_dim"] if scalar is None else number(values, "query_pre_attn_scalar")) ** -0.5,
        attention_softcap=optional_number(values, "attn_logit_softcapping"),
        final_softcap=optional_number(values, "final_logit_softcapping"),
        embedding_scale=sizes["hidden_size"] ** 0.5 if family.facts.get("unit_offset") else 1.0,  # Gemma
        out_bias=bias,
        mlp_bias=flag(values, "mlp_bias"),
        tied=flag(values, "tie_word_embeddings"),
        dtype=_read_dtype(config_json),
        **{"qkv_bias": bias, **family.facts},
    )


def _refuse_unknown(config_json: Mapping[str, Any], honoured: set[str]) -> None:
    if config_json.get("quantization_config"):
        raise NotOurs("the checkpoint is quantised (quantization_config)")
    for key, value in config_json.items():
        if key not in honoured and key not in HARMLESS and value:  # empty, null, false and 0 ask for nothing
            raise NotOurs(f"{key} = {value!r} is unknown to the native decoder")


def _read_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = whole(values, "hidden_size"), whole(values, "num_attention_heads")
    kv_heads = heads if values["num_key_value_heads"] is None else whole(values, "num_key_value_heads")
    head_dim = hidden // heads if values["head_dim"] is None else whole(values, "head_dim")
    if heads % kv_heads or head_dim % 2:
        raise NotOurs(f"{heads} heads over {kv_heads} key-value heads of {head_dim} do not divide evenly")
    return {
        "vocab_size": whole(values, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": whole(values, "intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": whole(values, "max_position_embeddings"),
    }


def _read_layers(model_type: str, values: Mapping[str, Any], *, apart: bool) -> tuple[LayerConfig, ...]:
    """Windows by layer. apart: windowed layers take the first rope, the others the second."""
    count = whole(values, "num_hidden_layers", MAX_LAYERS)
    window = values.get("sliding_window")
    if "use_sliding_window" in values and not flag(values, "use_sliding_window"):
        window = None
    types = texts(values, "layer_types") or _default_types(model_type, values, window is not None)
    if len(types) != count or not set(types) <= {"sliding_attention", "full_attention"}:
        raise NotOurs(f"layer_types = {types!r} for {count} layers")
    sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding):
        window = whole({"sliding_window": window}, "sliding_window")
    return tuple(LayerConfig(window if s else None, int(apart and not s)) for s in sliding)


def _default_types(model_type: str, values: Mapping[str, Any], windows: bool) -> list[str]:
    """Which layers have windows, where layer_types is silent."""
    first = values.get("max_window_layers", 0)
    if not isinstance(first, int):
        raise FieldError("max_window_layers", "a whole number", first)
    full_every = 2 if model_type == "gemma2" else 0
    if model_type == "gemma3_text":
        full_every = values["sliding_window_pattern"] or values["_sliding_window_pattern"] or 6
        full_every = whole({"sliding_window_pattern": full_every}, "sliding_window_pattern")
    return [
        "sliding_attention"
        if windows and i >= first and not (full_every and (i + 1) % full_every == 0)
        else "full_attention"
        for i in range(whole(values, "num_hidden_layers", MAX_LAYERS))
    ]


def _read_ropes(values: Mapping[str, Any], *, nested: bool) -> tuple[RopeConfig, ...]:
    """One rope, or for Gemma 3 two: that of windowed layers, then that of the others."""
    scaling, given = group(values, "rope_scaling"), group(values, "rope_parameters")
    if number(values, "partial_rotary_factor") != 1:
        raise NotOurs("partial_rotary_factor other than 1")
    theta, positions = number(values, "rope_theta"), whole(values, "max_position_embeddings")
    if not nested:
        return (_read_rope(scaling or given, theta, positions),)
    if unknown := given.keys() - {"sliding_attention", "full_attention"}:
        raise NotOurs(f"rope_parameters has {', '.join(sorted(unknown))}")
    local = _read_rope(group(given, "sliding_attention"), number(values, "rope_local_base_freq"), positions)
    return local, _read_rope(group(given, "full_attention") | scaling, theta, positions)


def _read_rope(given: dict[str, Any], theta: float, max_positions: int) -> RopeConfig:
    """given: rope_parameters, or rope_scaling as older files call it."""
    kind = text({"type": "default"} | given, "rope_type" if "rope_type" in given else "type")
    if kind is None or kind not in ROPE_KEYS:
        raise NotOurs(f"rope type {kind!r} is none of {', '.join(ROPE_KEYS)}")
    if given.get("partial_rotary_factor", 1) != 1:
        raise NotOurs("partial_rotary_factor other than 1")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]}
    if unknown := sorted(key for key, value in given.items() if key not in known and value):
        raise NotOurs(f"rope type {kind} has {', '.join(unknown)}")
    values = {"rope_theta": theta, "original_max_position_embeddings": max_positions}
    values |= {key: value for key, value in given.items() if value is not None}
    rope: dict[str, Any] = {"theta": number(values, "rope_theta"), "kind": kind}
    if kind != "default":
        rope["factor"] = number(values, "factor")
    if kind in ("llama3", "yarn"):
        rope["original_positions"] = whole(values, "original_max_position_embeddings")
    if kind == "llama3":
        rope |= {key: number(values, key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        rope |= {key: number(values, key) for key in ("beta_fast", "beta_slow") if values.get(key)}
        rope |= {"truncate": bool(values.get("truncate", True)), "amplitude": _yarn_amplitude(values)}
    return RopeConfig(**rope)


def _yarn_amplitude(values: Mapping[str, Any]) -> float:
    if values.get("attention_factor") is not None:
        return number(values, "attention_factor")

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    factor = number(values, "factor")
    if values.get("mscale") and values.get("mscale_all_dim"):
        return grown(number(values, "mscale")) / grown(number(values, "mscale_all_dim"))
    return grown(1.0)


def _read_activation(model_type: str, config_json: Mapping[str, Any], default: str) -> Activation:
    names = {text(config_json, key) for key in ("hidden_act", "hidden_activation")} - {None} or {default}
    if model_type == "gemma":  # the first Gemma says gelu and means its tanh form
        names = {"gelu_pytorch_tanh" if name == "gelu" else name for name in names}
    if len(names) != 1 or (name := names.pop()) not in ACTIVATIONS:
        raise NotOurs(f"activation {' and '.join(sorted(map(str, names)))} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _read_dtype(config_json: Mapping[str, Any]) -> torch.dtype:
    name = config_json.get("dtype") or config_json.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise NotOurs(f"dtype {name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]
