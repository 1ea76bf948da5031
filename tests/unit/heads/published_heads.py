"""Checkpoints of heads as their authors publish them: names, shapes and config.json, with random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, WIDE, HEADS, KV, DIM, VOCAB, LAYERS = 16, 24, 4, 2, 6, 50, 8
LAYER_JSON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 4096,
}
Shapes = dict[str, tuple[int, ...]]


def layer(prefix: str, *, inputs: int = HIDDEN, norms: tuple[str, ...] = ("input_layernorm",)) -> Shapes:
    return {
        f"{prefix}self_attn.q_proj.weight": (HEADS * DIM, inputs),
        f"{prefix}self_attn.k_proj.weight": (KV * DIM, inputs),
        f"{prefix}self_attn.v_proj.weight": (KV * DIM, inputs),
        f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        f"{prefix}mlp.gate_proj.weight": (WIDE, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, WIDE),
        **{f"{prefix}{name}.weight": (HIDDEN,) for name in (*norms, "post_attention_layernorm")},
    }


QK_NORMS: Shapes = {f"layers.{i}.self_attn.{name}_norm.weight": (DIM,) for i in range(2) for name in "qk"}
EAGLE3_LAYER = layer("", inputs=2 * HIDDEN, norms=("input_layernorm", "hidden_norm"))
EAGLE3: Shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "d2t": (20,), "t2d": (VOCAB,)}
DFLASH: Shapes = {
    "fc.weight": (HIDDEN, 2 * HIDDEN),
    "hidden_norm.weight": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    **layer("layers.0."),
    **layer("layers.1."),
    **QK_NORMS,
}
DSPARK: Shapes = DFLASH | {
    "markov_head.markov_w1.weight": (VOCAB, 5),
    "markov_head.markov_w2.weight": (VOCAB, 5),
    "confidence_head.proj.weight": (1, HIDDEN + 5),
    "confidence_head.proj.bias": (1,),
}
WHOLE: Shapes = {  # of the model that an MTP module belongs to
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
    **layer("model.layers.0."),
}


def module(prefix: str, projection: str, *norms: str, layers: str = "") -> Shapes:
    """An MTP module without what belongs to its layout alone."""
    return {
        f"{prefix}{projection}.weight": (HIDDEN, 2 * HIDDEN),
        **{f"{prefix}{name}.weight": (HIDDEN,) for name in norms},
        **layer(f"{prefix}{layers}"),
    }


PUBLISHED: dict[str, tuple[dict[str, Any], Shapes]] = {
    "eagle1": (
        LAYER_JSON | {"architectures": ["LlamaForCausalLM"]},
        {
            "embed_tokens.weight": (VOCAB, HIDDEN),
            "fc.weight": (HIDDEN, 2 * HIDDEN),
            "fc.bias": (HIDDEN,),
            **layer("layers.0.", norms=()),
        },
    ),
    "eagle3": (
        LAYER_JSON | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20},
        EAGLE3 | {"lm_head.weight": (20, HIDDEN)} | {f"midlayer.{name}": shape for name, shape in EAGLE3_LAYER.items()},
    ),
    "eagle3.1": (
        LAYER_JSON
        | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 20, "norm_output": True}
        | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}},
        EAGLE3
        | {f"layers.0.{name}": shape for name, shape in EAGLE3_LAYER.items()}
        | {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)},
    ),
    "speculators": (
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": LAYER_JSON,
            "draft_vocab_size": 20,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 7],
        },
        EAGLE3
        | {f"layers.0.{name}": shape for name, shape in EAGLE3_LAYER.items()}
        | {"input_norm.weight": (3 * HIDDEN,)},
    ),
    "dflash": (
        LAYER_JSON
        | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16, "num_target_layers": LAYERS}
        | {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 5]}},
        DFLASH,
    ),
    "jetspec": (
        LAYER_JSON
        | {"block_size": 8}
        | {"dflash_config": {"mask_token_id": 7, "target_layer_ids": [1, 5], "causal_head": True}},
        DFLASH,
    ),
    "dspark": (
        LAYER_JSON | {"block_size": 7, "mask_token_id": 3, "target_layer_ids": [0, 6]},
        DSPARK,
    ),
    "speculators-dspark": (
        {
            "speculators_model_type": "dspark",
            "transformer_layer_config": LAYER_JSON,
            "draft_vocab_size": VOCAB,
            "block_size": 7,
            "mask_token_id": 3,
            "aux_hidden_state_layer_ids": [1, 7],
            "sample_from_anchor": True,
        },
        DSPARK,
    ),
    "medusa": (
        {"medusa_num_heads": 3, "medusa_num_layers": 1},
        {f"{i}.0.linear.weight": (HIDDEN, HIDDEN) for i in range(3)}
        | {f"{i}.0.linear.bias": (HIDDEN,) for i in range(3)}
        | {f"{i}.1.weight": (VOCAB, HIDDEN) for i in range(3)},
    ),
    "mtp-deepseek": (
        LAYER_JSON | {"model_type": "qwen3", "num_nextn_predict_layers": 2, "num_hidden_layers": LAYERS},
        WHOLE
        | module("model.layers.8.", "eh_proj", "enorm", "hnorm", "shared_head.norm")
        | {
            "model.layers.8.embed_tokens.weight": (VOCAB, HIDDEN),
            "model.layers.8.shared_head.head.weight": (VOCAB, HIDDEN),
        }
        | module("model.layers.9.", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
    ),
    "mtp-qwen": (
        LAYER_JSON | {"model_type": "qwen3_next", "mtp_num_hidden_layers": 2},
        WHOLE
        | module("mtp.", "fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", layers="layers.0.")
        | layer("mtp.layers.1.")
        | {f"mtp.layers.{i}.self_attn.{name}_norm.weight": (DIM,) for i in range(2) for name in "qk"},
    ),
    "mtp-mimo": (
        LAYER_JSON | {"model_type": "mimo", "num_nextn_predict_layers": 1},
        WHOLE
        | module("model.mtp_layers.0.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
        | {
            f"model.mtp_layers.0.self_attn.{name}_proj.bias": (rows * DIM,)
            for name, rows in (("q", HEADS), ("k", KV), ("v", KV))
        },
    ),
}


def tensors_of(shapes: Shapes) -> dict[str, Tensor]:
    """Random numbers; every third token can be drafted where the vocabulary is reduced (the last ones of all)."""
    generator = torch.Generator().manual_seed(4)
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if "d2t" in made:
        chosen = torch.arange(20) * 2 + 3
        made["d2t"] = chosen - torch.arange(20)
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    return made


def publish(folder: Path, name: str, *, drop: str = "", **config: Any) -> dict[str, Tensor]:
    """Save one of the above, with other values in its config.json, less one tensor; returns its tensors."""
    config_json, shapes = PUBLISHED[name]
    tensors = {key: each for key, each in tensors_of(shapes).items() if key != drop}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json | config))
    save_file(tensors, folder / "model.safetensors")
    return tensors
