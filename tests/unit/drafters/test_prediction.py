"""Following a prediction, and finding the way back after each kind of edit."""

import random

import pytest

from outrider.core.draft import EMPTY
from outrider.core.errors import ConfigError
from outrider.drafters.base import RoundView
from outrider.drafters.ngram_index import MAX_INDEXED
from outrider.drafters.prediction import PredictionConfig

EXPECTED = tuple(range(100, 200))


def rounds(play, make, context, prediction, answer, k=8):
    drafter = PredictionConfig(k=k, min_prob=0.1).build(context)
    return len(play(drafter, make([1, 2], prompt_len=2, prediction=tuple(prediction)), answer))


def test_a_right_prediction_comes_in_full_drafts(make, context, play):
    assert rounds(play, make, context, EXPECTED, EXPECTED) == 12  # 9 tokens a round


def test_no_prediction_no_draft(make, context):
    assert PredictionConfig().build(context).propose(RoundView([make([1, 2, 3])], [8])) == [EMPTY]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param([*EXPECTED[:40], 7, *EXPECTED[41:]], id="one token replaced"),
        pytest.param([*EXPECTED[:40], 7, 8, *EXPECTED[42:]], id="two tokens replaced"),
        pytest.param([*EXPECTED[:40], 7, *EXPECTED[40:]], id="one token inserted"),
        pytest.param([*EXPECTED[:40], 7, 8, 9, *EXPECTED[40:]], id="three tokens inserted"),
        pytest.param([*EXPECTED[:40], *EXPECTED[41:]], id="one token left out"),
        pytest.param([*EXPECTED[:40], *EXPECTED[60:]], id="twenty tokens left out"),
        pytest.param([*EXPECTED[:40], *EXPECTED[10:]], id="thirty tokens repeated"),
        pytest.param([7, 8, *EXPECTED], id="a new beginning"),
    ],
)
def test_an_edit_costs_a_few_rounds_not_the_rest(answer, make, context, play):
    unedited = rounds(play, make, context, answer, answer)
    assert rounds(play, make, context, EXPECTED, answer) <= unedited + 5


def test_many_edits_of_a_text_with_common_tokens(make, context, play):
    rng = random.Random(5)
    prediction = [rng.randrange(30) for _ in range(600)]
    answer = list(prediction)
    for at in range(50, 600, 50):
        answer[at] = 77
    assert rounds(play, make, context, prediction, answer) < 600 / 9 + 11 * 4
    assert rounds(play, make, context, prediction, prediction[::-1]) > 400


NEAR, FAR = (9, 2, 3, 60, 61), (1, 2, 3, 50, 51)


def test_of_two_equal_ways_back_the_nearer(make, context):
    drafter = PredictionConfig(min_prob=0).build(context)
    prediction = (*range(100, 108), *NEAR, *range(108, 112), *FAR)
    (draft,) = drafter.propose(RoundView([make([*range(100, 105), 8, 2, 3], prediction=prediction)], [2]))
    assert draft.tokens == (60, 61)


def test_of_two_ways_back_the_longer_match(make, context):
    drafter = PredictionConfig(min_prob=0).build(context)
    prediction = (*range(100, 108), *NEAR, *range(108, 140), *FAR)
    (draft,) = drafter.propose(RoundView([make([*range(100, 105), 1, 2, 3], prediction=prediction)], [2]))
    assert draft.tokens == (50, 51)


def test_an_answer_may_outlive_its_prediction(make, context, play):
    drafter = PredictionConfig().build(context)
    seq = make([1], prompt_len=1, prediction=(5, 6, 7))
    play(drafter, seq, [5, 6, 7, 8, 9, 10])
    assert drafter.propose(RoundView([seq], [4])) == [EMPTY]


def test_a_useless_prediction_falls_silent(make, context, play):
    drafter = PredictionConfig(min_prob=0.25).build(context)
    drafts = play(drafter, make([1], prompt_len=1, prediction=EXPECTED), list(range(500, 600)))
    assert drafts[0]
    assert not any(drafts[20:])


def test_rounds_without_it_are_caught_up_with(make, context):
    early, late = PredictionConfig().build(context), PredictionConfig().build(context)
    seq = make([1], prompt_len=1, prediction=EXPECTED)
    for size in (3, 11, 40):
        seq.tokens = [1, *EXPECTED[:size]]
        early.propose(RoundView([seq], [0]))
    assert (
        early.propose(RoundView([seq], [4]))[0].tokens
        == late.propose(RoundView([seq], [4]))[0].tokens
        == EXPECTED[40:44]
    )


class Counted(tuple):
    """A prediction that counts how often it is read."""

    def __new__(cls, tokens):
        made = super().__new__(cls, tokens)
        made.reads = 0
        return made

    def __getitem__(self, at):
        self.reads += 1
        return super().__getitem__(at)


def test_a_long_prediction_is_indexed_in_bounded_steps(make, context):
    drafter = PredictionConfig(min_prob=0).build(context)
    prediction = Counted(range(100, 10_000))
    seq = make([1, 7, *prediction[5000:5003]], prompt_len=1, prediction=prediction)
    tokens = []
    for _ in range(4):
        prediction.reads = 0
        tokens.append(drafter.propose(RoundView([seq], [2]))[0].tokens)
        assert prediction.reads <= 2 * MAX_INDEXED + 200
        seq.tokens.append(prediction[5003 + len(tokens) - 1])
    assert tokens[3] == prediction[5006:5008]
    assert tokens[0] != prediction[5003:5005]  # not indexed so far


def test_many_tokens_of_an_answer_are_aligned_in_bounded_steps(make, context):
    drafter = PredictionConfig(min_prob=0).build(context)
    prediction = Counted(range(100, 10_000))
    seq = make([1], prompt_len=1, prediction=prediction)
    for _ in range(5):
        drafter.propose(RoundView([seq], [2]))
    seq.tokens += [*range(20_000, 50_000), *prediction[9000:9005]]
    prediction.reads = 0
    assert drafter.propose(RoundView([seq], [2]))[0].tokens == prediction[9005:9007]
    assert prediction.reads < 256 * 60


def test_sequences_of_one_prediction_share_its_index(make, context):
    drafter = PredictionConfig(min_prob=0).build(context)
    prediction = Counted(range(100, 1100))
    seqs = [make([1, 7, *prediction[at : at + 3]], prompt_len=1, prediction=prediction) for at in (300, 500)]
    seqs[1].id = seqs[0].id + 1
    prediction.reads = 0
    drafts = drafter.propose(RoundView(seqs, [2, 2]))
    assert [draft.tokens for draft in drafts] == [prediction[303:305], prediction[503:505]]
    assert prediction.reads < 2 * 1000 + 300
    for seq in seqs:
        drafter.forget(seq)
    assert not drafter._indexes


def test_a_forgotten_sequence_starts_anew(make, context):
    drafter = PredictionConfig().build(context)
    seq = make([1, *EXPECTED[:5]], prompt_len=1, prediction=EXPECTED)
    drafter.propose(RoundView([seq], [4]))
    drafter.forget(seq)
    seq.tokens = [1]
    assert drafter.propose(RoundView([seq], [2]))[0].tokens == EXPECTED[:2]


def test_options_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="prediction: k must be 1 to 256, got 0"):
        PredictionConfig(k=0)
