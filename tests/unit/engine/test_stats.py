"""The figures against counting by hand, over random histories of chains and trees."""

import json
import math
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.control.decisions import Decisions
from outrider.control.limits import Ceilings, PassLimits
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.engine.judged import JudgedDraft, ends_in_rejection
from outrider.engine.stats import Stats, Tally, Times, meaning, total
from outrider.runners.pass_work import PassWork

VOCAB = 6


@dataclass
class Round:
    """A draft, what became of it, and every decision on the way: True where a draft token was accepted."""

    draft: Draft
    verdict: Verdict
    decisions: list[bool]


def random_round(rng: random.Random) -> Round:
    """Walk down a random draft; at every node with children either one of them is accepted or all are rejected."""
    draft = random_draft(rng)
    path: list[int] = []
    decisions: list[bool] = []
    while children := [i for i in range(len(draft)) if draft.parent(i) == (path[-1] if path else -1)]:
        decisions.append(rng.random() < 0.6)
        if not decisions[-1]:
            break
        path.append(rng.choice(children))
    own = VOCAB + 1  # a token that nobody drafted
    return Round(draft, Verdict((*(draft.tokens[i] for i in path), own), tuple(path)), decisions)


def random_draft(rng: random.Random) -> Draft:
    size = rng.randrange(7)
    if size == 0:
        return EMPTY
    if rng.random() < 0.5:
        return Draft(tuple(rng.choices(range(VOCAB), k=size)), source="chain")
    nodes: dict[tuple[int, int], None] = {}
    while len(nodes) < size:
        nodes[rng.randrange(-1, len(nodes)), rng.randrange(VOCAB)] = None
    return Draft(tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes), source="tree")


def depth_of(draft: Draft) -> int:
    return max((len(draft.path(i)) for i in range(len(draft))), default=0)


histories = st.builds(
    lambda seed, size: [random_round(rng) for rng in [random.Random(seed)] for _ in range(size)],
    st.integers(0, 10_000),
    st.integers(1, 30),
)
by_hand = settings(max_examples=60, deadline=None, derandomize=True)


def tally_of(history: list[Round]) -> Tally:
    tally = Tally()
    for each in history:
        tally.count(JudgedDraft.of(each.draft, each.verdict))
    return tally


@by_hand
@given(histories)
def test_alpha_is_the_share_of_decisions_that_went_for_the_draft(history: list[Round]):
    decisions = [decision for each in history for decision in each.decisions]
    assert tally_of(history).alpha == pytest.approx(sum(decisions) / len(decisions) if decisions else 0)


@by_hand
@given(histories)
def test_gamma_and_tau_are_means_over_rounds(history: list[Round]):
    tally = tally_of(history)
    assert tally.gamma == pytest.approx(sum(len(each.draft) for each in history) / len(history))
    assert tally.tau == pytest.approx(sum(len(each.verdict.tokens) for each in history) / len(history))


@by_hand
@given(histories)
def test_tau_formula_is_the_mean_of_geometric_sums(history: list[Round]):
    tally = tally_of(history)
    sums = [sum(tally.alpha**i for i in range(depth_of(each.draft) + 1)) for each in history]
    assert tally.tau_formula == pytest.approx(sum(sums) / len(sums))


