"""Log-probabilities that are launched on a device: the best tokens without a second look, and whose rows are whose."""

from __future__ import annotations

import pytest
import torch

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.logprobs import RoundLogprobs
from outrider.verify.logprobs import launch_logprobs, read_logprobs, token_logprobs, top_by_key

INF = float("inf")


@pytest.mark.parametrize("top", [1, 3, 20, 64])
def test_the_best_tokens_by_key_are_those_of_a_stable_sort(top: int):
    rows = torch.randn(6, 64, generator=torch.Generator().manual_seed(top)) * 3
    rows[1] = rows[1].round()  # many equals
    rows[2] = rows[2].sign() * 0.0  # the two zeros are equals too
    rows[3, ::2] = -INF
    rows[4] = -rows[4].abs()
    wanted = rows.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    assert top_by_key(rows, top).tolist() == wanted.tolist()


def test_fewer_best_tokens_are_the_first_of_more():
    """Sequences of one round ask for different numbers: as many are launched as one of them wants."""
    logits = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)).mul(2).round()
    tokens = [0, 31, 4, 4, 9]
    block = launch_logprobs(logits, torch.tensor(tokens), 20).tolist()
    for top in (0, 1, 7, 20):
        assert read_logprobs(block, tokens, top) == token_logprobs(logits, tokens, top)


def test_each_sequence_of_a_round_gets_the_rows_of_the_tokens_it_keeps():
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(5))
    drafts = [Draft((1, 2)), Draft(), Draft((3, 4, 5), (-1, -1, 1)), Draft()]  # rows 0-2, 3, 4-7, 8
    asks = [2, None, 0, 5]
    seqs = [Sequence(i, [1], 1, SamplingParams(logprobs=top), 0) for i, top in enumerate(asks)]
    choices = torch.tensor([1, 7, -1, 9, 4, 0, 5, 12, 6])
    made = RoundLogprobs(seqs, drafts, logits, choices)
    whole = Verdict((1, 7), (0,))
    assert made.of(seqs[0], whole, (1, 7)) == tuple(token_logprobs(logits[[0, 1]], [1, 7], 2))
    assert made.of(seqs[0], whole, (1,)) == tuple(token_logprobs(logits[[0]], [1], 2))
    branch = Verdict((4, 5, 12), (1, 2))
    assert made.of(seqs[2], branch, (4, 5, 12)) == tuple(token_logprobs(logits[[4, 6, 7]], [4, 5, 12], 0))
    assert made.of(seqs[3], Verdict((6,)), (6,)) == tuple(token_logprobs(logits[[8]], [6], 5))
