"""A head as vLLM reads it: the target's rows of the output head, and the mask as a row of the embedding."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.advise.export import Choice, export_to, with_vllm_head
from outrider.core.errors import ConfigError
from outrider.models.heads.block import BlockHead
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.save import TargetFacts, write_head
from outrider.models.heads.vllm import head_for_vllm
from outrider.testing.synthetic import synthetic_pair

KEPT = torch.arange(40) * 4
MASK = 3


def write_target(folder: Path, **tensors: torch.Tensor) -> str:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def write_block(folder: Path, **options) -> str:
    decoder = synthetic_pair("tiny").target
    target = decoder.config
    given = {"draft_vocab_size": 40, "own_mask": True, "mask_token_id": MASK, "markov_rank": 8} | options
    config = HeadConfig(
        kind="block", vocab_size=target.vocab_size, hidden_size=64, target_hidden_size=64, taps=(0, 2), layers=1,
        heads=4, kv_heads=2, head_dim=16, intermediate_size=96, rope=target.ropes[0],
        max_positions=target.max_positions, block_size=7, sample_from_anchor=True, **given,
    )  # fmt: skip
    head = BlockHead(config, decoder)
    with torch.no_grad():
        for each in head.parameters():
            each.copy_(torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())))
        if given["draft_vocab_size"]:
            head.state_dict()["d2t"].copy_(KEPT - torch.arange(40))
    write_head(folder, config, head.state_dict(), TargetFacts("t", target), tokens=7)
    return str(folder)


@pytest.fixture
def embedding() -> torch.Tensor:
    size = synthetic_pair("tiny").target.config.vocab_size
    return torch.randn(size, 64, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("tied", [True, False])
def test_what_is_lacking_is_taken_from_the_target(tmp_path: Path, embedding: torch.Tensor, tied: bool):
    rows = embedding if tied else embedding.flip(0)
    more = {} if tied else {"lm_head.weight": rows.contiguous()}
    target = write_target(tmp_path / "target", **{"model.embed_tokens.weight": embedding}, **more)
    head = write_block(tmp_path / "head")
    made = head_for_vllm(head, target)
    stored, given = load_file(made / "model.safetensors"), load_file(Path(head) / "model.safetensors")
    assert stored["lm_head.weight"].equal(rows[KEPT])
    wanted = embedding.clone()
    wanted[MASK] = given.pop("mask_embedding")
    assert stored["embed_tokens.weight"].equal(wanted)
    assert stored.keys() == given.keys() | {"lm_head.weight", "embed_tokens.weight"}
    assert all(stored[name].equal(tensor) for name, tensor in given.items())
    assert (made / "config.json").read_text() == (Path(head) / "config.json").read_text()
    assert head_for_vllm(head, target) == made
    named = export_to("vllm", with_vllm_head(Choice(target, f"block:model={head}", 7)))
    assert named.arguments == {"method": "dspark", "model": str(made), "num_speculative_tokens": 7}


def test_a_head_that_lacks_nothing_is_named_itself(tmp_path: Path):
    head = write_block(tmp_path / "head", draft_vocab_size=0, own_mask=False)
    assert head_for_vllm(head, "a/target-that-is-not-here") == Path(head)


def test_a_head_that_is_given_another_place_is_not_copied(tmp_path: Path):
    choice = Choice("a/target-that-is-not-here", f"block:model={tmp_path}", 7, draft="org/head")
    assert with_vllm_head(choice) == choice


def test_a_target_of_other_names(tmp_path: Path):
    target = write_target(tmp_path / "target", wte=torch.zeros(3, 4))
    with pytest.raises(ConfigError, match="has no tensor lm_head"):
        head_for_vllm(write_block(tmp_path / "head"), target)
