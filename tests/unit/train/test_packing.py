"""Packed rows hold every answer once and apart, and the target reads each as it would alone."""

import numpy as np
import pytest
import torch

from outrider.models.heads.layers import RMSNorm
from outrider.train.corpus import load_corpus
from outrider.train.packing import PADDING, pack, pack_order
from outrider.train.session import load_target
from outrider.train.target import TrainingTarget, begin_as_target


@pytest.mark.parametrize("seed", range(4))
def test_texts_fit_and_none_is_lost(seed):
    lengths = np.random.default_rng(seed).integers(1, 60, 300)
    lengths[:3] = 120
    order = pack_order(lengths, 100)
    assert sorted(i for row in order for i in row) == list(range(300))
    used = [sum(min(100, lengths[i]) for i in row) for row in order]
    assert max(used) <= 100
    assert sum(used) / (100 * len(order)) > 0.95, "little of the rows is padding"


def test_rows_hold_the_answers(answers_folder):
    corpus = load_corpus(answers_folder)
    chosen = np.array([5, 2, 40, 7, 8, 11])
    rows = pack(corpus, chosen, 64)
    for answer in chosen:
        at = rows.answers == answer
        assert rows.tokens[at].tolist() == corpus.text(answer).tolist()
        assert rows.positions[at].tolist() == list(range(int(at.sum())))
        assert rows.in_answer[at].tolist() == [i >= corpus.prompt_lens[answer] for i in range(int(at.sum()))]
        assert len(rows.texts[at].unique()) == 1
    assert ((rows.texts == PADDING) == (rows.answers == PADDING)).all()
    assert not rows.in_answer[rows.texts == PADDING].any()


def test_longer_answers_are_cut(answers_folder):
    corpus = load_corpus(answers_folder)
    rows = pack(corpus, np.arange(6), 16)
    assert rows.tokens.shape == (6, 16)
    for answer in range(6):
        assert rows.tokens[rows.answers == answer].tolist() == corpus.text(answer)[:16].tolist()


class OneText:
    """Plain causal attention over one text, in float64."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, layer, q, k, v):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1).double(), v.repeat_interleave(groups, 1).double()
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.scale
        scores = scores.masked_fill(~torch.ones(len(q), len(q)).tril().bool(), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1).float()


def test_the_target_reads_each_text_as_if_alone(target_folder, answers_folder):
    corpus, decoder = load_corpus(answers_folder), load_target(target_folder, "cpu")
    rows = pack(corpus, np.arange(7), 96)
    assert len(rows) < 7, "rows hold several texts"
    target = TrainingTarget(decoder, (1, 3))
    found = target.read(rows)
    for answer in range(7):
        ids = torch.from_numpy(corpus.text(answer).astype(np.int64))
        tapped = dict.fromkeys((1, 3), ids)
        hidden = decoder.forward(ids, torch.arange(len(ids)), OneText(decoder.config.attention_scale), tapped)
        at = (rows.answers == answer).flatten()
        torch.testing.assert_close(found.hidden[at], hidden, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.features[at], torch.cat([tapped[1], tapped[3]], 1), atol=1e-4, rtol=1e-4)


def test_a_head_begins_with_the_targets_final_norm(target_folder):
    decoder = load_target(target_folder, "cpu")
    norm = RMSNorm(decoder.config.hidden_size, decoder.config.norm_eps)
    begin_as_target(norm, decoder)
    rows = torch.randn(5, decoder.config.hidden_size, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(norm(rows), decoder.weights.norm(rows))
