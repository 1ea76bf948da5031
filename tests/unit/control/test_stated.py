"""What drafters state of their last draft: worth what it tells of the next, and nothing that could bias a text."""

from __future__ import annotations

from copy import deepcopy
from itertools import product

import numpy as np
import pytest

from outrider.control.acceptance import Acceptance
from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts
from outrider.control.member import Member

TOKENS = 7


def make_controller(row: float, draft: float, tokens: int = TOKENS) -> Controller:
    """A head that drafts `tokens` tokens at once in `draft` passes, each further row costing `row`."""
    table = PassTable({(1, 1): 1.0, (1, 32): 1.0 + 31 * row})
    costs = RoundCosts(table, {"block": PassTable({(1, 1): draft / tokens, (1, 8): draft / tokens})})
    return Controller([Member("block", tokens, runs_model=True, pays_budget=True, lengths=(tokens,))], costs)


class Texts:
    """Requests that become harder and easier to draft for, round by round."""

    def __init__(self, seed: int, batch: int = 4, memory: float = 0.9) -> None:
        self.rng, self.memory = np.random.default_rng(seed), memory
        self.ids, self.state = list(range(batch)), np.zeros(batch)

    def step(self) -> np.ndarray:
        """How likely each request's tokens are accepted in the next round: [batch]"""
        noise = self.rng.standard_normal(len(self.ids))
        self.state = self.memory * self.state + (1 - self.memory**2) ** 0.5 * noise
        return 1 / (1 + np.exp(-0.5 - 1.5 * self.state))

    def accepted(self, chances: np.ndarray, lengths: list[int]) -> list[int]:
        draws = self.rng.random((len(self.ids), TOKENS)) < chances[:, None]
        return [int(row[:n].cumprod().sum()) for row, n in zip(draws, lengths, strict=True)]

    def stated(self, chances: np.ndarray, how: str) -> np.ndarray:
        right = np.clip(chances[:, None] + 0.05 * self.rng.standard_normal((len(self.ids), TOKENS)), 0, 1)
        return {"right": right, "skewed": right**3, "noise": self.rng.random(right.shape)}[how]


def simulate(how: str, seed: int, rounds: int = 250) -> tuple[float, float]:
    """Tokens a second of a controller that is told confidences of this kind, and the slope it found."""
    texts, control = Texts(seed), make_controller(row=0.1, draft=0.2)
    tokens = seconds = 0.0
    for _ in range(rounds):
        chances = texts.step()
        plan = control.plan(texts.ids, [TOKENS] * len(texts.ids))
        lengths = plan.lengths
        accepted = texts.accepted(chances, lengths)
        rows = [i for i, n in enumerate(lengths) if n]
        if how != "none" and rows:
            told = texts.stated(chances, how)
            facts = [lengths[i] for i in rows], [accepted[i] for i in rows]
            control.note_stated(0, rows, [told[i] for i in rows], *facts)
        control.note(texts.ids, texts.ids, plan, lengths, [accepted])
        tokens += len(texts.ids) + sum(accepted)
        seconds += control.costs.seconds(plan.kind)
    return tokens / seconds, control.acceptance[0].slope


def test_confidences_are_worth_what_they_tell():
    """Tokens a second of simulated rounds. Noise is ignored, and the scale of a confidence does not matter."""
    found = {
        how: np.mean([simulate(how, seed) for seed in range(24)], 0) for how in ("none", "right", "skewed", "noise")
    }
    assert found["none"][1] == 0
    for how in ("right", "skewed"):
        assert found[how][0] > 1.04 * found["none"][0]
        assert found[how][1] > 0.2
    assert found["noise"][0] > 0.985 * found["none"][0]
    assert found["noise"][1] < 0.1


