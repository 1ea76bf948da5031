"""MTP modules with random weights for tiny targets, by the names of published checkpoints."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder

ROLES: dict[str, dict[str, str]] = {
    "deepseek": {
        "layer": "model.layers.{n}.",
        "fc": "model.layers.{n}.eh_proj",
        "embedding": "model.layers.{n}.enorm",
        "hidden": "model.layers.{n}.hnorm",
        "final": "model.layers.{n}.shared_head.norm",
    },
    "qwen": {
        "layer": "mtp.layers.0.",
        "fc": "mtp.fc",
        "embedding": "mtp.pre_fc_norm_embedding",
        "hidden": "mtp.pre_fc_norm_hidden",
        "final": "mtp.norm",
    },
    "mimo": {
        "layer": "model.mtp_layers.0.",
        "fc": "model.mtp_layers.0.input_proj",
        "embedding": "model.mtp_layers.0.token_layernorm",
        "hidden": "model.mtp_layers.0.hidden_layernorm",
        "final": "model.mtp_layers.0.final_layernorm",
    },
}
"""The published name of each part; {n}: the number of the target's layers."""
SPREAD = 1.5
"""Matrices are drawn this many times wider than is usual for their size, so that modules have opinions."""
_FOLDERS: dict[tuple[int, int, int], Path] = {}


def names_of(layout: str, layers: int) -> dict[str, str]:
    return {role: name.format(n=layers) for role, name in ROLES[layout].items()}


def mtp_tensors(layout: str, target: DecoderConfig, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of one module: biases in MiMo's, norms of queries and keys in Qwen's, copies in DeepSeek's."""
    generator = torch.Generator().manual_seed(seed)
    names = names_of(layout, len(target.layers))
    hidden, wide, dim = target.hidden_size, target.intermediate_size, target.head_dim
    prefix, made = names["layer"], dict[str, Tensor]()

    def matrix(name: str, rows: int, columns: int) -> None:
        made[f"{name}.weight"] = torch.randn(rows, columns, generator=generator) * SPREAD / columns**0.5

    def vector(name: str, size: int, centre: float) -> None:
        made[name] = centre + torch.randn(size, generator=generator) * 0.3

    matrix(names["fc"], hidden, 2 * hidden)
    for name, heads in (("q", target.heads), ("k", target.kv_heads), ("v", target.kv_heads)):
        matrix(f"{prefix}self_attn.{name}_proj", heads * dim, hidden)
        if layout == "mimo":
            vector(f"{prefix}self_attn.{name}_proj.bias", heads * dim, 0.0)
        if layout == "qwen" and name != "v":
            vector(f"{prefix}self_attn.{name}_norm.weight", dim, 0.0)
    matrix(f"{prefix}self_attn.o_proj", hidden, target.heads * dim)
    matrix(f"{prefix}mlp.gate_proj", wide, hidden)
    matrix(f"{prefix}mlp.up_proj", wide, hidden)
    matrix(f"{prefix}mlp.down_proj", hidden, wide)
    norms = [names[role] for role in ("embedding", "hidden", "final")]
    for name in (*norms, f"{prefix}input_layernorm", f"{prefix}post_attention_layernorm"):
        vector(f"{name}.weight", hidden, 0.0 if layout == "qwen" else 1.0)
    if layout == "deepseek":
        matrix(f"{prefix}embed_tokens", target.vocab_size, hidden)
        matrix(f"{prefix}shared_head.head", target.vocab_size, hidden)
    return made


def save_mtp(folder: Path, layout: str, target: DecoderConfig, config_json: dict[str, Any]) -> dict[str, Tensor]:
    """Save a module beside whatever else is in the folder; returns its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.heads,
        "num_key_value_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": target.ropes[0].theta,
        "max_position_embeddings": target.max_positions,
    }
    (folder / "config.json").write_text(json.dumps(sizes | config_json))
    tensors = mtp_tensors(layout, target)
    save_file(tensors, folder / "mtp.safetensors")
    return tensors


def tiny_mtp(decoder: Decoder) -> Path:
    """A saved module for a target of this size, in MiMo's layout."""
    target = decoder.config
    key = target.vocab_size, target.hidden_size, len(target.layers)
    if key not in _FOLDERS:
        _FOLDERS[key] = Path(tempfile.mkdtemp(prefix="outrider-mtp-"))
        save_mtp(_FOLDERS[key], "mimo", target, {"model_type": "mimo"})
    return _FOLDERS[key]
