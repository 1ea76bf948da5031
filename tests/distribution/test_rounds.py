"""Whole texts, drafted and judged round after round with the real noise, against the target's own distribution.

Each test is seeded and so gives one answer for ever; FALSE_ALARM is the chance that ideal noise
would have failed it when it was written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from distribution_harness import Model, fits, joint, request
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.verify.base import Mode, Rule, make_verifier
from outrider.verify.draft_sampling import draft_token, draft_top

Propose = Callable[[list[Sequence], Mode], list[Draft]]

FALSE_ALARM = 1e-6
LENGTH = 4
PARAMS = SamplingParams(temperature=1.0)
TARGET, DRAFTER = Model(5, depth=LENGTH + 2, vocab=2), Model(8, depth=LENGTH + 2, vocab=2)


def chains(seqs: list[Sequence], mode: Mode) -> list[Draft]:
    """What a draft model proposes: two tokens for each text, one after the other."""
    paths: list[tuple[Token, ...]] = [()] * len(seqs)
    steps: list[Tensor] = []
    for _ in range(2):
        logits = torch.stack([DRAFTER.logits((*s.tokens, *path)) for s, path in zip(seqs, paths, strict=True)])
        tokens, probs = draft_token(logits, seqs, paths, mode)
        paths = [(*path, token) for path, token in zip(paths, tokens, strict=True)]
        steps += [] if probs is None else [probs]
    stated = torch.stack(steps, dim=1) if steps else [None] * len(seqs)
    return [Draft(path, probs=p) for path, p in zip(paths, stated, strict=True)]


def forks(seqs: list[Sequence], mode: Mode) -> list[Draft]:
    """Two draft tokens for the next token of each text, and two for the one after the first."""
    drafts: list[Draft] = []
    for seq in seqs:
        first, above = draft_top(DRAFTER.logits(tuple(seq.tokens)), seq, (), 2, mode)
        path = (first[0],)
        second, below = draft_top(DRAFTER.logits((*seq.tokens, *path)), seq, path, 2, mode)
        probs = None if above is None or below is None else torch.stack([above, above, below, below])
        drafts.append(Draft((*first, *second), parents=(-1, -1, 0, 0), probs=probs))
    return drafts


def scored(seq: Sequence, draft: Draft) -> Tensor:
    paths = [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(-1, len(draft))]
    return torch.stack([TARGET.logits((*seq.tokens, *path)) for path in paths])


def fit(mode: Mode, rule: Rule, propose: Propose, texts: int) -> float:
    """How well the first tokens of so many texts, each with its own seed, fit the target's distribution."""
    verifier = make_verifier(mode, rule)
    seqs = [request(PARAMS, seed=seed) for seed in range(texts)]
    while open_seqs := [seq for seq in seqs if len(seq.tokens) < LENGTH]:
        drafts = propose(open_seqs, mode)
        logits = torch.cat([scored(*each) for each in zip(open_seqs, drafts, strict=True)])
        for seq, verdict in zip(open_seqs, verifier.judge(open_seqs, drafts, logits), strict=True):
            assert isinstance(verdict, Verdict)
            seq.tokens += verdict.tokens
    counts = Counter(tuple(seq.tokens[:LENGTH]) for seq in seqs)
    right = joint(TARGET, PARAMS, LENGTH)
    return fits(torch.tensor([counts[c] for c in right]), torch.tensor(list(right.values()), dtype=torch.float64))


CASES = {
    "seeded, chain": ("seeded", "block", chains, 4000),
    "seeded, tree": ("seeded", "block", forks, 1000),
    "distribution, chain, block rule": ("distribution", "block", chains, 2000),
    "distribution, chain, token rule": ("distribution", "token", chains, 2000),
    "distribution, tree": ("distribution", "block", forks, 1000),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_texts_written_over_several_rounds_follow_the_target(case: tuple[Mode, Rule, Propose, int]):
    assert fit(*case) > FALSE_ALARM


def test_noise_used_again_in_a_later_round_is_caught(monkeypatch: pytest.MonkeyPatch):
    """Why every round of mode `distribution` has a seed of its own."""
    for module in ("rng", "draft_sampling"):
        monkeypatch.setattr(f"outrider.verify.{module}.round_seed", lambda seed, length: seed)
    assert fit("distribution", "block", chains, 2000) < FALSE_ALARM