def test_the_slope_is_that_of_a_regression():
    """Against least squares over all drafts, centred by the mean of all."""
    rng, acceptance = np.random.default_rng(3), Acceptance(1)
    before: dict[int, float] = {}
    x, y = [], []
    for step in range(150):
        seq_id = step % 3
        rate = acceptance.survival([9])[0, 0]  # all requests together, as no confidence is known of this one
        own = acceptance._own_rates([seq_id])[0, 0]
        chance = before.get(seq_id, rate)
        accepted = int(rng.random() < chance)
        if seq_id in before:
            x.append(before[seq_id])
            y.append(accepted - own)
        stated = float(rng.uniform(0.2, 0.9))
        acceptance.note_stated([seq_id], np.array([[stated]]), [1], [accepted])
        acceptance.note([seq_id], [1], [accepted])
        before[seq_id] = stated
    weights = 0.998 ** np.arange(len(x))[::-1]
    centred = np.array(x) - np.average(x, weights=weights)
    slope = (weights * centred * y).sum() / ((weights * centred**2).sum() + 2.0)  # as if it had been 0 for a while
    assert acceptance.slope == pytest.approx(slope, abs=0.1)
    assert acceptance.slope > 0.4


def test_what_is_stated_counts_for_the_next_round_alone():
    control = make_controller(row=0.1, draft=0.2)
    texts = Texts(1)
    for _ in range(200):
        chances = texts.step()
        control.note_stated(
            0, texts.ids, list(texts.stated(chances, "right")), [7] * 4, accepted := texts.accepted(chances, [7] * 4)
        )
        plan = control.plan(texts.ids, [7] * 4)
        control.acceptance[0].note(texts.ids, [7] * 4, accepted)
    acceptance = control.acceptance[0]
    control.note_stated(0, [0, 1], [np.full(7, 0.05), np.full(7, 0.99)], [7, 7], [3, 3])
    low, high = acceptance.survival([0, 1])[:, 0]
    assert low < high - 0.2
    none = control.plan([0, 1], [0, 0])
    control.note([0, 1], [0, 1], none, [0, 0], [[0, 0]])  # a round without drafts
    bare = [acceptance._own_rates([i])[0, 0] for i in (0, 1)]
    assert acceptance.survival([0, 1])[:, 0] == pytest.approx(bare)
    assert plan.asks


def test_a_request_that_ends_leaves_nothing():
    acceptance = Acceptance(2)
    for _ in range(50):
        acceptance.note_stated([1], np.array([[0.9, 0.1]]), [2], [1])
        acceptance.note([1], [2], [1])
    acceptance.forget(1)
    assert acceptance.survival([2]) == pytest.approx(acceptance._own_rates([2]).cumprod(1))
    acceptance.note([2], [2], [1])  # takes over the row
    assert acceptance.survival([2]) == pytest.approx(acceptance._own_rates([2]).cumprod(1))


# The law of the text, by enumeration: two tokens, drafts of at most two, the token rule.


def target_law(text: tuple[int, ...]) -> np.ndarray:
    p = 0.2 + 0.6 * ((3 * sum(text) + len(text)) % 4) / 3
    return np.array([p, 1 - p])


def draft_law(text: tuple[int, ...]) -> np.ndarray:
    q = 0.15 + 0.7 * ((sum(text) + 2 * len(text)) % 3) / 2
    return np.array([q, 1 - q])


def stated_of(draft: tuple[int, ...]) -> np.ndarray:
    """A confidence that depends on what was drawn, as heads' do."""
    return np.array([0.02 if draft[0] else 0.98, 0.02 if sum(draft) else 0.98])


def outcomes(text: tuple[int, ...], draft: tuple[int, ...]):
    """(probability, accepted, tokens) of the token rule, for a draft of any length."""
    chance = 1.0
    for i, token in enumerate(draft):
        p, q = target_law(text + draft[:i]), draft_law(text + draft[:i])
        accept = min(1.0, p[token] / q[token])
        rest = np.maximum(p - q, 0)
        if accept < 1:
            for other in (0, 1):
                yield chance * (1 - accept) * rest[other] / rest.sum(), i, (*draft[:i], other)
        chance *= accept
    for other in (0, 1):
        yield chance * target_law(text + draft)[other], len(draft), (*draft, other)


