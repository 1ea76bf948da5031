"""Medusa heads with random weights for tiny targets, saved in Medusa's own layout."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.decoder import Decoder

HEADS, LAYERS = 3, 1
_FOLDERS: dict[tuple[int, int, int], Path] = {}


def medusa_tensors(hidden: int, vocab: int, seed: int = 0) -> dict[str, Tensor]:
    """By the names of published checkpoints."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    tensors: dict[str, Tensor] = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = random(hidden, hidden)
            tensors[f"{head}.{layer}.linear.bias"] = random(hidden)
        tensors[f"{head}.{LAYERS}.weight"] = random(vocab, hidden)
    return tensors


def tiny_medusa(decoder: Decoder) -> Path:
    """Saved heads for a target of this size, the same for equal sizes."""
    config = decoder.config
    key = config.vocab_size, config.hidden_size, len(config.layers)
    if key not in _FOLDERS:
        folder = Path(tempfile.mkdtemp(prefix="outrider-medusa-"))
        (folder / "config.json").write_text(json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS}))
        save_file(medusa_tensors(config.hidden_size, config.vocab_size), folder / "model.safetensors")
        _FOLDERS[key] = folder
    return _FOLDERS[key]
