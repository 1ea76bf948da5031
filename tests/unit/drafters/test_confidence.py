"""Probabilities of repetition grow with what was seen, and the correction follows what came."""

import pytest

from outrider.drafters.confidence import MISS_PROBS, Confidence, Continuation, grade, prior_prob


def test_grades_are_the_documented_lengths():
    firsts = [next(m for m in range(200) if grade(m) == g) for g in range(len(MISS_PROBS))]
    assert firsts == [0, 1, 2, 3, 5, 9, 17, 33]
    assert grade(10_000) == len(MISS_PROBS) - 1


def test_a_prior_is_the_share_less_the_misses():
    assert prior_prob(1, 1, 1) == pytest.approx(1 - MISS_PROBS[1])
    assert prior_prob(2, 3, 4) == pytest.approx(3 / 4 * (1 - MISS_PROBS[2] ** 4))
    assert prior_prob(3, 5, 5) > prior_prob(3, 1, 1) > prior_prob(1, 1, 1)
    assert prior_prob(4, 100, 200) == pytest.approx(0.5, abs=1e-3)


def test_a_continuation_is_judged_up_to_its_first_wrong_token():
    confidence, by_hand = Confidence(), Confidence()
    confidence.judge(Continuation(2, 1, (7, 8, 9, 9), (0.5, 0.6, 0.7, 0.8)), [1, 2, 7, 8, 0, 9])
    by_hand.record(1, 0.5, True)
    by_hand.record(2, 0.6, True)
    by_hand.record(3, 0.7, False)
    assert [confidence.prob(m, 0.4) for m in range(40)] == [by_hand.prob(m, 0.4) for m in range(40)]


def test_a_continuation_beyond_the_text_is_judged_as_far_as_the_text_goes():
    confidence, by_hand = Confidence(), Confidence()
    confidence.judge(Continuation(1, 1, (7, 8), (0.5, 0.6)), [1, 7])
    by_hand.record(1, 0.5, True)
    assert [confidence.prob(m, 0.4) for m in range(40)] == [by_hand.prob(m, 0.4) for m in range(40)]


def test_the_correction_follows_the_truth_and_comes_back():
    confidence = Confidence()
    assert confidence.prob(2, 0.5) == 0.5
    assert Confidence(0.5).prob(2, 0.5) == 0.25
    for _ in range(300):
        confidence.record(2, 0.5, False)
    assert confidence.prob(2, 0.5) < 0.01
    assert confidence.prob(9, 0.5) == 0.5  # another grade
    for i in range(300):
        confidence.record(2, 0.5, i % 4 > 0)
    assert confidence.prob(2, 0.5) == pytest.approx(0.75, abs=0.05)
    for _ in range(300):
        confidence.record(2, 0.5, True)
    assert confidence.prob(2, 0.9) == 0.99


def test_what_is_expected_is_the_sum_of_the_probabilities_that_reach_the_least():
    continuation = Continuation(0, 1, (5, 6, 7), (0.5, 0.5, 0.5))
    assert Confidence().expected_accepted(continuation, 0.2) == (2, 0.75)
    assert Confidence().expected_accepted(continuation, 0.0) == (3, 0.875)
    assert Confidence().expected_accepted(continuation, 0.6) == (0, 0.0)


def test_prior_and_probability_in_one_call():
    confidence = Confidence(1.2)
    for match, hit in ((0, False), (2, True), (40, True), (40, False)):
        confidence.record(match, 0.6, hit)
    for match in (*range(40), 10_000):
        for votes, seen in ((1, 1), (3, 3), (2, 7), (9, 30)):
            prior = prior_prob(match, votes, seen)
            assert confidence.probs(match, votes, seen) == (prior, confidence.prob(match, prior))
