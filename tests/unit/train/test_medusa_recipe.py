"""Medusa's recipe against one text and one head at a time, from the published formula."""

import numpy as np
import pytest
import torch
from recipe_reference import draws_of, one_text, target_probs

from outrider.core.errors import ConfigError
from outrider.train.acceptance import Tally
from outrider.train.corpus import load_corpus
from outrider.train.medusa import MedusaRecipe, MedusaTrainConfig, make_medusa
from outrider.train.packing import pack
from outrider.train.session import load_target
from outrider.train.target import TrainingTarget

HEADS, DECAY = 3, 0.8
CONFIG = MedusaTrainConfig(length=96, heads=HEADS, layers=2)


@pytest.fixture
def setting(target_folder, answers_folder):
    corpus, decoder = load_corpus(answers_folder), load_target(target_folder, "cpu")
    config = CONFIG.head_config(decoder.config)
    head = make_medusa(config, decoder)
    with torch.no_grad():
        for i, each in enumerate(head.parameters()):
            each.copy_(0.2 * torch.randn(each.shape, generator=torch.Generator().manual_seed(i)))
    target = TrainingTarget(decoder, config.taps)
    return corpus, head, target, MedusaRecipe(head, target, CONFIG, corpus)


def reference_probs(head, target, ids):
    """q of every head at every token: [tokens, heads, vocab]"""
    state = {name: each.double() for name, each in head.state_dict().items()}
    hidden, made = target.read(one_text(ids)).hidden.double(), []
    for i in range(HEADS):
        x = hidden
        for layer in range(2):
            y = x @ state[f"{i}.{layer}.linear.weight"].T + state[f"{i}.{layer}.linear.bias"]
            x = x + y * torch.sigmoid(y)
        made.append((x @ target.decoder.weights.head.weight.double().T).softmax(-1))
    return torch.stack(made, 1)


def test_the_loss(setting):
    corpus, head, target, recipe = setting
    rows = pack(corpus, np.arange(5), 96)
    found = recipe.backward(rows, target.read(rows), draws_of(rows, 0), 1.0)
    sums, firsts = 0.0, 0
    for answer in range(5):
        ids, begin = corpus.text(answer).tolist(), int(corpus.prompt_lens[answer])
        q, p = reference_probs(head, target, ids), target_probs(target, ids)
        for t in range(len(ids)):
            for i in range(HEADS):
                if begin <= t + i + 2 < len(ids):
                    sums += DECAY**i * float(-(p[t + i + 1] * q[t, i].log()).sum().detach())
                    firsts += i == 0
    assert float(found["loss"]) == pytest.approx(sums / firsts, rel=1e-3)
    assert all(each.grad.abs().sum() > 0 for each in head.parameters())


def test_judged_chains(setting):
    corpus, head, target, recipe = setting
    rows = pack(corpus, np.arange(5), 96)
    tally = Tally(HEADS, len(corpus.index.kinds), torch.device("cpu"))
    with torch.no_grad():
        recipe.judge(rows, target.read(rows), draws_of(rows, 0), tally)
    reached, accepted = np.zeros((2, HEADS)), np.zeros((2, HEADS))
    for answer in range(5):
        ids, begin = corpus.text(answer).tolist(), int(corpus.prompt_lens[answer])
        q, p, how = reference_probs(head, target, ids), target_probs(target, ids), int(corpus.sampled[answer])
        for t in range(max(0, begin - 2), len(ids) - 2):
            survival = 1.0
            for i in range(min(HEADS, len(ids) - 2 - t)):
                overlap = torch.minimum(q[t, i], p[t + i + 1]).sum().item()
                reached[how, i] += survival
                survival *= overlap if how else float(int(q[t, i].argmax()) == ids[t + i + 2])
                accepted[how, i] += survival
    assert tally.reached.sum(1).numpy() == pytest.approx(reached, rel=1e-4)
    assert tally.accepted.sum(1).numpy() == pytest.approx(accepted, rel=1e-4, abs=1e-6)


def test_heads_begin_as_the_target(target_folder):
    decoder = load_target(target_folder, "cpu")
    head = make_medusa(CONFIG.head_config(decoder.config), decoder)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(head.head_logits(2, hidden), decoder.logits(hidden))


def test_bad_options():
    with pytest.raises(ConfigError, match="heads must be"):
        MedusaTrainConfig(heads=0)
