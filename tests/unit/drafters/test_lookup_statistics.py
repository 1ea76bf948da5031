"""What lookups on the device keep on the host: confidence of many sequences, guesses to be judged, the ring."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext, Evidence, RoundView
from outrider.drafters.confidence import BatchConfidence, Confidence, Continuation, prior_prob
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.evidence import OpenGuesses
from outrider.drafters.lookup_figures import MatchFigures, compare
from outrider.drafters.suffix import Suffix, SuffixConfig
from outrider.kernels.lookup import CHANCE_SHIFT, MAX_CHANCE, MAX_TOKENS
from outrider.runners.text_store import AnswerRing
from outrider.testing.toy import ToyRunner

K, MATCH = 6, 9
CPU = torch.device("cpu")


def test_confidence_of_many_is_that_of_each():
    """Continuations at random for three sequences, some of them several times, from their own texts and from others."""
    rng = random.Random(7)
    priors = [prior_prob(match, 1, 1) for match in range(MATCH + K)]
    single = {(slot, kind): Confidence((1.0, 0.5)[kind]) for slot in range(3) for kind in range(2)}
    many = BatchConfidence(3, priors, (1.0, 0.5))
    for _ in range(100):
        slots = [slot for _ in range(rng.randint(1, 8)) for slot in rng.sample(range(3), rng.randint(1, 3))]
        kinds, matches = [rng.randrange(2) for _ in slots], [rng.randint(1, MATCH) for _ in slots]
        came = [rng.randint(0, K) for _ in slots]
        missed = [int(count < K and rng.random() < 0.7) for count in came]
        for slot, kind, match, right, wrong in zip(slots, kinds, matches, came, missed, strict=True):
            tokens = tuple(range(K))
            text = [*tokens[:right], *[99] * wrong]
            single[slot, kind].judge(Continuation(0, match, tokens, tuple(priors[match : match + K])), text)
        many.judge(*(np.array(each) for each in (slots, kinds, matches, came, missed)))
    paths = [many.paths(np.arange(3), np.full(3, kind), MATCH, K) for kind in range(2)]
    for (slot, kind), confidence in single.items():
        for match in range(MATCH + 1):
            expected = np.cumprod([confidence.prob(match + i, priors[match + i]) for i in range(K)])
            np.testing.assert_allclose(paths[kind][slot, match], expected, rtol=1e-12)


def test_continuations_of_which_nothing_is_known_teach_nothing():
    many = BatchConfidence(2, [0.5] * (MATCH + K), (1.0, 1.0))
    before = many._right.copy(), many._expected.copy()
    many.judge(*(np.array(each) for each in ([0, 1], [0, 0], [2, 3], [0, 0], [0, 0])))
    np.testing.assert_array_equal((many._right, many._expected), before)


@pytest.mark.parametrize("batch", [1, 64])
def test_limits_say_how_likely_each_token_of_theirs_is(batch: int):
    """The mean chance of a token, to the power of how many there are, is that of all: written out one by one."""
    rng, rules = random.Random(batch), SuffixConfig().rules(0.1)
    most, longest = rules.traits.max_tokens, len(rules.limits) - 1
    figures = MatchFigures(rules, 3, most)
    figures.set_batch(batch)
    for slot in range(3):
        figures.reset(slot)
    for _ in range(30):
        came, slots = [rng.randint(0, most) for _ in range(2)], rng.sample(range(2), 2)  # of the third nothing is seen
        missed = [int(count < most) for count in came]
        kinds, matches = ([rng.randint(low, high) for _ in slots] for low, high in ((0, 1), (1, longest)))
        figures.judge(*(np.array(each) for each in (slots, kinds, matches, came, missed, came)))
    seen: set[int] = set()
    for slot, kind in [(slot, kind) for slot in range(3) for kind in range(2)]:
        paths = figures._confidence.paths(np.array([slot]), np.array([kind]), longest, most)[0].tolist()
        for match, limit in enumerate(figures.limits[slot, kind].tolist()):
            count = min(sum(path >= figures._min_prob for path in paths[match]), rules.limits[match])
            chance = round(MAX_CHANCE * paths[match][count - 1] ** (1 / count)) if count else 0
            assert (limit & MAX_TOKENS, limit >> CHANCE_SHIFT) == (count, chance)
            seen.add(count)
    assert 0 in seen
    assert len(seen) > 3


def text(*tokens: int) -> Sequence:
    return Sequence(4, list(tokens), 1, SamplingParams(), 0)


def test_a_guess_is_judged_once_the_text_decides_it():
    guesses, seq = OpenGuesses(), text(1, 2)
    guesses.note(seq, 2, [5, 6, 7])
    assert guesses.take() == []
    seq.tokens += [5, 6]
    assert guesses.take() == []
    guesses.note(seq, 4, [8, 7], 2)  # another of the same text
    seq.tokens.append(8)
    assert guesses.take() == [Evidence(4, 3, 2)]
    seq.tokens.append(9)
    assert guesses.take() == [Evidence(4, 2, 1, 2)]
    seq.tokens.pop()
    guesses.note(seq, 5, [3, 3])
    seq.tokens += [3, 3]
    assert guesses.take() == [Evidence(4, 2, 2)]
    guesses.note(seq, 7, [])
    assert guesses.take() == [Evidence(4, 1, 0)]  # nothing found is a token that does not come
    guesses.note(seq, 7, [1])
    guesses.forget(4)
    seq.tokens.append(1)
    assert guesses.take() == []


def test_a_guess_that_is_judged_already_is_told_whatever_is_open():
    guesses, seq = OpenGuesses(), text(1, 2)
    guesses.note(seq, 2, [5, 6])
    guesses.judge(4, 3, 1, 2)
    guesses.judge(5, 0, 0)
    assert guesses.take() == [Evidence(4, 3, 1, 2), Evidence(5, 1, 0)]
    seq.tokens.append(6)
    assert guesses.take() == [Evidence(4, 2, 0)]


def test_guesses_of_a_text_that_stands_still_are_not_kept_without_end():
    guesses, seq = OpenGuesses(), text(1, 2)
    for _ in range(100):
        guesses.note(seq, 2, [5, 6])
    seq.tokens.append(9)
    assert 2 <= len(guesses.take()) < 100


def test_a_guess_stands_for_the_rounds_that_it_would_leave():
    """Four tokens came in a round: of guesses of which one token is right each, two rounds would bring them."""
    assert Evidence(0, 3, 1, 4).rounds == 2
    assert Evidence(0, 3, 3, 4).rounds == Evidence(0, 1, 0).rounds == 1
    assert Evidence(0, 3, -1, 0).rounds == 1  # what a drafter of somebody else's may say


def test_continuations_are_compared_with_the_tokens_that_came():
    """As one by one: a continuation ends at its padding, and what is committed may end before it or behind it."""
    rng = random.Random(7)
    for _ in range(200):
        rows = rng.randrange(1, 5)
        ends = [rng.randrange(K + 1) for _ in range(rows)]
        tokens = [[rng.randrange(2) for _ in range(end)] + [-1] * (K - end) for end in ends]
        committed = [tuple(rng.randrange(2) for _ in range(rng.randrange(1, K + 3))) for _ in range(rows)]
        came, missed = compare(np.array(tokens), committed)
        for row in range(rows):
            right = 0
            while right < min(K, len(committed[row])) and tokens[row][right] == committed[row][right]:
                right += 1
            assert came[row] == right
            assert missed[row] == (right < ends[row] and right < len(committed[row]))


def lookups(max_batch: int) -> tuple[DeviceLookup, ToyRunner]:
    runner = ToyRunner(50)
    return DeviceLookup(SuffixConfig().rules(0.1), runner, max_batch), runner


def test_only_those_that_may_be_drafted_for_are_looked_up():
    tried, _ = lookups(3)
    seqs = [Sequence(i, [1, 2, 3, 1, 2], 5, SamplingParams(), 0) for i in range(3)]
    drafts = tried.propose(RoundView(seqs, [4, 0, 2]))
    assert drafts is not None
    assert [list(draft.tokens) for draft in drafts] == [[3, 1, 2, 3], [], [3, 1]]
    assert set(tried._texts) == {0, 2}
    for seq, coming in zip(seqs, ([3, 9], [5], [7]), strict=True):
        seq.tokens += coming
        seq.round += 1
    verdicts = [Verdict((3, 9), (0,)), Verdict((5,)), Verdict((7,))]
    tried.observe(seqs, drafts, verdicts)
    assert tried.take_evidence() == []  # both were drafted for
    tried._judge()
    slots = [tried._texts[0].slot, tried._free[-1], tried._texts[2].slot]
    first, _, last = tried._figures._confidence._right[slots, 0].sum(1)
    assert first > last  # of the one a token came, of the other none


def test_where_nothing_was_drafted_what_would_have_been_is_told():
    """Looked at and not asked: one that the next token refutes, one that it leaves open, one where nothing is found."""
    tried, _ = lookups(3)
    texts = [[1, 2, 3, 1, 2], [4, 5, 6, 4, 5], [1, 2, 3, 4, 5]]
    seqs = [Sequence(i, each, 5, SamplingParams(), 0) for i, each in enumerate(texts)]
    tried.watch(RoundView(seqs, [0, 0, 0]))
    wanted = int(tried._figures.limits[tried._texts[0].slot, 0, 2]) & MAX_TOKENS
    for seq, token in zip(seqs, (9, 6, 7), strict=True):
        seq.tokens.append(token)
        seq.round += 1
    tried.observe(seqs, [EMPTY] * 3, [Verdict((9,)), Verdict((6,)), Verdict((7,))])
    assert wanted > 1
    assert tried.take_evidence() == [Evidence(0, wanted, 0), Evidence(2, 1, 0)]
    seqs[1].tokens.append(4)
    assert tried.take_evidence() == ([Evidence(1, 2, 2)] if wanted == 2 else [])


def test_the_ring_holds_the_newest_answers_whole():
    ring = AnswerRing(10, 3, CPU)
    for salt, answer in (("a", [1, 2]), ("b", [3, 4]), ("a", [5])):
        ring.add(salt, answer)
    assert contents(ring) == [1, 2, -1, 3, 4, -1, 5, -1]
    assert ring.owner("a") != ring.owner("b")
    ring.add("c", [6, 7])  # the first one's place, and a fourth answer
    assert contents(ring) == [3, 4, -1, 5, -1, 6, 7, -1]
    assert ring.owner("none") == -1
    ring.add("d", list(range(10, 30)))  # of a long one, the end
    assert contents(ring) == [*range(21, 30), -1]
    assert ring.owner("a") == ring.owner("c") == -1


def test_answers_written_together_lie_as_those_written_one_by_one():
    """More of them than the ring holds, of salts that come and go, and some that match for all."""
    rng = random.Random(4)
    answers = [
        (rng.choice(["", "a", "b", None]), [rng.randrange(90) for _ in range(rng.randrange(8))]) for _ in range(60)
    ]
    one_by_one, together = AnswerRing(40, 5, CPU), AnswerRing(40, 5, CPU)
    for first in range(0, 60, 12):
        for salt, answer in answers[first : first + 12]:
            one_by_one.add(salt, answer)
        together.add_all(answers[first : first + 12])
        for each, other in zip(one_by_one.history, together.history, strict=True):
            assert torch.equal(torch.as_tensor(each), torch.as_tensor(other))
        assert [one_by_one.owner(salt) for salt in ("", "a", "b")] == [together.owner(salt) for salt in ("", "a", "b")]


def contents(ring: AnswerRing) -> list[int]:
    history = ring.history
    size = len(history.tokens)
    newest = [(history.head + i) % size for i in range(size - history.used, size)]
    return history.tokens[newest].tolist()


def test_no_ring_where_no_answer_is_kept():
    for ring in (AnswerRing(100, 0, CPU), AnswerRing(0, 5, CPU)):
        ring.add("", [1, 2, 3])
        assert ring.history.used == 0


def test_a_padded_draft_is_what_comes_before_the_padding():
    block = HostCopy(torch.tensor([[5, 6, -1, -1], [-1, -1, -1, -1], [1, 2, 3, 4]]))
    drafts = [Draft(DeviceRow(block, row, 3, padded=True), source="x", known=True) for row in range(3)]
    assert [len(draft) for draft in drafts] == [3, 3, 3]  # as many rows are scored
    known = [draft.without_padding() for draft in drafts]
    assert known == [Draft((5, 6), source="x", known=True), EMPTY, Draft((1, 2, 3), source="x", known=True)]
    assert drafts[2].first_nodes(2).without_padding().tokens == (1, 2)
    whole = Draft(DeviceRow(block, 2, 4))
    assert whole.without_padding() is whole


def test_without_a_device_it_is_the_host_that_looks_up():
    assert isinstance(SuffixConfig().build(DrafterContext(vocab_size=9, context=64)), Suffix)


def test_guesses_that_nobody_asks_for_are_not_kept_without_end():
    guesses = OpenGuesses()
    for number in range(1000):
        guesses.judge(number, 3, 1)
    taken = guesses.take()
    assert [each.seq_id for each in taken] == [*range(1000 - len(taken), 1000)]
    assert len(taken) == 256
    assert guesses.take() == []
