"""Rounds that lookups on the device judge later, several at once: they learn what they would have learned at once."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import numpy as np
import pytest

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters import device_lookup
from outrider.drafters.base import RoundView
from outrider.drafters.device_lookup import _MAX_UNJUDGED, DeviceLookup, _LastRound
from outrider.drafters.lookup_budgets import Budgets
from outrider.drafters.lookup_figures import MatchFigures
from outrider.drafters.suffix import SuffixConfig
from outrider.testing.toy import ToyRunner

RULES = SuffixConfig().rules(0.1)
K, MATCH, SLOTS = RULES.traits.max_tokens, len(RULES.limits) - 1, 4


def rounds_at_random(rng: random.Random, count: int) -> list[list[list[int]]]:
    """Of each round: slots, kinds, matches, tokens that came, whether the next did not, and tokens wanted."""
    made: list[list[list[int]]] = []
    for _ in range(count):
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        came = [rng.randint(0, K) for _ in slots]
        made.append([
            slots, [rng.randrange(2) for _ in slots], [rng.randint(0, MATCH) for _ in slots], came,
            [int(n < K and rng.random() < 0.7) for n in came], [rng.randint(0, K) for _ in slots],
        ])  # fmt: skip
    return made


def figures() -> MatchFigures:
    made = MatchFigures(RULES, SLOTS, K)
    for slot in range(SLOTS):
        made.reset(slot)
    return made


def test_rounds_judged_together_teach_what_they_do_one_by_one():
    rng = random.Random(3)
    one_by_one, together = figures(), figures()
    for _ in range(40):
        rounds = rounds_at_random(rng, rng.randint(1, 9))
        for each in rounds:
            one_by_one.judge(*map(np.array, each))
        before = together.expected.tolist()
        slots, kinds, matches, came, missed, wanted = (np.concatenate(column) for column in zip(*rounds, strict=True))
        together.judge(slots, kinds, matches, came, missed, wanted)
        np.testing.assert_array_equal(together.limits, one_by_one.limits)
        for name in ("_right", "_expected"):
            judged = getattr(together._confidence, name), getattr(one_by_one._confidence, name)
            np.testing.assert_allclose(*judged, rtol=1e-12)
        worth = together.worth(slots, kinds, matches, np.where(matches > 0, wanted, 0)).tolist()
        for slot, value in zip(slots.tolist(), worth, strict=True):  # by what is known now of each match
            before[slot] = max(before[slot] / 2, value)
        np.testing.assert_allclose(together.expected, before, rtol=1e-12)


class AtOnce(DeviceLookup):
    """Judges every round when it is observed."""

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        super().observe(seqs, drafts, verdicts)
        self._judge()


def made(kind: type[DeviceLookup] = DeviceLookup, max_batch: int = 3) -> DeviceLookup:
    return kind(RULES, ToyRunner(50), max_batch)


def texts(count: int, first: int = 0) -> list[Sequence]:
    return [Sequence(first + i, [1, 2, 3, 1, 2], 5, SamplingParams(), 0) for i in range(count)]


def observe(tried: DeviceLookup, seqs: Seq[Sequence], drafts: Seq[Draft], coming: Seq[tuple[int, ...]]) -> None:
    """These tokens came."""
    for seq, tokens in zip(seqs, coming, strict=True):
        seq.tokens += tokens
        seq.round += 1
    tried.observe(seqs, drafts, [Verdict(tokens, tuple(range(len(tokens) - 1))) for tokens in coming])


def right_of(tried: DeviceLookup, seq: Sequence) -> float:
    return float(tried._figures._confidence._right[tried._texts[seq.id].slot].sum())


def play(tried: DeviceLookup, seqs: Seq[Sequence], coming: Seq[tuple[int, ...]]) -> None:
    drafts = tried.propose(RoundView(seqs, [4] * len(seqs)))
    assert drafts is not None
    observe(tried, seqs, drafts, coming)


def test_a_round_is_judged_before_the_next_drafts_are_made():
    later, at_once = made(), made(AtOnce)
    for tried in (later, at_once):
        seqs = texts(2)
        play(tried, seqs, [(3, 1), (7,)])
        play(tried, seqs, [(2,), (1, 2)])
        play(tried, seqs, [(3,), (3,)])
    assert len(later._unjudged) == 1
    np.testing.assert_array_equal(later._figures.reach, at_once._figures.reach)
    later._judge()
    for name in ("limits", "expected"):
        np.testing.assert_array_equal(getattr(later._figures, name), getattr(at_once._figures, name))


def test_not_more_than_so_many_rounds_wait_to_be_judged():
    tried, seqs = made(), texts(1)
    tried.propose(RoundView(seqs, [4]))
    lookup = tried._open._open[0]
    for number in range(1, _MAX_UNJUDGED):
        observe(tried, seqs, [EMPTY], [(3,)])
        tried._open.add(lookup._replace(due=[number + 1]))
        assert len(tried._unjudged) == number
    before = right_of(tried, seqs[0])
    observe(tried, seqs, [EMPTY], [(3,)])
    assert len(tried._unjudged) == 0
    assert right_of(tried, seqs[0]) > before


def test_a_text_that_takes_the_slot_of_one_that_ended_learns_nothing_from_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_lookup, "_SPARE_SLOTS", 0)
    tried, (old,), (new,) = made(max_batch=1), texts(1), texts(1, 5)
    play(tried, [old], [(3, 1, 2, 9)])
    tried.forget(old)
    assert len(tried._unjudged) == 1
    tried.propose(RoundView([new], [4]))
    fresh = made(max_batch=1)
    fresh.propose(RoundView([new], [4]))
    assert right_of(tried, new) == right_of(fresh, new)
    np.testing.assert_array_equal(tried._figures.limits, fresh._figures.limits)
    assert tried._figures.expected.tolist() == fresh._figures.expected.tolist()


def test_a_lookup_whose_text_lost_its_slot_is_not_judged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_lookup, "_SPARE_SLOTS", 0)
    tried, (old,), (new,) = made(max_batch=1), texts(1), texts(1, 5)
    first, second = tried.propose(RoundView([old], [4])), tried.propose(RoundView([new], [4]))
    assert first is not None
    assert second is not None
    before = right_of(tried, new)
    observe(tried, [old], first, [(3, 1, 2, 3)])
    tried._judge()
    assert right_of(tried, new) == before
    observe(tried, [new], second, [(3, 1, 2, 3)])
    tried._judge()
    assert right_of(tried, new) > before


def test_of_a_round_that_some_have_left_the_others_are_judged():
    """One ended, and of another the round is not the one that was looked up for."""
    tried, seqs = made(), texts(3)
    drafts = tried.propose(RoundView(seqs, [4, 4, 4]))
    assert drafts is not None
    before = [right_of(tried, seq) for seq in seqs]
    seqs[2].round += 4
    observe(tried, [seqs[2], seqs[0]], [drafts[2], drafts[0]], [(3, 1), (3, 1)])
    tried._judge()
    after = [right_of(tried, seq) for seq in seqs]
    assert after[0] > before[0]
    assert after[1:] == before[1:]


def test_where_a_round_is_proposed_twice_the_last_counts():
    tried, seqs = made(), texts(1)
    tried.propose(RoundView(seqs, [0]))
    tried.watch(RoundView(seqs, [0]))
    drafts = tried.propose(RoundView(seqs, [4]))
    assert drafts is not None
    observe(tried, seqs, drafts, [(9,)])
    assert tried.take_evidence() == []  # it was drafted for
    assert len(tried._open._open) == 0


def test_guesses_are_told_at_once_whatever_waits_to_be_judged():
    later, at_once = made(), made(AtOnce)
    for tried in (later, at_once):
        seqs = texts(2)
        play(tried, seqs, [(3, 1), (9,)])
        tried.watch(RoundView(seqs, [0, 0]))
        observe(tried, seqs, [EMPTY] * 2, [(5,), (6,)])
        assert len(tried._unjudged) == (tried is later)
    assert later.take_evidence() == at_once.take_evidence() != []
    later._judge()
    np.testing.assert_array_equal(later._figures.limits, at_once._figures.limits)


def test_where_all_that_are_left_of_a_round_were_drafted_for_nothing_is_guessed():
    tried, seqs = made(), texts(2)
    tried.propose(RoundView(seqs, [4, 4]))
    lookup = tried._open._open.pop()
    tried._open.add(lookup._replace(drafted=[True, False]))
    observe(tried, seqs[:1], [EMPTY], [(9,)])
    assert tried.take_evidence() == []
    assert len(tried._unjudged) == 1


def test_where_a_text_ends_before_its_round_is_observed_the_others_are_judged_by_their_own():
    tried = made()
    seqs = texts(3)
    seqs[2].tokens[:] = [5, 6, 7, 5, 6]
    drafts = tried.propose(RoundView(seqs, [4, 4, 4]))
    assert drafts is not None
    before = [right_of(tried, seq) for seq in seqs[1:]]
    tried.forget(seqs[0])
    observe(tried, seqs[1:], drafts[1:], [(9,), (7, 5)])
    assert len(tried._unjudged) == 1
    tried._judge()
    wrong, right = (right_of(tried, seq) - was for seq, was in zip(seqs[1:], before, strict=True))
    assert wrong < 0 < right


def test_a_round_can_be_repeated_until_one_of_its_texts_ends():
    tried, (one, other) = made(), texts(2)
    tried.propose(RoundView([one], [4]))
    tried.propose(RoundView([other], [4]))
    lookup = tried._open._open[-1]
    tried._last = last = _LastRound(lookup, Budgets([4]), 5, 8)
    tried.forget(one)  # which is told of late
    assert tried._last is last
    tried.forget(other)
    assert tried._last is None
    assert sorted(tried._free) == [*range(6)]  # three, and as many to spare
