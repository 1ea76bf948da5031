"""EAGLE heads with random weights for tiny targets, saved as checkpoints."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.eagle import EagleHead, make_eagle
from outrider.models.heads.save import TargetFacts, write_head

SPREAD = 1.5
"""Matrices are drawn this many times wider than is usual for their size, so that heads have opinions."""
_FOLDERS: dict[tuple[str, int, int, int], Path] = {}


def eagle_config(target: DecoderConfig, **options: Any) -> HeadConfig:
    """A head of one layer; EAGLE-3 reads three layers of its target. options: other fields."""
    last = len(target.layers) - 1
    first = options.get("kind") == "eagle"
    return HeadConfig(
        **{
            "kind": "eagle3",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "target_layers": last + 1,
            "taps": (last,) if first else (0, last // 2, last),
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "intermediate_size": 40,
            "rope": target.ropes[0],
            "max_positions": target.max_positions,
        }
        | options
    )


def random_eagle(config: HeadConfig, decoder: Decoder, seed: int = 0) -> EagleHead:
    """Random weights; a reduced vocabulary is a random part of the whole."""
    head, generator = make_eagle(config, decoder), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in head.state_dict().items():
            if name == "d2t":
                chosen = torch.randperm(config.vocab_size, generator=generator)[: len(tensor)].sort().values
                tensor.copy_(chosen - torch.arange(len(tensor)))
            elif tensor.dim() == 2:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * SPREAD / tensor.shape[-1] ** 0.5)
            else:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return head.requires_grad_(False)


def save_eagle(folder: Path, head: EagleHead) -> Path:
    """EAGLE-3 in the `speculators` layout, EAGLE-1 in its own."""
    if head.config.kind == "eagle3":
        facts = TargetFacts("target", head.decoder.config)
        write_head(folder, head.config, head.state_dict(), facts, tokens=5, dtype=torch.float32)
        return folder
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(eagle1_json(head.config)))
    save_file(dict(head.state_dict()), folder / "model.safetensors")
    return folder


def eagle1_json(config: HeadConfig) -> dict[str, Any]:
    """The config.json of an EAGLE-1 head."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "bias": config.bias,
    }


def tiny_eagle(name: str, decoder: Decoder) -> Path:
    """A saved head for a target of this size: `tiny-eagle1`, or `tiny-eagle3` with a reduced vocabulary."""
    target = decoder.config
    key = name, target.vocab_size, target.hidden_size, len(target.layers)
    if key not in _FOLDERS:
        config = eagle_config(target, draft_vocab_size=target.vocab_size - 3, norm_output=True, fc_norm=True)
        if name == "tiny-eagle1":
            config = eagle_config(target, kind="eagle", bias=True)
        folder = Path(tempfile.mkdtemp(prefix="outrider-eagle-"))
        _FOLDERS[key] = save_eagle(folder / "head", random_eagle(config, decoder))
    return _FOLDERS[key]
