"""config.json, as published by each family, against Transformers' own reading of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from outrider.models.config import RopeConfig
from outrider.models.families import FAMILIES, parse_config
from outrider.models.fields import UnsupportedModel

GEMMA_SIZES = {"head_dim": 256, "num_key_value_heads": 1}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def config_json(model_type: str, hidden: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [FAMILIES[model_type].architecture],
        "model_type": model_type,
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "initializer_range": 0.02,
        "transformers_version": "4.40.0",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        **more,
    }


PUBLISHED = {
    "Llama 1": config_json("llama", 4096, 32, 32, max_sequence_length=2048, rms_norm_eps=1e-6, hidden_act="silu"),
    "Llama 3.1": config_json(
        "llama", 4096, 32, 32, num_key_value_heads=8, max_position_embeddings=131_072, rope_theta=500_000.0,
        rope_scaling=LLAMA3, attention_bias=False, mlp_bias=False, pretraining_tp=1, rms_norm_eps=1e-5,
    ),
    "Vicuna 16k": config_json("llama", 4096, 32, 32, rope_scaling={"factor": 4.0, "type": "linear"}, pad_token_id=0),
    "SmolLM2": config_json(
        "llama", 576, 9, 30, num_key_value_heads=3, rope_theta=100_000, rope_scaling=None, rope_interleaved=False,
        is_llama_config=True, tie_word_embeddings=True, **{"transformers.js_config": {"dtype": "q4"}},
    ),
    "Mistral 0.1": config_json("mistral", 4096, 32, 32, num_key_value_heads=8, sliding_window=4096, rope_theta=1e4),
    "Mistral 0.3": config_json("mistral", 4096, 32, 32, num_key_value_heads=8, sliding_window=None, rope_theta=1e6),
    "Mistral Nemo": config_json("mistral", 5120, 32, 40, head_dim=128, sliding_window=None, rope_theta=1e6),
    "Qwen2.5": config_json(
        "qwen2", 896, 14, 24, num_key_value_heads=2, use_sliding_window=False, sliding_window=32_768,
        max_window_layers=21, tie_word_embeddings=True, use_mrope=False, rope_theta=1e6,
    ),
    "Qwen2.5 long": config_json(
        "qwen2", 896, 14, 24, num_key_value_heads=2, use_sliding_window=True, sliding_window=1024, max_window_layers=7,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    ),
    "Qwen3": config_json(
        "qwen3", 1024, 16, 28, num_key_value_heads=8, head_dim=128, attention_bias=False, rope_theta=1_000_000,
        use_sliding_window=False, sliding_window=None, max_window_layers=28, tie_word_embeddings=True,
    ),
    "Gemma": config_json(
        "gemma", 2048, 8, 18, **GEMMA_SIZES, hidden_act="gelu", hidden_activation=None, rope_scaling=None
    ),
    "Gemma 2": config_json(
        "gemma2", 2304, 8, 26, head_dim=256, num_key_value_heads=4, hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        query_pre_attn_scalar=224, sliding_window=4096, cache_implementation="hybrid", attention_bias=False,
    ),
    "Gemma 3": config_json(
        "gemma3_text", 1152, 4, 26, **GEMMA_SIZES, rope_local_base_freq=10_000, rope_theta=1_000_000,
        sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=256, attn_logit_softcapping=None,
        final_logit_softcapping=None, cache_implementation="hybrid",
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
}  # fmt: skip


def their_ropes(theirs: Any) -> list[dict[str, Any]]:
    ropes = theirs.rope_parameters
    return [ropes[key] for key in ("sliding_attention", "full_attention")] if "full_attention" in ropes else [ropes]


@pytest.mark.parametrize("form", ["as published", "as saved again"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_family_reads_as_transformers_reads_it(name: str, form: str):
    theirs = AutoConfig.for_model(**PUBLISHED[name])
    ours = parse_config(PUBLISHED[name] if form == "as published" else theirs.to_diff_dict())
    assert ours.dtype is torch.bfloat16
    assert (ours.heads, ours.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.attention_scale == pytest.approx(getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5)
    assert ours.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    assert ours.final_softcap == getattr(theirs, "final_logit_softcapping", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    assert [layer.window for layer in ours.layers] == [window if k == "sliding_attention" else None for k in kinds]
    for mine, other in zip(ours.ropes, their_ropes(theirs), strict=True):
        assert (mine.theta, mine.kind, mine.factor) == (
            other["rope_theta"], other["rope_type"], other.get("factor", 1.0)
        )  # fmt: skip
        assert mine.original_positions == other.get("original_max_position_embeddings", 0)


def test_gemma_3_windows_turn_by_the_local_rope():
    ours = parse_config(PUBLISHED["Gemma 3"])
    assert ours.ropes == (RopeConfig(theta=10_000), RopeConfig(theta=1e6, kind="linear", factor=8))
    assert {(layer.window, layer.rope) for layer in ours.layers} == {(512, 0), (None, 1)}


def test_mimo_is_qwen2_with_a_module_of_its_own():
    """Transformers lacks the family: its config.json, as published, is read as Qwen2's is."""
    sizes: dict[str, Any] = {
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32_768, "rope_theta": 640_000,
        "rms_norm_eps": 1e-5, "max_window_layers": 36, "sliding_window": 32_768, "use_sliding_window": False,
    }  # fmt: skip
    more = {"attention_bias": True, "num_nextn_predict_layers": 1, "use_mrope": False}
    code = {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    ours = parse_config(config_json("mimo", 4096, 32, 36, **sizes, **more, auto_map=code))
    assert ours == replace(parse_config(config_json("qwen2", 4096, 32, 36, **sizes)), model_type="mimo")
    assert (ours.qkv_bias, ours.out_bias) == (True, False)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Llama 1", {"model_type": "mamba"}),
        ("Llama 1", {"model_type": None}),
        ("Llama 1", {"architectures": ["LlamaForSequenceClassification"]}),
        ("Llama 1", {"num_local_experts": 8}),
        ("Llama 1", {"quantization_config": {"quant_method": "awq"}}),
        ("Llama 1", {"sliding_window": 512}),
        ("Llama 1", {"rope_interleaved": True}),
        ("Llama 1", {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}),
        ("Llama 1", {"partial_rotary_factor": 0.5}),
        ("Llama 1", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
        ("Llama 1", {"rope_scaling": {"type": "longrope", "factor": 2.0}}),
        ("Llama 1", {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1, 2]}}),
        ("Llama 1", {"rope_scaling": {"type": "linear"}}),
        ("Llama 1", {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.25}}),
        ("Llama 1", {"hidden_act": "relu2"}),
        ("Llama 1", {"torch_dtype": "float8_e4m3fn"}),
        ("Llama 1", {"num_key_value_heads": 5}),
        ("Llama 1", {"head_dim": 33}),
        ("Mistral 0.1", {"layer_types": ["full_attention"] * 32}),
        ("Qwen2.5", {"layer_types": ["sliding_attention"] * 24}),
        ("Qwen2.5", {"layer_types": ["full_attention"] * 3}),
        ("Qwen2.5", {"layer_types": ["chunked_attention"] * 24}),
        ("Qwen2.5", {"use_mrope": True}),
        ("Gemma 2", {"use_bidirectional_attention": True}),
        ("Gemma 2", {"hidden_act": "silu"}),
        ("Gemma 3", {"attn_logit_softcapping": 50.0}),
        ("Gemma 3", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}),
    ],
)
def test_what_we_do_not_honour_is_not_ours(name: str, change: dict[str, Any]):
    parse_config(PUBLISHED[name])
    with pytest.raises(UnsupportedModel):
        parse_config(PUBLISHED[name] | change)


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads"])
def test_a_config_without_its_sizes_is_not_ours(missing: str):
    with pytest.raises(UnsupportedModel):
        parse_config({key: value for key, value in PUBLISHED["Qwen3"].items() if key != missing})
