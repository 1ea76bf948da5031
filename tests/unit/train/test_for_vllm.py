"""Heads in a form that vLLM reads: rows of the output head, and a mask that is a token."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterContext
from outrider.drafters.registry import parse_drafter
from outrider.loading.load import load
from outrider.models.heads.checkpoint import open_head, parse_head_config
from outrider.models.heads.save import with_lm_head
from outrider.models.identity import identify
from outrider.train.block import BlockTrainConfig
from outrider.train.corpus import load_corpus
from outrider.train.eagle3 import Eagle3TrainConfig
from outrider.train.session import TrainTask, load_target, train_block, train_eagle3

SMALL = {"epochs": 0.05, "length": 64, "layers": 1, "draft_vocab": 100}


def make_task(target_folder, answers_folder, out, **options):
    return TrainTask(target=target_folder, answers=answers_folder, out=out, device="cpu", measured=0, **options)


def head_rows(target_folder, d2t):
    """Of the target's output head, read from its checkpoint."""
    tensors = load_file(Path(target_folder) / "model.safetensors")
    whole = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return whole[torch.arange(len(d2t)) + d2t].bfloat16()


@pytest.fixture(scope="module")
def written(target_folder, answers_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("for-vllm")
    task = make_task(target_folder, answers_folder, out, with_lm_head=True)
    train_block(task, BlockTrainConfig(**SMALL, mask_token=True))
    return out / "drafter"


def test_the_rows_are_the_targets(written, target_folder):
    tensors = load_file(written / "model.safetensors")
    assert tensors["lm_head.weight"].equal(head_rows(target_folder, tensors["d2t"]))
    assert len(tensors["d2t"]) == 100
    assert tensors["t2d"].sum() == 100


def test_the_mask_is_a_token_that_no_text_has(written, answers_folder):
    told = json.loads((written / "config.json").read_text())
    assert told["mask_token_id"] not in np.unique(load_corpus(answers_folder).tokens)
    assert "mask_embedding" not in load_file(written / "model.safetensors")
    assert not parse_head_config(open_head(str(written))).own_mask


def test_its_target_is_told(written, target_folder):
    assert (
        json.loads((written / "config.json").read_text())["target_identity"] == identify(Path(target_folder)).as_json()
    )


def test_it_drafts_here_too(written, target_folder):
    """With its own rows, as with those it would gather."""
    loaded = load(target_folder, device="cpu", cache_tokens=256)
    context = DrafterContext(
        vocab_size=loaded.target.vocab_size, context=loaded.target.context, target=loaded.target, max_batch=1
    )
    head = parse_drafter(f"block:model={written}").build(context).head
    hidden = torch.randn(5, head.config.hidden_size, generator=torch.Generator().manual_seed(1))
    whole = loaded.target.model.decoder.logits(hidden)[:, head.tokens]
    assert head.config.own_head
    assert torch.allclose(head.logits(hidden), whole, atol=0.02 * float(whole.abs().max()))  # rows in bfloat16


def test_eagle3_has_them_too(target_folder, answers_folder, tmp_path):
    task = make_task(target_folder, answers_folder, tmp_path, with_lm_head=True)
    train_eagle3(task, Eagle3TrainConfig(**SMALL, steps=2))
    tensors = load_file(tmp_path / "drafter" / "model.safetensors")
    assert tensors["lm_head.weight"].equal(head_rows(target_folder, tensors["d2t"]))


def test_a_whole_vocabulary_has_no_rows(target_folder, answers_folder, tmp_path):
    task = make_task(target_folder, answers_folder, tmp_path, with_lm_head=True)
    with pytest.raises(ConfigError, match="leave out --with-lm-head"):
        train_block(task, BlockTrainConfig(**SMALL | {"draft_vocab": 0}))
    with pytest.raises(ConfigError, match="whole vocabulary"):
        with_lm_head({}, load_target(target_folder, "cpu"))