@pytest.mark.parametrize(("gamma", "alpha"), [(1, 0.5), (4, 0.8), (7, 0.25)])
def test_tau_formula_of_equal_drafts_is_the_textbook_one(gamma: int, alpha: float):
    """(1 - α^(γ+1)) / (1 - α), with rejections in the proportion that makes α what it is."""
    tally = Tally()
    accepted, rejected = round(alpha * 100), round((1 - alpha) * 100)
    draft = Draft((1,) * gamma)
    for _ in range(rejected):
        tally.count(JudgedDraft.of(draft, Verdict((9,))))
    for _ in range(accepted // gamma):
        tally.count(JudgedDraft.of(draft, Verdict((1,) * gamma + (9,), tuple(range(gamma)))))
    alpha = tally.alpha
    assert tally.tau_formula == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


@by_hand
@given(histories)
def test_acceptance_by_position(history: list[Round]):
    """Of the rounds whose draft reached a depth, those that kept a token there."""
    tally = tally_of(history)
    for depth, share in enumerate(tally.acceptance_by_position):
        reached = [each for each in history if depth_of(each.draft) > depth]
        assert share == pytest.approx(sum(each.verdict.accepted > depth for each in reached) / len(reached))
    assert len(tally.acceptance_by_position) == max(depth_of(each.draft) for each in history)
    depths = range(len(tally.acceptance_by_position))
    assert tally.drafted_at == [sum(depth_of(each.draft) > depth for each in history) for depth in depths]
    assert tally.accepted_at == [sum(each.verdict.accepted > depth for each in history) for depth in depths]


@by_hand
@given(histories)
def test_a_rejection_is_a_last_node_with_children(history: list[Round]):
    for each in history:
        assert ends_in_rejection(each.draft, each.verdict) == (False in each.decisions)
        assert JudgedDraft.of(each.draft, each.verdict).rejected == (False in each.decisions)


@by_hand
@given(histories, histories)
def test_adding_is_counting_everything(one: list[Round], other: list[Round]):
    added = tally_of(one)
    added.add(tally_of(other))
    assert added == tally_of([*one, *other])


@by_hand
@given(histories, histories)
def test_totals_over_requests_and_drafters(one: list[Round], other: list[Round]):
    parts = [Stats(prompt_tokens=3, started=5.0), Stats(prompt_tokens=4, started=4.0)]
    for part, history in zip(parts, (one, other), strict=True):
        for i, each in enumerate(history):
            part.count(JudgedDraft.of(each.draft, each.verdict))
            part.count_tokens(len(each.verdict.tokens), 10.0 + i)
    whole = total(parts)
    assert whole.all == tally_of([*one, *other])
    for source in ("chain", "tree"):
        mine = [each for each in (*one, *other) if each.draft.source == source]
        assert whole.drafters.get(source, Tally()) == tally_of(mine)
    assert set(whole.drafters) <= {"chain", "tree"}
    assert whole.prompt_tokens == 7
    assert whole.tokens == sum(len(each.verdict.tokens) for each in (*one, *other))
    assert whole.started == 4.0
    assert whole.ended == 9.0 + max(len(one), len(other))
    assert parts[0].all == tally_of(one)  # summing changes no part


def test_speed_leaves_out_the_first_round_of_tokens():
    stats = Stats(started=1.0)
    stats.count_tokens(1, 3.0)
    stats.count_tokens(4, 4.0)
    stats.count_tokens(5, 5.0)
    assert stats.seconds == 4.0
    assert stats.tokens_per_second == pytest.approx(10 / 4)
    assert stats.decode_tokens_per_second == pytest.approx(9 / 2)
    assert stats.as_dict()["time_to_first_token"] == 2.0


def test_times_add_up():
    times = Times(draft=1.0, verify=2.0, host=3.0)
    times.add(Times(draft=0.5, verify=0.25, host=0.125))
    assert (times.draft, times.verify, times.host) == (1.5, 2.25, 3.125)


def test_no_rounds_are_all_zero_and_json():
    told = Stats().as_dict()
    assert json.loads(json.dumps(told)) == told
    assert all(value == 0 for value in told.values() if isinstance(value, (int, float)))


@by_hand
@given(histories)
def test_every_figure_is_a_number_json_can_hold(history: list[Round]):
    stats = Stats()
    for each in history:
        stats.count(JudgedDraft.of(each.draft, each.verdict))
        stats.count_tokens(len(each.verdict.tokens), 1.0)
    told = json.loads(json.dumps(stats.as_dict(), allow_nan=False))
    assert math.isclose(told["acceptance_rate"], told["accepted"] / told["drafted"] if told["drafted"] else 0)


@pytest.mark.parametrize(("alpha", "word"), [(1.0, "excellent"), (0.7, "excellent"), (0.69, "worthwhile")])
def test_what_alpha_means(alpha: float, word: str):
    assert meaning(alpha, 20) == word
    assert "another drafter" in meaning(0.49, 20)
    assert meaning(alpha, 19) == meaning(0.0, 19) == "19 tokens are too few to say more"
    assert meaning(alpha, 1) == "one token is too few to say more"


def test_what_was_decided_says_what_passes_were_bound_by():
    """Two requests of 3 rounds of 4 rows and one round of 8: five rows a pass on average."""
    limits = PassLimits(PassWork(1000, 2000), Ceilings(10.0, 80.0))
    one = Stats(rows=12, times=Times(rounds=3), limits=limits, decisions=Decisions(rounds=3, saved=1.5))
    other = Stats(rows=8, times=Times(rounds=1), limits=limits, decisions=Decisions(rounds=1))
    told = total([one, other]).as_dict()["decisions"]
    assert (told["rounds"], told["saved_seconds"]) == (4, 1.5)
    assert told["load"] == limits.describe(5.0)
    assert "load" not in replace(one, limits=None).as_dict()["decisions"]
    assert "decisions" not in replace(one, decisions=None).as_dict()
