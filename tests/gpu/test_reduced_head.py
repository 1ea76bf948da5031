"""A reduced head on the device: its columns chosen by their tokens' noise, and whole chains drafted with it."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.bench.llm_factory import DRAFT_MODEL, LLMFactory
from outrider.core.draft import Draft
from outrider.core.sampling import NO_TOKEN, SamplingParams
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import DrafterContext, RoundView
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import EOS, synthetic_pair
from outrider.verify.noise import gumbel_rows

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
VOCAB = 512


@pytest.mark.parametrize(
    ("columns", "vocab"), [(90, 200), (5000, 9000)] if DEVICE == "cpu" else [(90, 200), (5000, 9000), (32768, 128256)]
)
def test_the_kernel_takes_what_the_plain_rule_takes_of_these_tokens(columns: int, vocab: int):
    """Judged over the whole vocabulary, the rest at -inf."""
    from outrider.kernels.triton_sample import sample_tokens

    g = torch.Generator().manual_seed(vocab)
    ids = torch.randperm(vocab, generator=g)[:columns]
    seeds, temperatures = [0, 7, 2**63 + 11, 2**64 - 1] * 3, [0.0, 0.6, 1.0, 2.5, 1.0, 0.1] * 2
    logits = torch.randn(len(seeds), columns, generator=g) * 3
    positions = [int(p) for p in torch.randint(0, 40_000, (len(seeds),), generator=g)]
    whole = torch.full((len(seeds), vocab), -torch.inf, dtype=torch.float64)
    whole[:, ids] = logits.double()
    noise = gumbel_rows(seeds, positions, vocab)
    expected = [int((x if t == 0 else x / t + n).argmax()) for x, t, n in zip(whole, temperatures, noise, strict=True)]
    got = sample_tokens(
        logits.to(DEVICE),
        torch.tensor(temperatures, dtype=torch.float64).to(DEVICE),
        torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds]).to(DEVICE),
        torch.tensor(positions).to(DEVICE),
        ids=ids.to(DEVICE),
    )
    assert got.tolist() == expected
    assert sample_tokens(logits.to(DEVICE), ids=ids.to(DEVICE)).tolist() == [int(x.argmax()) for x in whole]


def test_in_the_kernel_the_lowest_token_is_taken_among_equals():
    """Not the first column: within a part, and between parts."""
    from outrider.kernels.triton_sample import sample_tokens

    ids = torch.arange(9000).flip(0)
    logits = torch.zeros(4, 9000)
    logits[0, [10, 20]] = 1.0
    logits[1, [10, 8500, 8000]] = 1.0
    logits[2, 77] = torch.nan
    logits[3] = -torch.inf
    got = sample_tokens(logits.to(DEVICE), ids=ids.to(DEVICE)).tolist()
    assert got == [8999 - 20, 8999 - 8500, NO_TOKEN, NO_TOKEN]


def pair(agreement: float = 1.0):
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return synthetic_pair(
        {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5}
        | shape
        | {"intermediate_size": 512, "num_hidden_layers": 3, "rope_theta": 10_000.0},
        2,
        agreement,
        device="cuda",
        seed=3,
    )


def test_captured_passes_by_a_reduced_head_say_what_the_whole_one_says_of_its_tokens():
    target = NativeRunner(pair().draft, 4096)
    graphs = target.graphs
    assert graphs is not None
    said = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:300].tolist()
    spans = []
    for i in range(3):
        target.pool.open(i, [5, 6, 7], str(i))
        target.pool.reserve(i, 60)
        target.score([Span(i, 0, tuple(range(40 + i)))])
        spans.append(Span(i, 40 + i, (9,), Draft((1, 2, 3)[:i])))
    whole = target.score(spans).logits
    head = target.reduce_vocab(said)
    assert head is not None
    for _ in range(2):
        got = target.score(spans).logits
        assert got.shape == whole.shape
        assert float((got[:, said] - whole[:, said]).norm() / whole[:, said].norm()) < 2e-2
        assert bool((got[:, [t for t in range(VOCAB) if t not in said]] == -torch.inf).all())
        new = [t for t in range(VOCAB) if t not in said][:2]
        head.put([299, 0], new)
        said[299], said[0] = new
    target.reduce_vocab(())
    assert torch.equal(target.score(spans).logits, whole)
    assert {shape.outputs for shape in graphs.captured} == {0, 300}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [3, 20])
def test_chains_drafted_at_once_are_those_drafted_step_by_step(temperature: float, count: int):
    """The first token by the whole head, those after it by the reduced one: each judged by `score`, up to near-ties."""
    made = pair()
    context = DrafterContext(vocab_size=VOCAB, context=512, tokenizer=made.tokenizer, eos_ids=frozenset({EOS}))
    target = NativeRunner(made.draft, 16384)
    model = DraftModel(target, context, DraftModelConfig(model="-", k=4, vocab=256))
    assert model._vocab is not None
    params = SamplingParams(temperature=temperature, seed=1)
    seqs = [Sequence(i, [3 + i, 300 + i, 7, 9], 4, params, i) for i in range(count)]
    told = [list(draft.tokens) for draft in model.propose(RoundView(seqs, [4] * count)) or ()]
    assert [len(chain) for chain in told] == [4] * count
    said = set(model._vocab.tokens)
    assert {300 + i for i in range(min(count, 32))} | {EOS} <= said
    assert {t for chain in told for t in chain[1:]} <= said
    longer = [Sequence(s.id, [*s.tokens, chain[0]], 4, params, s.seed) for s, chain in zip(seqs, told, strict=True)]
    seconds = _by_step(model, longer)
    target.reduce_vocab(())
    firsts = _by_step(model, seqs)
    assert not set(firsts) <= said or count < 20
    for step, judge in enumerate((firsts, seconds)):
        same = sum(chain[step] == token for chain, token in zip(told, judge, strict=True))
        assert same >= count - max(1, count // 10)


def _by_step(model: DraftModel, seqs: list[Sequence]) -> list[int]:
    """The next token after each text, by the head in use."""
    for seq in seqs:
        model.cache.drop(seq)
        assert model.cache.make_room(seq, 1) == 1
    drafted = [next(iter(draft.tokens)) for draft in model._chains(seqs, [1] * len(seqs))]
    for seq in seqs:
        model.cache.drop(seq)
    return drafted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pinned_texts_are_the_same_with_any_vocab(temperature: float):
    factory = LLMFactory(pair(0.8), cache_tokens=4096, context=512, pinned=True)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=5, ignore_eos=True)
    prompts = [[*range(260, 300)], [3, 4, 5]]
    told, alphas = [], []
    for spec in ("none", DRAFT_MODEL, f"{DRAFT_MODEL},vocab=256", f"{DRAFT_MODEL},vocab=400", DRAFT_MODEL):
        results = factory.llm(spec, max_batch=2).generate(prompts, params, salt=f"{len(told)}")
        told.append([result.tokens for result in results])
        alphas.append(results[0].stats.all.alpha)
    assert all(texts == told[0] for texts in told)
    assert alphas[1] > alphas[2] > 0
