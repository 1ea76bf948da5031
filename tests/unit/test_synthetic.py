"""The synthetic pair: agreement as asked, real weights everywhere, and the same model on disk and in Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams, load
from outrider.bench.llm_factory import DRAFT_MODEL, LLMFactory
from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.core.sequence import Span
from outrider.models.config import DecoderConfig
from outrider.models.linear import Linear
from outrider.models.rope import pair_rows
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import EOS, SHAPES, SyntheticPair, measured_agreement, synthetic_pair, weight_bytes
from outrider.testing.synthetic_checkpoint import byte_tokenizer, checkpoint_tensors, transformers_model, unpair_rows

QWEN: dict[str, Any] = SHAPES["tiny"] | {"model_type": "qwen2", "tie_word_embeddings": True}
TEXT = tuple(range(260, 320))


def logits(pair: SyntheticPair) -> torch.Tensor:
    """The target's logits after each token of TEXT, [60, vocab]."""
    target = NativeRunner(pair.target, 256)
    target.pool.open(0, TEXT)
    target.pool.reserve(0, len(TEXT))
    return target.score([Span(0, 0, TEXT[:1], Draft(TEXT[1:]))]).logits


@torch.inference_mode()
def transformers_logits(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]


def alpha_through_the_engine(pair: SyntheticPair) -> float:
    llm = LLMFactory(pair, cache_tokens=1024, context=512).llm(f"{DRAFT_MODEL},k=5")
    return llm.generate(list(TEXT), SamplingParams(max_tokens=120, ignore_eos=True)).stats.all.alpha


def test_at_full_agreement_every_draft_is_accepted():
    pair = synthetic_pair("tiny", seed=3)
    result = LLMFactory(pair, cache_tokens=1024, context=512).llm(f"{DRAFT_MODEL},k=5")
    answer = result.generate(list(TEXT), SamplingParams(max_tokens=61, ignore_eos=True))
    assert answer.stats.all.alpha == 1.0
    assert answer.stats.all.acceptance_by_position == [1.0] * 5
    assert measured_agreement(pair) == 1.0


def test_acceptance_falls_with_agreement_and_is_about_what_was_asked():
    asked = (1.0, 0.8, 0.5, 0.2)
    pairs = [synthetic_pair("tiny", agreement=agreement, seed=3) for agreement in asked]
    measured = [measured_agreement(pair, texts=8) for pair in pairs]
    assert measured == sorted(measured, reverse=True)
    assert len(set(measured)) == len(asked)
    for wanted, got in zip(asked, measured, strict=True):
        assert abs(wanted - got) < 0.15
    through = [alpha_through_the_engine(pair) for pair in pairs]
    assert through[0] == 1.0
    assert through[0] > through[1] > through[3]


@pytest.mark.parametrize("agreement", [1.0, 0.5])
def test_no_weight_is_zero_or_constant(agreement: float):
    pair = synthetic_pair("tiny", agreement=agreement)
    for name, tensor in checkpoint_tensors(pair.target).items():
        assert int((tensor == 0).sum()) <= tensor.numel() // 100_000, name
        assert float(tensor.float().std()) > 0, name


def test_the_draft_is_the_target_s_first_layers_and_shares_their_memory():
    pair = synthetic_pair("tiny", 2)
    ours, theirs = pair.target.weights, pair.draft.weights
    assert theirs.embedding is ours.embedding
    assert theirs.head is ours.head
    assert theirs.norm is ours.norm
    assert len(theirs.layers) == 2
    assert all(one is other for one, other in zip(theirs.layers, ours.layers, strict=False))