def law_of_texts(control: Controller, length: int, leaks: bool) -> tuple[dict[tuple[int, ...], float], set[int]]:
    """The chance of every text of so many tokens, and the draft lengths that the controller chose."""
    law: dict[tuple[int, ...], float] = {}
    lengths: set[int] = set()

    def follow(text: tuple[int, ...], chance: float, control: Controller) -> None:
        if len(text) >= length:
            law[text[:length]] = law.get(text[:length], 0.0) + chance
            return
        plan = control.plan([0], [2])
        for draft in product((0, 1), repeat=2):
            drawn = chance * draft_law(text)[draft[0]] * draft_law((*text, draft[0]))[draft[1]]
            asked = plan.lengths[0]
            if leaks:  # the same decision by what is stated of this very draft
                told = deepcopy(control)
                told.note_stated(0, [0], [stated_of(draft)], [1], [0])
                asked = int(told.plan([0], [2]).lengths[0])
            lengths.add(asked)
            for share, accepted, tokens in outcomes(text, draft[:asked]):
                after = deepcopy(control)
                if asked:
                    after.note_stated(0, [0], [stated_of(draft)], [asked], [accepted])
                after.note([0], [0], plan, [asked], [[accepted]])
                if share:
                    follow(text + tokens, drawn * share, after)

    follow((), 1.0, control)
    return law, lengths


@pytest.fixture(scope="module")
def practised() -> Controller:
    """A controller that has learned to believe confidences."""
    control, rng = make_controller(row=0.4, draft=0.4, tokens=2), np.random.default_rng(0)
    easy = True
    for _ in range(300):
        easy = easy if rng.random() < 0.9 else not easy
        accepted = int((rng.random(2) < (0.95 if easy else 0.1)).cumprod().sum())
        control.note_stated(0, [0], [np.full(2, 0.98 if easy else 0.02)], [2], [accepted])
        control.acceptance[0].note([0], [2], [accepted])
    control.probes._tried[0].times = 99
    return control


def test_lengths_by_the_last_drafts_confidence_leave_the_law(practised: Controller):
    law, lengths = law_of_texts(practised, 3, leaks=False)
    assert len(lengths) > 1  # else nothing was decided by it
    for text in product((0, 1), repeat=3):
        wanted = np.prod([target_law(text[:i])[text[i]] for i in range(3)])
        assert law[text] == pytest.approx(wanted, abs=1e-12)


def test_lengths_by_a_drafts_own_confidence_would_not(practised: Controller):
    """The judge above can fail."""
    law, _ = law_of_texts(practised, 3, leaks=True)
    wanted = {text: np.prod([target_law(text[:i])[text[i]] for i in range(3)]) for text in product((0, 1), repeat=3)}
    assert max(abs(law[text] - wanted[text]) for text in wanted) > 0.01


def test_one_draft_is_noted_as_several_are():
    """Positions that drafts did not reach, confidences of some tokens alone, and rounds without any."""
    rng = np.random.default_rng(5)
    one, several = Acceptance(4), Acceptance(4)
    for turn in range(60):
        seq_id, length = int(rng.integers(3)), int(rng.integers(1, 5))
        accepted = int(rng.integers(length + 1))
        stated = rng.uniform(size=4)
        stated[int(rng.integers(1, 5)) :] = np.nan
        one.note_stated([seq_id], stated[None], [length], [accepted])
        several.states = True
        several._note_all_stated([seq_id], [several._row(seq_id)], stated[None], [length], [accepted])
        for each in (one, several):
            each.note([seq_id], [length], [accepted])
            if turn % 7 == 3:
                each.forget_stated([seq_id])
        assert one.slope == pytest.approx(several.slope, abs=1e-12)
        np.testing.assert_allclose(one.survival([0, 1, 2]), several.survival([0, 1, 2]), rtol=1e-12)
    assert one.slope > 0 or one._products != 0
