"""Every option on CUDA: choices against the plain rule on the CPU, and texts the same with and without drafts."""

from __future__ import annotations

import pytest
import torch

from outrider.bench.syncs import SyncCounter
from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.verify.seeded import choose_tokens

pytestmark = pytest.mark.gpu

OPTIONS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 0.8, "typical_p": 0.3, "top_k": 40, "min_p": 0.001, "presence_penalty": 0.4},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.8, "presence_penalty": 0.5},
    {"temperature": 0.5, "logit_bias": {7: 3.0, 11: -5.0}, "banned_token_ids": (3, 4)},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 60))},
    {"temperature": 1.0, "min_tokens": 40, "stop_token_ids": (9,)},
]


def texts(count: int) -> list[Sequence]:
    made = []
    for i in range(count):
        params = SamplingParams(seed=i, **OPTIONS[i % len(OPTIONS)])
        tokens = [(i * 13 + j * 7) % 500 for j in range(30)]
        made.append(Sequence(i, tokens, 20, params, i, frozenset(params.stop_token_ids) | {0}))
    return made


def test_a_batch_of_every_option_chooses_as_the_plain_rule_does():
    """All but near-ties, which there are few of: float32 and float64 round differently."""
    seqs = texts(48)
    drafts = [Draft(tuple((i + j) % 500 for j in range(i % 7))) for i in range(48)]
    rows = sum(1 + len(draft) for draft in drafts)
    logits = torch.randn(rows, 500, generator=torch.Generator().manual_seed(3)) * 3
    scored = logits.cuda()
    plain, there = choose_tokens(logits, seqs, drafts), choose_tokens(scored, seqs, drafts)
    different = [(i, r) for i in range(48) for r in range(len(plain[i])) if plain[i][r] != there[i][r]]
    assert len(different) <= 1, different
    assert torch.equal(scored.cpu(), logits)  # the target's own stay as they were


def test_what_one_text_chooses_does_not_depend_on_the_others():
    seqs = texts(24)
    drafts = [Draft((1, 2, 3))] * 24
    logits = torch.randn(96, 500, generator=torch.Generator().manual_seed(5)).cuda() * 3
    together = choose_tokens(logits, seqs, drafts)
    for i in range(24):
        assert choose_tokens(logits[4 * i : 4 * i + 4], [seqs[i]], [drafts[i]]) == [together[i]]


def test_options_are_applied_without_waiting():
    """One wait for the whole batch."""
    seqs = texts(24)
    drafts = [Draft((1, 2, 3))] * len(seqs)
    logits = torch.randn(4 * len(seqs), 500).cuda()
    choose_tokens(logits, seqs, drafts)
    with SyncCounter() as waited:
        choose_tokens(logits, seqs, drafts)
    assert waited.count <= 1, waited.where
