"""Block heads with random weights for tiny targets, saved as checkpoints."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.heads.block import BlockHead
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.save import TargetFacts, write_head

SPREAD = 1.5
"""Matrices are drawn this many times wider than is usual for their size, so that heads have opinions."""
_FOLDERS: dict[tuple[int, int, int], Path] = {}


def block_config(target: DecoderConfig, **options: Any) -> HeadConfig:
    """A head of two layers that reads two layers of its target; options: other fields."""
    return HeadConfig(
        **{
            "kind": "block",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "target_hidden_size": target.hidden_size,
            "taps": (0, len(target.layers) - 1),
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "intermediate_size": 40,
            "rope": target.ropes[0],
            "max_positions": target.max_positions,
            "block_size": 5,
            "own_mask": True,
            "markov_rank": 6,
            "sample_from_anchor": True,
        }
        | options
    )


def random_block(config: HeadConfig, decoder: Decoder, seed: int = 0) -> BlockHead:
    """Random weights; a reduced vocabulary is a random part of the whole."""
    head, generator = BlockHead(config, decoder), torch.Generator().manual_seed(seed)
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


def save_block(folder: Path, head: BlockHead) -> Path:
    facts = TargetFacts("target", head.decoder.config)
    write_head(folder, head.config, head.state_dict(), facts, tokens=head.drafts, dtype=torch.float32)
    return folder


def tiny_block(decoder: Decoder) -> Path:
    """A saved head for a target of this size, the same for equal sizes."""
    key = decoder.config.vocab_size, decoder.config.hidden_size, len(decoder.config.layers)
    if key not in _FOLDERS:
        config = block_config(decoder.config, draft_vocab_size=decoder.config.vocab_size - 3, confidence=True)
        folder = Path(tempfile.mkdtemp(prefix="outrider-block-"))
        _FOLDERS[key] = save_block(folder / "head", random_block(config, decoder))
    return _FOLDERS[key]
