"""Choosing, accepting and judging: values, mixed batches, and failures that stay with their own request."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from outrider.core.device_row import DeviceRow
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import ConfigError, ModelError, RequestError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import NO_TOKEN, SamplingParams
from outrider.core.sequence import Sequence
from outrider.verify.base import VERIFIERS, Mode, make_verifier
from outrider.verify.noise import gumbel
from outrider.verify.probs import process_logits
from outrider.verify.seeded import SeededVerifier, accept_draft, choose_tokens, draft_paths, gumbel_max

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


def test_choose_tokens_is_the_argmax_of_processed_logits_and_the_noise_of_the_position():
    seqs, drafts, logits = batch()
    for i, (seq, draft, got) in enumerate(zip(seqs, drafts, choose_tokens(logits, seqs, drafts), strict=True)):
        processed = process_logits(logits[rows_of(i, drafts)], seq, draft_paths(draft)).double()
        for row, depth, token in zip(processed, (0, *draft.depths()), got, strict=True):
            noise = 0 if seq.params.greedy else gumbel(seq.seed, len(seq.tokens) + depth, VOCAB)
            assert token == int((row + noise).argmax())


def test_a_batch_of_greedy_requests_is_one_max():
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16()
    seqs = [Sequence(i, [1], 1, SamplingParams(), seed=0) for i in range(2)]
    assert choose_tokens(logits, seqs, [TREE, Draft()]) == [
        logits[:6].argmax(-1).tolist(),
        logits[6:].argmax(-1).tolist(),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_greedy_choices_on_the_host_are_those_that_decide_launches(dtype: torch.dtype):
    logits = torch.randint(0, 4, (7, VOCAB), generator=torch.Generator().manual_seed(1)).to(dtype)  # many ties
    logits[1, 5], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    seqs = [Sequence(i, [1], 1, SamplingParams(), seed=0) for i in range(2)]
    drafts = [TREE, Draft()]
    decided = SeededVerifier().decide(seqs, drafts, logits)
    assert decided is not None
    first = [int((row == row.max()).nonzero()[0]) for row in logits[[0, 4, 5, 6]]]
    assert decided.list() == [first[0], *[NO_TOKEN] * 3, *first[1:]]
    assert [token for own in choose_tokens(logits, seqs, drafts) for token in own] == decided.list()


def test_rows_of_one_position_share_their_noise_and_keep_their_order():
    processed = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(2))
    places = [(1, 5), (1, 6), (1, 5), (2, 5), (1, 7), (1, 6), (1, 5)]
    values, tokens = gumbel_max(processed, places)
    for row, (seed, position), value, token in zip(processed, places, values, tokens, strict=True):
        scores = row.double() + gumbel(seed, position, VOCAB)
        assert (value, token) == (scores.max(), scores.argmax())


def test_accept_draft_walks_a_tree_and_ends_with_the_targets_own_token():
    #         root -> 4 -> 1 -> 6
    #              -> 9 -> 4
    assert accept_draft(TREE, [4, 1, 0, 6, 0, 8]) == Verdict((4, 1, 6, 8), (0, 2, 4))
    assert accept_draft(TREE, [9, 0, 4, 0, 7, 0]) == Verdict((9, 4, 7), (1, 3))
    assert accept_draft(TREE, [9, 0, 1, 0, 0, 0]) == Verdict((9, 1), (1,))
    assert accept_draft(TREE, [2, 0, 0, 0, 0, 0]) == Verdict((2,), ())
    assert accept_draft(Draft(), [5]) == Verdict((5,), ())
    assert accept_draft(Draft((5, 5)), [5, 5, 6]) == Verdict((5, 5, 6), (0, 1))
    assert accept_draft(Draft((NO_TOKEN,)), [NO_TOKEN, 3]).path == ()


class Unread(HostCopy):
    """Tokens that may not be read on the host yet."""

    def list(self) -> list[int]:
        raise AssertionError("read on the host")


def unread(draft: Draft, device: str = "cpu") -> Draft:
    """The same draft, still on the device."""

    def row(values: Seq[int]) -> DeviceRow:
        return DeviceRow(Unread(torch.tensor([values], dtype=torch.int64, device=device)), 0, len(draft))

    return Draft(row(draft.tokens), None if draft.parents is None else row(draft.parents))


def ahead(seqs: list[Sequence], drafts: list[Draft]) -> list[int]:
    """Positions of all rows when each text is 7 tokens longer than the host knows."""
    return [
        len(seq.tokens) + 7 + depth for seq, draft in zip(seqs, drafts, strict=True) for depth in (0, *draft.depths())
    ]


POSITIONED = [
    *({}, {"temperature": 0.8}, {"temperature": 1.0, "top_k": 4}, {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01}),
    *({"logit_bias": {3: 2.0}, "banned_token_ids": (5,)}, {"temperature": 0.7, "allowed_token_ids": tuple(range(9))}),
]


def positions_from_the_device(device: str) -> None:
    """decide with positions reads no draft and gives the choices of texts that long."""
    drafts = [(TREE, Draft((1, 2, 3)), Draft())[i % 3] for i in range(3 * len(POSITIONED))]
    seqs = [Sequence(i, [2, 7], 1, SamplingParams(**POSITIONED[i // 3]), seed=i) for i in range(len(drafts))]
    rows = sum(1 + len(draft) for draft in drafts)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(4)).to(device) * 2
    positions = torch.tensor(ahead(seqs, drafts), device=device)
    decided = make_verifier("seeded").decide(seqs, [unread(d, device) for d in drafts], logits, lambda: positions)
    longer = [Sequence(s.id, [*s.tokens, *[1] * 7], 1, s.params, s.seed) for s in seqs]
    assert decided is not None
    assert decided.list() == [token for own in choose_tokens(logits, longer, drafts) for token in own]


def test_positions_from_the_device_need_no_draft_on_the_host():
    positions_from_the_device("cpu")


@pytest.mark.gpu
def test_positions_from_the_device_on_a_gpu():
    positions_from_the_device("cuda")


@MODES
def test_positions_are_not_asked_for_where_all_sequences_are_greedy(mode: Mode):
    def positions() -> Tensor:
        raise AssertionError("nothing samples")

    seqs = [Sequence(i, [1], 1, SamplingParams(), seed=0) for i in range(2)]
    logits = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(1))
    decided = make_verifier(mode).decide(seqs, [unread(TREE), Draft()], logits, positions)
    assert decided is not None
    assert decided.list() == logits.argmax(-1).tolist()


def test_options_that_read_the_text_read_the_draft_though_positions_are_given():
    params = SamplingParams(temperature=0.9, frequency_penalty=1.5, min_tokens=2)
    seq = Sequence(0, [2, 7], 1, params, seed=3, stop_ids=frozenset({0}))
    logits = torch.randn(1 + len(TREE), VOCAB, generator=torch.Generator().manual_seed(6)) * 2
    positions = torch.tensor([2 + depth for depth in (0, *TREE.depths())])
    decided = make_verifier("seeded").decide([seq], [TREE], logits, lambda: positions)
    assert decided is not None
    assert [decided.list()] == choose_tokens(logits, [seq], [TREE])
    with pytest.raises(AssertionError, match="read on the host"):
        make_verifier("seeded").decide([seq], [unread(TREE)], logits, lambda: positions)


def test_the_wrong_number_of_positions_is_an_error():
    seq = Sequence(0, [1], 1, SamplingParams(temperature=1.0), seed=0)
    with pytest.raises(ValueError, match="shorter"):
        make_verifier("seeded").decide([seq], [Draft((1, 2))], torch.zeros(3, 4), lambda: torch.zeros(2).long())


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


def test_the_wrong_number_of_rows_is_an_error():
    with pytest.raises(ValueError, match="3 rows of logits are needed"):
        choose_tokens(torch.zeros(2, 4), [Sequence(0, [1], 1, SamplingParams(), seed=0)], [Draft((1, 2))])


@MODES
def test_no_sequences_no_verdicts(mode: Mode):
    assert make_verifier(mode).judge([], [], torch.zeros(0, 4)) == []


def test_draws_are_made_once_while_the_sequences_are_the_same():
    seqs = [Sequence(i, [1, 2], 2, SamplingParams(temperature=0.5 * i), seed=7 + i) for i in range(3)]
    verifier = SeededVerifier()
    draws = verifier.draws(seqs)
    assert draws is verifier.draws([*seqs])
    assert draws is not None
    assert ([*draws.seeds], [*draws.temperatures], draws.logits) == ([7, 8, 9], [0.0, 0.5, 1.0], False)
    some = verifier.draws(seqs[1:])
    assert some is not None
    assert [*some.seeds] == [8, 9]
    other = Sequence(0, [1, 2], 2, SamplingParams(logprobs=0), seed=3)  # of an id that was there before
    told = verifier.draws([other, seqs[2]])
    assert told is not None
    assert ([*told.seeds], told.logits) == ([3, 9], True)
    assert verifier.draws([Sequence(4, [1], 1, SamplingParams(top_k=2, temperature=1.0), seed=0), seqs[2]]) is None


def test_a_missing_token_is_an_error_also_where_the_pass_left_its_logits_out():
    seq = Sequence(0, [1, 2], 2, SamplingParams(), seed=0)
    (verdict,) = SeededVerifier().judge([seq], [Draft()], torch.empty(0, 8), HostCopy(torch.tensor([NO_TOKEN])))
    assert isinstance(verdict, ModelError)


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
