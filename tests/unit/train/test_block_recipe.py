"""The block recipe against a plain reference that computes one block at a time, without masks or packing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from recipe_reference import draws_of, reference_logits, target_probs

from outrider.core.errors import ConfigError
from outrider.train.acceptance import Tally
from outrider.train.block import BlockRecipe, Blocks, BlockTrainConfig, make_head
from outrider.train.corpus import load_corpus
from outrider.train.packing import pack
from outrider.train.session import load_target
from outrider.train.target import TrainingTarget
from outrider.train.vocabulary import frequent_tokens, token_counts

CONFIG = BlockTrainConfig(length=96, block=4, layers=2, taps=(0, 2), markov_rank=8, draft_vocab=200)


def setting(target_folder, answers_folder, config=CONFIG):
    corpus, decoder = load_corpus(answers_folder), load_target(target_folder, "cpu")
    head_config = config.head_config(decoder.config)
    tokens = frequent_tokens(token_counts(corpus, np.arange(90)), 200) if head_config.draft_vocab_size else None
    head = make_head(head_config, decoder, tokens, seed=1)
    with torch.no_grad():  # nothing at its neutral beginning
        for each in head.parameters():
            each.add_(0.05 * torch.randn(each.shape, generator=torch.Generator().manual_seed(each.numel())))
    target = TrainingTarget(decoder, head_config.taps)
    return corpus, head, target, BlockRecipe(head, target, config, corpus), tokens


def test_the_loss_is_that_of_blocks_computed_one_by_one(target_folder, answers_folder):
    corpus, _, target, recipe, tokens = setting(target_folder, answers_folder)
    rows = pack(corpus, np.arange(5), 96)
    outputs = target.read(rows)
    found = recipe.backward(rows, outputs, draws_of(rows, 3), 1.0)
    blocks = Blocks.choose(rows, 4, 24, draws_of(rows, 3))
    sums, total = np.zeros(3), 0.0
    for b in range(len(blocks.at)):
        if not blocks.valid[b, 0]:
            continue
        answer = int(rows.answers[blocks.row[b], blocks.at[b]])
        ids, anchor = corpus.text(answer).tolist(), int(rows.positions[blocks.row[b], blocks.at[b]])
        count = min(4, len(ids) - 1 - anchor)
        assert blocks.valid[b].tolist() == [k < count for k in range(4)]
        padded = ids + [0] * 4
        logits, stated = reference_logits(recipe.head, recipe.tensors(), target, padded, anchor, tokens)
        p = target_probs(target, ids)
        for k in range(count):
            weight = math.exp(-k / 4)
            q = torch.zeros(512, dtype=torch.float64).index_copy(0, tokens, logits[k].softmax(0))
            l1 = (q - p[anchor + k]).abs().sum()
            ce = -(p[anchor + k][tokens] * logits[k].log_softmax(0)).sum()
            c, wanted = stated[k].sigmoid(), 1 - l1 / 2
            bce = -(wanted * c.log() + (1 - wanted) * (1 - c).log())
            sums += weight * np.array([float(ce.detach()), float(l1.detach()), float(bce.detach())])
            total += weight
    expected = sums / total
    assert [float(found[name]) for name in ("ce", "l1", "confidence")] == pytest.approx(expected, rel=1e-3)
    assert float(found["loss"]) == pytest.approx(0.1 * expected[0] + 0.9 * expected[1] + expected[2], rel=1e-3)


def test_the_gradient_is_the_losss_own(target_folder, answers_folder, monkeypatch):
    """Against differences, for weights before and behind the point where the gradient is taken in chunks."""
    monkeypatch.setattr("outrider.train.block.MAX_ELEMENTS", 512 * 50)  # several chunks
    config = replace(CONFIG, confidence=0.0)  # what the confidence should be is no part of the gradient
    corpus, head, target, recipe, _ = setting(target_folder, answers_folder, config)
    rows = pack(corpus, np.arange(3), 96)
    outputs = target.read(rows)

    def loss():
        return float(recipe.backward(rows, outputs, draws_of(rows, 3), 1.0)["loss"])

    head.double()
    outputs = replace(outputs, features=outputs.features.double())
    weight = target.decoder.weights.head.weight[recipe._vocabulary.tokens].double()
    monkeypatch.setattr(head, "output_head", lambda: lambda hidden: hidden @ weight.T)
    weights = [
        head.fc.weight,
        head.mask_embedding,
        head.markov_head.markov_w2.weight,
        head.layers[1].mlp.down_proj.weight,
    ]
    head.zero_grad()
    loss()
    gradients = [each.grad.clone() for each in weights]
    for each, gradient in zip(weights, gradients, strict=True):
        length = gradient.norm().item()
        assert length > 1e-3
        direction, values = gradient / length, []
        for at in (1e-2, -1e-2):
            each.data.add_(direction, alpha=at)
            values.append(loss())
            each.data.add_(direction, alpha=-at)
        assert (values[0] - values[1]) / 2e-2 == pytest.approx(length, rel=2e-2)


def test_a_share_of_the_loss_gives_a_share_of_the_gradient(target_folder, answers_folder):
    corpus, head, target, recipe, _ = setting(target_folder, answers_folder)
    rows = pack(corpus, np.arange(3), 96)
    gradients = []
    for share in (1.0, 0.25):
        head.zero_grad()
        recipe.backward(rows, target.read(rows), draws_of(rows, 3), share)
        gradients.append(head.fc.weight.grad.clone())
    torch.testing.assert_close(gradients[1], 0.25 * gradients[0])


def test_judged_chains_are_those_of_the_reference(target_folder, answers_folder):
    corpus, _, target, recipe, tokens = setting(target_folder, answers_folder)
    rows = pack(corpus, np.arange(6), 96)
    tally = Tally(4, len(corpus.index.kinds), torch.device("cpu"))
    with torch.no_grad():
        recipe.judge(rows, target.read(rows), draws_of(rows, 9), tally)
    blocks = Blocks.choose(rows, 4, 24, draws_of(rows, 9))
    reached, accepted = np.zeros((2, 4)), np.zeros((2, 4))
    for b in range(len(blocks.at)):
        if not blocks.valid[b, 0]:
            continue
        answer = int(rows.answers[blocks.row[b], blocks.at[b]])
        ids, anchor = corpus.text(answer).tolist(), int(rows.positions[blocks.row[b], blocks.at[b]])
        with torch.no_grad():
            logits, _ = reference_logits(recipe.head, recipe.tensors(), target, ids + [0] * 4, anchor, tokens)
        p, how, survival = target_probs(target, ids), int(corpus.sampled[answer]), 1.0
        for k in range(min(4, len(ids) - 1 - anchor)):
            q = torch.zeros(512, dtype=torch.float64).index_copy(0, tokens, logits[k].softmax(0))
            chance = torch.minimum(q, p[anchor + k]).sum().item() if how else float(q.argmax() == ids[anchor + k + 1])
            reached[how, k] += survival
            survival *= chance
            accepted[how, k] += survival
    assert tally.reached.sum(1).numpy() == pytest.approx(reached, rel=1e-4)
    assert tally.accepted.sum(1).numpy() == pytest.approx(accepted, rel=1e-4, abs=1e-6)


def test_anchors_lie_where_the_next_token_is_answered(answers_folder):
    corpus = load_corpus(answers_folder)
    rows = pack(corpus, np.arange(9), 128)
    blocks = Blocks.choose(rows, 3, 16, draws_of(rows, 0))
    at = blocks.at.view(len(rows), 16)
    assert all(len(set(row)) == 16 for row in at.tolist()), "no anchor twice"
    good = blocks.valid[:, 0]
    assert good.any()
    assert rows.in_answer[blocks.row, blocks.at + 1][good].all()
    last = [int(i) for i in range(len(good)) if good[i] and rows.positions[blocks.row[i], blocks.at[i]] == 5]
    for i in last:
        assert blocks.before[i, 0] == rows.tokens[blocks.row[i], blocks.at[i]]
        assert blocks.labels[i, 1] == rows.tokens[blocks.row[i], blocks.at[i] + 2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block": 0}, "block must be"),
        ({"decay": 0.0}, "decay is above 0"),
        ({"ce": 0.0, "l1": 0.0}, "not all 0"),
        ({"lr": -1.0}, "lr must be"),
        ({"length": 4}, "length must be"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        BlockTrainConfig(**options)


def test_options_that_do_not_fit_the_target_are_refused(target_folder):
    config = load_target(target_folder, "cpu").config
    with pytest.raises(ConfigError, match="0 to 3"):
        BlockTrainConfig(taps=(1, 4)).head_config(config)
    with pytest.raises(ConfigError, match="at most 512"):
        BlockTrainConfig(draft_vocab=8192).head_config(config)
    assert BlockTrainConfig(draft_vocab=512).head_config(config).draft_vocab_size == 0
