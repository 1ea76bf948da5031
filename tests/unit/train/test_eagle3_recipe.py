"""The EAGLE-3 recipe against chains that are drafted one after another, each over a cache of its own."""

import numpy as np
import pytest
import torch
from recipe_reference import draws_of

from outrider.train.acceptance import Tally
from outrider.train.corpus import load_corpus
from outrider.train.eagle3 import Eagle3Recipe, Eagle3TrainConfig, make_eagle3
from outrider.train.packing import PackedRows, pack
from outrider.train.session import load_target
from outrider.train.target import TrainingTarget
from outrider.train.vocabulary import frequent_tokens, token_counts

STEPS, DECAY, VOCAB = 3, 0.8, 512
CONFIG = Eagle3TrainConfig(length=96, steps=STEPS, draft_vocab=200)


class Cache:
    """Plain attention over all keys that were given so far, in the order they came; causal within a call."""

    def __init__(self, scale):
        self.scale, self.keys, self.values = scale, None, None

    def __call__(self, layer, q, k, v):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        if self.keys is not None:
            k, v = torch.cat([self.keys, k]), torch.cat([self.values, v])
        self.keys, self.values = k, v
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        allowed = torch.ones(len(q), len(k)).tril(len(k) - len(q)).bool()
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~allowed, -torch.inf).softmax(-1), v).flatten(1)


@pytest.fixture(params=[True, False], ids=["3.1", "3.0"])
def setting(request, target_folder, answers_folder):
    corpus, decoder = load_corpus(answers_folder), load_target(target_folder, "cpu")
    config = Eagle3TrainConfig(
        length=96, steps=STEPS, draft_vocab=200, fc_norm=request.param, norm_output=request.param
    )
    head_config = config.head_config(decoder.config)
    tokens = frequent_tokens(token_counts(corpus, np.arange(90)), 200)
    head = make_eagle3(head_config, decoder, tokens, seed=1)
    target = TrainingTarget(decoder, head_config.taps)
    return corpus, head, target, Eagle3Recipe(head, target, config, corpus), tokens


def chain_logits(head, features, ids, begin):
    """Logits of all steps of the chain behind token `begin`: what is drafted is replaced by the text's own tokens."""
    cache = Cache(head.config.head_dim**-0.5)
    hidden = head.fuse(features[:begin])  # of positions 0 to begin - 1: input of rows 1 to begin
    out = head.step(torch.tensor(ids[1 : begin + 1]), hidden, torch.arange(1, begin + 1), cache)[-1:]
    found = [head.logits(out)[0]]
    for j in range(1, min(STEPS, len(ids) - 1 - begin)):
        out = head.step(torch.tensor([ids[begin + j]]), out, torch.tensor([begin + j]), cache)
        found.append(head.logits(out)[0])
    return found


def read_alone(target, ids):
    tokens, zeros = torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.int64)
    found = target.read(PackedRows(tokens, zeros, torch.arange(len(ids))[None], zeros.bool(), zeros))
    return found.features, target.logits(found.hidden).double()


def test_the_loss_is_that_of_chains_drafted_alone(setting):
    corpus, head, target, recipe, tokens = setting
    rows = pack(corpus, np.arange(4), 96)
    assert len(rows) < 4
    found = recipe.backward(rows, target.read(rows), draws_of(rows, 0), 1.0)
    sums = np.zeros(STEPS)
    for answer in range(4):
        ids = corpus.text(answer).tolist()
        features, logits = read_alone(target, ids)
        terms = [[] for _ in range(STEPS)]
        for begin in range(1, len(ids) - 1):
            for j, drafted in enumerate(chain_logits(head, features, ids, begin)):
                at = begin + j
                if at + 1 >= corpus.prompt_lens[answer]:
                    p = logits[at, tokens].softmax(0)
                    known = int(logits[at].argmax()) in set(tokens.tolist())
                    terms[j].append(known * float(-(p * drafted.double().log_softmax(0)).sum().detach()))
        sums += [DECAY**j * np.mean(each) for j, each in enumerate(terms)]
    assert float(found["loss"]) == pytest.approx(sums.sum() / 4, rel=1e-3), "every answer counts the same"
    assert head.fc.weight.grad.abs().sum() > 0


def test_judged_chains_are_those_drafted_alone(setting):
    corpus, head, target, recipe, tokens = setting
    rows = pack(corpus, np.arange(4), 96)
    tally = Tally(STEPS, len(corpus.index.kinds), torch.device("cpu"))
    with torch.no_grad():
        recipe.judge(rows, target.read(rows), draws_of(rows, 0), tally)
    reached, accepted = np.zeros((2, STEPS)), np.zeros((2, STEPS))
    for answer in range(4):
        ids, how = corpus.text(answer).tolist(), int(corpus.sampled[answer])
        features, logits = read_alone(target, ids)
        for begin in range(int(corpus.prompt_lens[answer]) - 1, len(ids) - 1):
            survival = 1.0
            with torch.no_grad():
                chain = chain_logits(head, features, ids, begin)
            for j, drafted in enumerate(chain):
                q = torch.zeros(VOCAB, dtype=torch.float64).index_copy(0, tokens, drafted.double().softmax(0))
                overlap = torch.minimum(q, logits[begin + j].softmax(0)).sum().item()
                reached[how, j] += survival
                survival *= overlap if how else float(int(q.argmax()) == ids[begin + j + 1])
                accepted[how, j] += survival
    assert tally.reached.sum(1).numpy() == pytest.approx(reached, rel=1e-4)
    assert tally.accepted.sum(1).numpy() == pytest.approx(accepted, rel=1e-4, abs=1e-6)
