"""About how long an advice takes, by hand."""

import pytest

from outrider.advise.candidates import Candidate
from outrider.advise.duration import Pace, expected_seconds, probe
from outrider.advise.measure import Scope
from outrider.cli.screen import about
from outrider.llm import LLM
from outrider.testing.synthetic import synthetic_pair

SCOPE = Scope(((1, 2), (3, 4), (5, 6), (7, 8)), (0.0, 1.0), (1, 4), (100,), 10)
PACES = {1: Pace(0.02, 0.01), 4: Pace(0.08, 0.02)}


def test_by_hand():
    # four prompts of 0.12 s, at two temperatures; all four together 0.28 s; behind 100 tokens 1 s and 24 rounds
    cells, behind = (4 * 0.12, 0.28, 4 * 0.12), 100 * 0.01 + 24 * 0.01
    # timed again with and without drafts: for 8 s where eight times take longer, else eight times
    again = (min(16 * each, 8.0) for each in cells)
    first, batch, warm = again
    wanted = [Candidate("suffix"), Candidate("block:tree=24", tree=True)]
    by_hand = (5 + 2) * (sum(cells) + behind) + 2 * (first + batch + warm + 2 * first) + batch + warm + 7 * 3.0
    assert expected_seconds(SCOPE, PACES, 3.0, wanted, 2) == pytest.approx(by_hand)
    slow = {batch: Pace(100 * each.prompt, 100 * each.round) for batch, each in PACES.items()}
    # three repetitions at least, however long they take
    rest = (5 + 2) * 100 * (sum(cells) + behind) + 7 * 3.0
    often = [6 * 100 * each for each in cells]
    by_hand = rest + 2 * (sum(often) + 2 * often[0]) + often[1] + often[2]
    assert expected_seconds(SCOPE, slow, 3.0, wanted, 2) == pytest.approx(by_hand)


def test_what_is_known_takes_no_time():
    assert expected_seconds(SCOPE, PACES, 3.0, [], 2) < expected_seconds(SCOPE, PACES, 3.0, [Candidate("suffix")], 2)


def test_every_batch_is_probed(tmp_path):
    target, _ = synthetic_pair("tiny", seed=3).save(tmp_path)
    with LLM(target, drafter="none", device="cpu") as llm:
        paces = probe(llm, SCOPE)
    assert list(paces) == [1, 4]
    assert all(each.round > 0 and each.prompt >= 0 for each in paces.values())


def test_in_words():
    assert [about(each) for each in (0.4, 44, 89, 91, 400)] == [
        "about 10 s", "about 40 s", "about 90 s", "about 2 min", "about 7 min",
    ]  # fmt: skip
