"""Every option on CUDA: choices against the plain rule on the CPU, and texts the same with and without drafts."""

from __future__ import annotations

import pytest
import torch

from outrider.core import Draft, SamplingParams, Sequence
from outrider.verify.coupled import choose

pytestmark = pytest.mark.gpu

OPTIONS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 1.0, "typical_p": 0.9},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.8, "presence_penalty": 0.5},
    {"temperature": 0.5, "logit_bias": {7: 3.0, 11: -5.0}, "banned_token_ids": (3, 4)},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 60))},
    {"temperature": 1.0, "min_tokens": 40, "stop_token_ids": (9,)},
]


def texts(count: int) -> list[Sequence]:
    made = []
    for i in range(count):
        params = SamplingParams(seed=i, **OPTIONS[i % len(OPTIONS)])  # pyright: ignore[reportArgumentType]
        tokens = [(i * 13 + j * 7) % 500 for j in range(30)]
        made.append(Sequence(i, tokens, 20, params, i, frozenset(params.stop_token_ids) | {0}))
    return made


def test_a_batch_of_every_option_chooses_as_the_plain_rule_does():
    """All but near-ties, which there are few of: float32 and float64 round differently."""
    seqs = texts(44)
    drafts = [Draft(tuple((i + j) % 500 for j in range(i % 6))) for i in range(44)]
    rows = sum(1 + len(draft) for draft in drafts)
    logits = torch.randn(rows, 500, generator=torch.Generator().manual_seed(3)) * 3
    plain, there = choose(logits, seqs, drafts), choose(logits.cuda(), seqs, drafts)
    different = [(i, r) for i in range(44) for r in range(len(plain[i])) if plain[i][r] != there[i][r]]
    assert len(different) <= 1, different


def test_what_one_text_chooses_does_not_depend_on_the_others():
    seqs = texts(22)
    drafts = [Draft((1, 2, 3))] * 22
    logits = torch.randn(88, 500, generator=torch.Generator().manual_seed(5)).cuda() * 3
    together = choose(logits, seqs, drafts)
    for i in range(22):
        assert choose(logits[4 * i : 4 * i + 4], [seqs[i]], [drafts[i]]) == [together[i]]


def test_options_are_applied_without_waiting():
    """One wait for the whole batch, typical-p's plain rule apart."""
    import warnings

    seqs = [seq for seq in texts(22) if seq.params.typical_p == 1]
    drafts = [Draft((1, 2, 3))] * len(seqs)
    logits = torch.randn(4 * len(seqs), 500).cuda()
    choose(logits, seqs, drafts)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            choose(logits, seqs, drafts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in told if "synchroniz" in str(w.message)]) == 1, [str(w.message) for w in told]
