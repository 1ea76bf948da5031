"""What was decided for each request, rounds without drafts among it."""

from __future__ import annotations

import random
from collections import Counter

from outrider.control.decisions import DecisionLog, Decisions


def test_rounds_without_drafts_are_those_that_a_request_took_part_in():
    """Requests come, go and are left out of rounds; somebody is asked now and then, and a round may have nobody."""
    rng, log, expected = random.Random(1), DecisionLog(["lookup"]), Counter[int]()
    ids, coming = [0, 1, 2], 3
    for _ in range(500):
        taking = ids if rng.random() < 0.7 else [i for i in ids if rng.random() < 0.8]
        rounds = rng.randint(1, 8)
        log.note_rest(taking, rounds)
        expected.update(dict.fromkeys(taking, rounds))
        if rng.random() < 0.1:
            log.end_rest()
        if ids and rng.random() < 0.2:
            gone = ids.pop(rng.randrange(len(ids)))
            told = log.forget(gone)
            assert (told.rounds, dict(told.lengths)) == (
                expected[gone],
                {("", 0): expected[gone]} if told.rounds else {},
            )
        if rng.random() < 0.2:
            ids, coming = [*ids, coming], coming + 1
    for seq_id in ids:
        assert log.forget(seq_id).rounds == expected[seq_id]
    assert not len(log)


def test_who_did_not_rest_before_is_told():
    log = DecisionLog(["lookup"])
    assert [*log.note_rest([1, 2])] == [1, 2]
    assert not log.note_rest([1, 2], 3)
    assert not log.note_rest([2]), "it goes on"
    assert [*log.note_rest([1, 2, 3])] == [1, 3]
    log.forget(3)
    assert not log.note_rest([1, 2])
    log.end_rest()
    assert [*log.note_rest([1, 2])] == [1, 2]
    assert log.forget(1).rounds == 1 + 3 + 1 + 1 + 1


def test_the_sequences_of_a_rest_are_kept_as_they_were():
    log, ids = DecisionLog(["lookup"]), [1, 2]
    log.note_rest(ids)
    ids.pop(0)
    log.note_rest(ids)
    assert (log.forget(1).rounds, log.forget(2).rounds) == (1, 2)


def test_decisions_add_up():
    total = Decisions(2, Counter({("", 0): 2}), 1.0)
    total.add(Decisions(3, Counter({("", 0): 1, ("lookup", 4): 2}), -0.5))
    assert total == Decisions(5, Counter({("", 0): 3, ("lookup", 4): 2}), 0.5)
