"""Choosing, matching and judging: values, mixed batches, and failures that stay with their own request."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.errors import ConfigError, RequestError
from outrider.core.sampling import NO_TOKEN, SamplingParams
from outrider.core.sequence import Sequence
from outrider.verify.base import VERIFIERS, Mode, make_verifier
from outrider.verify.coupled import choose, draft_paths, match, noisy_best
from outrider.verify.noise import gumbel
from outrider.verify.probs import process_logits

VOCAB = 23
TREE = Draft((4, 9, 1, 4, 6), parents=(-1, -1, 0, 1, 2))
MODES = pytest.mark.parametrize("mode", VERIFIERS)

BATCH = [
    (SamplingParams(), Draft((3, 5))),
    (SamplingParams(temperature=0.8), TREE),
    (SamplingParams(temperature=1.3), Draft()),
    (SamplingParams(temperature=1.0, top_k=4), Draft((1, 2, 3))),
    (SamplingParams(repetition_penalty=1.5), TREE),
    (SamplingParams(), Draft()),
]


def batch() -> tuple[list[Sequence], list[Draft], Tensor]:
    seqs = [Sequence(i, [2, 7, 2][: i % 3 + 1], 1, params, seed=100 + i) for i, (params, _) in enumerate(BATCH)]
    drafts = [draft for _, draft in BATCH]
    rows = sum(1 + len(draft) for draft in drafts)
    return seqs, drafts, torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def rows_of(index: int, drafts: list[Draft]) -> slice:
    start = sum(1 + len(draft) for draft in drafts[:index])
    return slice(start, start + 1 + len(drafts[index]))


def test_choose_is_the_argmax_of_shaped_logits_and_the_noise_of_the_place():
    seqs, drafts, logits = batch()
    for i, (seq, draft, got) in enumerate(zip(seqs, drafts, choose(logits, seqs, drafts), strict=True)):
        shaped = process_logits(logits[rows_of(i, drafts)], seq, draft_paths(draft)).double()
        for row, depth, token in zip(shaped, (0, *draft.depths()), got, strict=True):
            noise = 0 if seq.params.greedy else gumbel(seq.seed, len(seq.tokens) + depth, VOCAB)
            assert token == int((row + noise).argmax())


def test_a_batch_of_greedy_requests_is_one_max():
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    seqs = [Sequence(i, [1], 1, SamplingParams(), seed=0) for i in range(2)]
    assert choose(logits, seqs, [TREE, Draft()]) == [logits[:6].argmax(-1).tolist(), logits[6:].argmax(-1).tolist()]


def test_rows_of_one_place_share_their_noise_and_keep_their_order():
    shaped = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(2))
    places = [(1, 5), (1, 6), (1, 5), (2, 5), (1, 7), (1, 6), (1, 5)]
    values, tokens = noisy_best(shaped, places)
    for row, (seed, position), value, token in zip(shaped, places, values, tokens, strict=True):
        scores = row.double() + gumbel(seed, position, VOCAB)
        assert (value, token) == (scores.max(), scores.argmax())


def test_match_walks_a_tree_and_ends_with_the_targets_own_token():
    #         root -> 4 -> 1 -> 6
    #              -> 9 -> 4
    assert match(TREE, [4, 1, 0, 6, 0, 8]) == Verdict((4, 1, 6, 8), (0, 2, 4))
    assert match(TREE, [9, 0, 4, 0, 7, 0]) == Verdict((9, 4, 7), (1, 3))
    assert match(TREE, [9, 0, 1, 0, 0, 0]) == Verdict((9, 1), (1,))
    assert match(TREE, [2, 0, 0, 0, 0, 0]) == Verdict((2,), ())
    assert match(Draft(), [5]) == Verdict((5,), ())
    assert match(Draft((5, 5)), [5, 5, 6]) == Verdict((5, 5, 6), (0, 1))
    assert match(Draft((NO_TOKEN,)), [NO_TOKEN, 3]).path == ()


def test_draft_paths():
    assert draft_paths(TREE) == [(), (4,), (9,), (4, 1), (9, 4), (4, 1, 6)]


@MODES
def test_a_batch_is_judged_as_its_sequences_alone(mode: Mode):
    seqs, drafts, logits = batch()
    verifier = make_verifier(mode)
    together = verifier.judge(seqs, drafts, logits)
    alone = [
        verifier.judge([seq], [draft], logits[rows_of(i, drafts)])[0]
        for i, (seq, draft) in enumerate(zip(seqs, drafts, strict=True))
    ]
    assert together == alone
    assert all(isinstance(verdict, Verdict) for verdict in together)


@MODES
def test_a_broken_row_fails_its_own_sequence_alone(mode: Mode):
    seqs, drafts, logits = batch()
    good = make_verifier(mode).judge(seqs, drafts, logits)
    for i in range(len(seqs)):
        for bad in (math.nan, -math.inf):
            broken = logits.clone()
            broken[rows_of(i, drafts).start] = bad
            got = make_verifier(mode).judge(seqs, drafts, broken)
            assert isinstance(got[i], RequestError)
            assert f"request {i} " in str(got[i])
            assert got[:i] + got[i + 1 :] == good[:i] + good[i + 1 :]


@MODES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_reached_do_not_matter(mode: Mode, temperature: float):
    """A draft may lead where nothing is allowed; only a text that goes there fails."""
    logits = torch.zeros(3, 4)
    logits[0, 2] = logits[1, 3] = 1000.0
    logits[2] = math.nan
    seq = Sequence(0, [1], 1, SamplingParams(temperature=temperature), seed=5)
    judge = make_verifier(mode).judge
    assert judge([seq], [Draft((0, 1))], logits) == [Verdict((2,), ())]
    assert judge([seq], [Draft((2, 1))], logits) == [Verdict((2, 3), (0,))]
    # where a text does go there, it ends as it would without a draft: both tokens, then the error
    assert judge([seq], [Draft((2, 3))], logits) == [Verdict((2, 3), (0,))]
    seq.tokens += [2, 3]
    (error,) = judge([seq], [Draft((1,))], logits[1:].flip(0))
    assert isinstance(error, RequestError)
    assert "at token 3" in str(error)


@MODES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_off_the_path_does_no_harm(mode: Mode, temperature: float):
    def grammar(tokens: Seq[int], row: Tensor) -> Tensor:
        if 0 in tokens:
            raise ValueError("0 is no word")
        row[0] = -math.inf
        return row

    params = SamplingParams(temperature=temperature, logits_processors=(grammar,))
    logits = torch.zeros(3, 4)
    judge = make_verifier(mode).judge
    (verdict,) = judge([Sequence(0, [1], 1, params, seed=5)], [Draft((0, 0))], logits)
    assert isinstance(verdict, Verdict)
    assert verdict.path == ()
    (error,) = judge([Sequence(0, [0], 1, params, seed=5)], [Draft((1, 1))], logits)
    assert isinstance(error, RequestError)
    assert "ValueError: 0 is no word" in str(error)


@MODES
def test_nothing_allowed_is_an_error_of_that_request(mode: Mode):
    params = SamplingParams(temperature=1.0, allowed_token_ids=(2,), banned_token_ids=(2,))
    (error,) = make_verifier(mode).judge([Sequence(9, [1], 1, params, seed=0)], [Draft()], torch.zeros(1, 4))
    assert isinstance(error, RequestError)
    assert "no token is left to choose" in str(error)


def test_the_wrong_number_of_rows_is_refused():
    with pytest.raises(ValueError, match="3 rows of logits are needed"):
        choose(torch.zeros(2, 4), [Sequence(0, [1], 1, SamplingParams(), seed=0)], [Draft((1, 2))])


@MODES
def test_no_sequences_no_verdicts(mode: Mode):
    assert make_verifier(mode).judge([], [], torch.zeros(0, 4)) == []


def test_unknown_names_list_the_choices():
    with pytest.raises(ConfigError, match="no verification mode called 'fast'; choose one of: seeded, distribution"):
        make_verifier("fast")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no verification rule called 'tree'; choose one of: block, token"):
        make_verifier("distribution", "tree")  # type: ignore[arg-type]


@pytest.mark.gpu
@MODES
def test_a_gpu_gives_the_same_verdicts(mode: Mode):
    seqs, drafts, logits = batch()
    judge = make_verifier(mode).judge
    assert judge(seqs, drafts, logits.cuda()) == judge(seqs, drafts, logits)
