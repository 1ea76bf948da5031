"""From config.json to a DecoderConfig, for the model families the native decoder supports.

Every key of a config.json is either read, known to change nothing at inference, or empty. Any
other key makes the model unsupported: the slower fallback is better than wrong output.

Dynamic NTK scaling is not supported: past the trained length its frequencies depend on the length
of the sequence, so keys cached earlier or shared between sequences would have wrong angles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.models.config import DTYPES, Activation, DecoderConfig, LayerConfig, RopeConfig
from outrider.models.fields import (
    MAX_LAYERS,
    FieldError,
    UnsupportedModel,
    read_bool,
    read_dict,
    read_float,
    read_int,
    read_optional_float,
    read_str,
    read_str_list,
)


@dataclass(frozen=True, slots=True)
class Family:
    """What a model_type implies beyond its config.json."""

    architecture: str
    defaults: Mapping[str, Any]
    """The further keys this family reads, with their defaults."""
    overrides: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Fields of DecoderConfig that no key of config.json sets."""


REQUIRED_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
COMMON_DEFAULTS: dict[str, Any] = {
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
QWEN_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
MIMO_DEFAULTS: dict[str, Any] = QWEN_DEFAULTS | {  # Qwen2 with a module that predicts further tokens
    "attention_bias": True,  # says nothing of the output projection, which has none
    "auto_map": None,  # Transformers lacks this family, and runs code from the checkpoint
    "num_speculative_steps": None,  # and what follows: how FastMTP trained the module
    "mtp_loss_step_weights": None,
    "ntp_loss_weight": None,
    "mtp_loss_weight": None,
}
GEMMA_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
GEMMA_2_DEFAULTS: dict[str, Any] = GEMMA_DEFAULTS | {
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA_3_DEFAULTS: dict[str, Any] = {k: v for k, v in GEMMA_2_DEFAULTS.items() if k != "attn_logit_softcapping"} | {
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
    "qwen2": Family("Qwen2ForCausalLM", QWEN_DEFAULTS, {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False}, {"qk_norm": True}),
    "mimo": Family("MiMoForCausalLM", MIMO_DEFAULTS, {"qkv_bias": True, "out_bias": False}),
    "gemma": Family("GemmaForCausalLM", GEMMA_DEFAULTS | {"num_key_value_heads": 16}, {"unit_offset": True}),
    "gemma2": Family("Gemma2ForCausalLM", GEMMA_2_DEFAULTS, {"unit_offset": True, "sandwich_norms": True}),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", GEMMA_3_DEFAULTS, {"unit_offset": True, "sandwich_norms": True, "qk_norm": True}
    ),
}

IGNORED_KEYS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout
    bos_token_id cache_implementation chunk_size_feed_forward
    diversity_penalty dtype early_stopping eos_token_id hidden_dropout id2label initializer_range is_decoder
    is_llama_config label2id length_penalty max_length max_sequence_length min_length model_type
    mtp_num_hidden_layers no_repeat_ngram_size num_beam_groups num_beams num_nextn_predict_layers
    num_return_sequences output_attentions output_hidden_states
    pad_token_id pretraining_tp repetition_penalty return_dict temperature tokenizer_class top_k top_p
    torch_dtype transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed
    unsloth_version use_cache
    """.split()  # noqa: SIM905 - fifty quoted lines are harder to read
)
ACTIVATION_NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
}


def parse_config(config_json: Mapping[str, Any]) -> DecoderConfig:
    """The decoder this config.json describes.

    Raises UnsupportedModel where only the fallback can run it, and FieldError, a ConfigError,
    for a value that is wrong for any decoder.
    """
    model_type = read_str(config_json, "model_type")
    if model_type is None or (family := FAMILIES.get(model_type)) is None:
        raise UnsupportedModel(f"model_type {model_type!r} is none of {', '.join(FAMILIES)}")
    for name in read_str_list(config_json, "architectures"):
        if name.lower() != family.architecture.lower():
            raise UnsupportedModel(f"architecture {name} is not {family.architecture}")
    defaults = COMMON_DEFAULTS | dict(family.defaults)
    _check_keys(config_json, known={*REQUIRED_KEYS, *defaults})
    values = defaults | {key: config_json[key] for key in (*REQUIRED_KEYS, *defaults) if key in config_json}
    sizes = _read_sizes(values)
    ropes = _read_ropes(values, nested=model_type == "gemma3_text")
    scalar = values.get("query_pre_attn_scalar")
    bias = read_bool(values, "attention_bias")
    return DecoderConfig(
        model_type=model_type,
        **sizes,
        ropes=ropes,
        layers=_read_layers(model_type, values, two_ropes=len(ropes) > 1),
        norm_eps=read_float(values, "rms_norm_eps"),
        activation=_read_activation(model_type, config_json, str(defaults["hidden_act"])),
        attention_scale=(sizes["head_dim"] if scalar is None else read_float(values, "query_pre_attn_scalar")) ** -0.5,
        attention_softcap=read_optional_float(values, "attn_logit_softcapping"),
        final_softcap=read_optional_float(values, "final_logit_softcapping"),
        embedding_scale=sizes["hidden_size"] ** 0.5 if family.overrides.get("unit_offset") else 1.0,  # Gemma
        mlp_bias=read_bool(values, "mlp_bias"),
        tied=read_bool(values, "tie_word_embeddings"),
        dtype=_read_dtype(config_json),
        **{"qkv_bias": bias, "out_bias": bias, **family.overrides},
    )


def read_rope(values: Mapping[str, Any]) -> RopeConfig:
    """The one rope that the values of a config.json describe."""
    return _read_ropes(COMMON_DEFAULTS | {"max_position_embeddings": 2048} | dict(values), nested=False)[0]


def read_activation(values: Mapping[str, Any]) -> Activation:
    """The activation that the values of a config.json name; silu where they name none."""
    return _read_activation("", values, "silu")


def _check_keys(config_json: Mapping[str, Any], known: set[str]) -> None:
    if config_json.get("quantization_config"):
        raise UnsupportedModel("the checkpoint is quantised (quantization_config)")
    for key, value in config_json.items():
        if key not in known and key not in IGNORED_KEYS and value:  # empty, null, false and 0 change nothing
            raise UnsupportedModel(f"{key} = {value!r} is unknown to the native decoder")


def _read_sizes(values: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = read_int(values, "hidden_size"), read_int(values, "num_attention_heads")
    kv_heads = heads if values["num_key_value_heads"] is None else read_int(values, "num_key_value_heads")
    head_dim = hidden // heads if values["head_dim"] is None else read_int(values, "head_dim")
    if heads % kv_heads or head_dim % 2:
        raise UnsupportedModel(f"{heads} heads over {kv_heads} key-value heads of {head_dim} do not divide evenly")
    return {
        "vocab_size": read_int(values, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": read_int(values, "intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_positions": read_int(values, "max_position_embeddings"),
    }


def _read_layers(model_type: str, values: Mapping[str, Any], *, two_ropes: bool) -> tuple[LayerConfig, ...]:
    """The window and rope of each layer. two_ropes: windowed layers use the first rope, the others the second."""
    count = read_int(values, "num_hidden_layers", MAX_LAYERS)
    window = values.get("sliding_window")
    if "use_sliding_window" in values and not read_bool(values, "use_sliding_window"):
        window = None
    types = read_str_list(values, "layer_types") or _default_types(model_type, values, window is not None)
    if len(types) != count or not set(types) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"layer_types = {types!r} for {count} layers")
    sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding):
        window = read_int({"sliding_window": window}, "sliding_window")
    return tuple(LayerConfig(window if s else None, int(two_ropes and not s)) for s in sliding)


def _default_types(model_type: str, values: Mapping[str, Any], windows: bool) -> list[str]:
    """Which layers have windows, where layer_types is missing."""
    first = values.get("max_window_layers", 0)
    if not isinstance(first, int):
        raise FieldError("max_window_layers", "a whole number", first)
    full_every = 2 if model_type == "gemma2" else 0
    if model_type == "gemma3_text":
        full_every = values["sliding_window_pattern"] or values["_sliding_window_pattern"] or 6
        full_every = read_int({"sliding_window_pattern": full_every}, "sliding_window_pattern")
    return [
        "sliding_attention"
        if windows and i >= first and not (full_every and (i + 1) % full_every == 0)
        else "full_attention"
        for i in range(read_int(values, "num_hidden_layers", MAX_LAYERS))
    ]


def _read_ropes(values: Mapping[str, Any], *, nested: bool) -> tuple[RopeConfig, ...]:
    """One rope, or two for Gemma 3: that of windowed layers, then that of the others."""
    scaling, given = read_dict(values, "rope_scaling"), read_dict(values, "rope_parameters")
    if read_float(values, "partial_rotary_factor") != 1:
        raise UnsupportedModel("partial_rotary_factor other than 1")
    theta, positions = read_float(values, "rope_theta"), read_int(values, "max_position_embeddings")
    if not nested:
        return (_read_rope(scaling or given, theta, positions),)
    if unknown := given.keys() - {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(f"rope_parameters has {', '.join(sorted(unknown))}")
    local = _read_rope(read_dict(given, "sliding_attention"), read_float(values, "rope_local_base_freq"), positions)
    return local, _read_rope(read_dict(given, "full_attention") | scaling, theta, positions)


def _read_rope(given: dict[str, Any], theta: float, max_positions: int) -> RopeConfig:
    """given: rope_parameters, or rope_scaling in older files."""
    kind = read_str({"type": "default"} | given, "rope_type" if "rope_type" in given else "type")
    if kind is None or kind not in ROPE_KEYS:
        raise UnsupportedModel(f"rope type {kind!r} is none of {', '.join(ROPE_KEYS)}")
    if given.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModel("partial_rotary_factor other than 1")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]}
    if unknown := sorted(key for key, value in given.items() if key not in known and value):
        raise UnsupportedModel(f"rope type {kind} has {', '.join(unknown)}")
    values = {"rope_theta": theta, "original_max_position_embeddings": max_positions}
    values |= {key: value for key, value in given.items() if value is not None}
    rope: dict[str, Any] = {"theta": read_float(values, "rope_theta"), "kind": kind}
    if kind != "default":
        rope["factor"] = read_float(values, "factor")
    if kind in ("llama3", "yarn"):
        rope["original_positions"] = read_int(values, "original_max_position_embeddings")
    if kind == "llama3":
        rope |= {key: read_float(values, key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        rope |= {key: read_float(values, key) for key in ("beta_fast", "beta_slow") if values.get(key)}
        rope |= {"truncate": bool(values.get("truncate", True)), "amplitude": _yarn_amplitude(values)}
    return RopeConfig(**rope)


def _yarn_amplitude(values: Mapping[str, Any]) -> float:
    if values.get("attention_factor") is not None:
        return read_float(values, "attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    factor = read_float(values, "factor")
    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(read_float(values, "mscale")) / mscale(read_float(values, "mscale_all_dim"))
    return mscale(1.0)


def _read_activation(model_type: str, config_json: Mapping[str, Any], default: str) -> Activation:
    names = {read_str(config_json, key) for key in ("hidden_act", "hidden_activation")} - {None} or {default}
    if model_type == "gemma":  # Gemma 1 says gelu and means the tanh approximation
        names = {"gelu_pytorch_tanh" if name == "gelu" else name for name in names}
    if len(names) != 1 or (name := names.pop()) not in ACTIVATION_NAMES:
        raise UnsupportedModel(
            f"activation {' and '.join(sorted(map(str, names)))} is none of {', '.join(ACTIVATION_NAMES)}"
        )
    return ACTIVATION_NAMES[name]


def _read_dtype(config_json: Mapping[str, Any]) -> torch.dtype:
    name = config_json.get("dtype") or config_json.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise UnsupportedModel(f"dtype {name!r} is none of {', '.join(DTYPES)}")
    return DTYPES[name]