def test_the_same_seed_draws_the_same_weights_and_another_other_ones():
    one, same, other = (synthetic_pair("tiny", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(logits(one), logits(same))
    assert not torch.allclose(logits(one), logits(other), atol=0.1)


@pytest.mark.parametrize("shape", ["tiny", QWEN], ids=["llama", "qwen2, tied"])
def test_the_saved_folder_is_the_same_model_everywhere(shape: Any, tmp_path):
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    pair = synthetic_pair(shape, agreement=0.7, seed=5)
    ours = logits(pair)
    target, draft = pair.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    torch.testing.assert_close(transformers_logits(theirs), ours, rtol=0, atol=1e-4)
    shared = transformers_model(pair.target, pair.config_of(pair.target))
    torch.testing.assert_close(transformers_logits(shared), ours, rtol=0, atol=1e-4)
    loaded = load(str(target), device="cpu", cache_tokens=256)
    loaded.target.pool.open(0, TEXT)
    loaded.target.pool.reserve(0, len(TEXT))
    again = loaded.target.score([Span(0, 0, TEXT[:1], Draft(TEXT[1:]))]).logits
    torch.testing.assert_close(again, ours, rtol=0, atol=1e-5)
    llm = LLM(str(target), drafter=f"draft-model:model={draft},k=3", device="cpu", adaptive=False)
    both = llm.compare(list(TEXT), SamplingParams(max_tokens=32, ignore_eos=True))
    assert both.identical
    assert 0 < both.speculative.stats.all.alpha < 1


def test_folding_norms_into_shared_matrices_keeps_both_models_right():
    """What captured passes do in place, twice over: norms all ones, their weights in the matrices."""
    pair = synthetic_pair("tiny", seed=4)
    before = logits(pair)
    scale = pair.target.config.hidden_size**0.5  # a Norm on the CPU keeps its weight times this
    for _ in range(2):
        for decoder in (pair.draft, pair.target):
            for layer in decoder.weights.layers:
                for norm, product in ((layer.attention_norm, layer.qkv), (layer.mlp_norm, layer.gate_up)):
                    assert isinstance(product, Linear)
                    product.weight.copy_(product.weight * (norm.weight / scale))
                    norm.weight.fill_(scale)
    torch.testing.assert_close(logits(pair), before, rtol=0, atol=1e-4)
    model = transformers_model(pair.target, pair.config_of(pair.target))
    torch.testing.assert_close(transformers_logits(model), before, rtol=0, atol=1e-4)


def test_pairs_and_halves_undo_each_other():
    weight = torch.randn(6 * 16, 5)
    assert torch.equal(unpair_rows(pair_rows(weight, 16), 16), weight)
    assert not torch.equal(pair_rows(weight, 16), weight)


def test_tokenizer_reads_bytes_and_names_every_other_id():
    tokenizer = byte_tokenizer(400)
    assert tokenizer.decode(tokenizer.encode("héllo, ✓")) == "héllo, ✓"
    assert max(tokenizer.encode("héllo, ✓")) < EOS
    assert tokenizer.decode([300, EOS, 399]) == " w300 w399"
    assert (tokenizer.vocab_size, tokenizer.eos_ids) == (400, frozenset({EOS}))


@pytest.mark.parametrize("shape", SHAPES)
def test_named_shapes_have_the_published_sizes(shape: str):
    from outrider.models.families import parse_config

    parameters = {"llama-8b": 8.03e9, "llama-1b": 1.24e9, "smollm2-135m": 134.5e6, "tiny": 213e3}
    parameters |= {"qwen-1.5b": 1.54e9, "qwen-0.5b": 494e6}
    config = parse_config(SHAPES[shape])
    assert _parameters(config) == pytest.approx(parameters[shape], rel=0.01)


def _parameters(config: DecoderConfig) -> int:
    hidden, wide = config.hidden_size, config.intermediate_size
    width = (config.heads + 2 * config.kv_heads) * config.head_dim
    layer = width * hidden + config.heads * config.head_dim * hidden + 3 * wide * hidden
    return len(config.layers) * layer + (1 if config.tied else 2) * config.vocab_size * hidden


def test_bytes_a_pass_must_read():
    pair = synthetic_pair("tiny")
    layer = 128 * 64 + 64 * 64 + 3 * 128 * 64
    assert weight_bytes(pair.target) == 4 * (4 * layer + 512 * 64)
    assert weight_bytes(pair.draft) == 4 * (2 * layer + 512 * 64)
    assert pair.target.config.token_bytes(pair.target.dtype) == 4 * 2 * 4 * 2 * 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shape": "llama-9b"}, "choose one of: llama-8b"),
        ({"shape": "tiny", "layers": 4}, "1 to 3"),
        ({"shape": "tiny", "layers": 0}, "1 to 3"),
        ({"shape": "tiny", "agreement": 0.0}, "above 0"),
        ({"shape": "tiny", "agreement": 1.5}, "at most 1"),
        ({"shape": SHAPES["tiny"] | {"model_type": "qwen3"}}, "not qwen3"),
        ({"shape": SHAPES["tiny"] | {"model_type": "gpt2"}}, "no such shape"),
        ({"shape": SHAPES["tiny"] | {"vocab_size": 99}}, "at least 257"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        synthetic_pair(**options)
