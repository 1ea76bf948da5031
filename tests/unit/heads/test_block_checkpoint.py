"""Block heads from every published layout, and written in that of `speculators`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from published_heads import publish

from outrider.core.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.heads.block import BlockHead
from outrider.models.heads.checkpoint import load_weights, open_head, parse_head_config
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.save import TargetFacts, write_head
from outrider.testing.synthetic import synthetic_pair

DRAFTS = {"dflash": 15, "jetspec": 7, "dspark": 7, "speculators-dspark": 7}
"""Tokens that a block of each layout drafts: its rows, less the anchor's where that predicts nothing."""


@pytest.mark.parametrize("layout", DRAFTS)
def test_every_tensor_of_a_published_head_has_its_place(layout: str, tmp_path: Path):
    published = publish(tmp_path, layout)
    head = BlockHead(parse_head_config(open_head(str(tmp_path))), cast(Decoder, None))  # weights alone are looked at
    load_weights(head, open_head(str(tmp_path)))
    own = head.state_dict()
    assert own.keys() == published.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in published.items())
    assert head.drafts == DRAFTS[layout]


def test_a_missing_tensor_is_named(tmp_path: Path):
    publish(tmp_path, "dspark", drop="norm.weight")
    files = open_head(str(tmp_path))
    head = BlockHead(parse_head_config(files), cast(Decoder, None))
    with pytest.raises(ConfigError, match=r"norm\.weight is missing"):
        load_weights(head, files)


def test_a_head_is_read_as_it_was_written(tmp_path: Path):
    """With a mask vector of its own, a reduced vocabulary, and a confidence head."""
    decoder = synthetic_pair("tiny").target
    target = decoder.config
    config = HeadConfig(
        kind="block", vocab_size=target.vocab_size, hidden_size=64, target_hidden_size=64, draft_vocab_size=40,
        taps=(0, 2), layers=2, heads=4, kv_heads=2, head_dim=16, intermediate_size=96, rope=target.ropes[0],
        max_positions=target.max_positions, block_size=7, own_mask=True, markov_rank=8, confidence=True,
        confidence_with_markov=True, sample_from_anchor=True,
    )  # fmt: skip
    head = BlockHead(config, decoder)
    with torch.no_grad():
        for each in head.parameters():
            each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())))
        head.state_dict()["d2t"].copy_(torch.arange(40) * 3)
    write_head(tmp_path / "head", config, head.state_dict(), TargetFacts("t", target), tokens=7, dtype=torch.float32)
    files = open_head(str(tmp_path / "head"))
    again = BlockHead(parse_head_config(files), decoder)
    load_weights(again, files)
    assert again.config == config
    assert all(torch.equal(again.state_dict()[name], each) for name, each in head.state_dict().items())
    assert again.tokens is not None
    assert again.tokens.tolist() == [4 * i for i in range(40)]
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(again.logits(rows), decoder.logits(rows)[:, ::4][:, :40], atol=1e-5)
