"""Drafts that share the rows of a pass: what that gains is learned, and counts where passes are packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.control.choose import choose_plan
from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts
from outrider.control.member import Member
from outrider.control.plan import Outlook
from outrider.control.sharing import Sharing, accepted_by_length
from outrider.kernels.share import share_tokens

WIDTHS = (1, 2, 4, 6, 8)
BLOCK = Member("block", 7, runs_model=True, pays_budget=True, lengths=(7,), shares=True)


def costs(row: float = 0.05, more: dict[tuple[int, int], float] | None = None) -> RoundCosts:
    """A pass of one row takes a millisecond, each row more a part of that; a head's seven tokens take half of one."""
    times = {(b, w): (1 + row * (b * w - 1)) / 1e3 for b in (1, 4, 8) for w in WIDTHS}
    packed = {(4, 16): times[4, 4], (8, 16): times[8, 2], (8, 32): times[8, 4], **(more or {})}
    return RoundCosts(PassTable(times, padded=True, packed=packed), {"block": PassTable({(1, 1): 0.5e-3 / 7})})


def sharing() -> Sharing:
    return Sharing(frozenset({1}), costs(), WIDTHS)


def test_only_lengths_that_a_packed_pass_takes_at_no_more_cost_gain():
    """Eight times 2 and 4 rows are 16 and 32; 48 go into none, and all seven tokens leave nothing out."""
    factors = sharing().factors(1, 8, 7)
    assert factors is not None
    assert [n for n, each in enumerate(factors, 1) if each > 1] == [1, 2, 3]
    assert factors[0] > factors[1] > factors[2]
    assert sharing().factors(0, 8, 7) is None
    assert sharing().factors(1, 1, 7) == [1.0] * 7
    five = sharing().factors(1, 5, 7)  # padded to eight: 32 rows take five of six each
    assert five is not None
    assert five[4] > 1


def test_what_came_of_shared_rows_is_what_they_are_believed_to_bring():
    known, expected = sharing(), np.arange(1.0, 8.0) * 40
    for _ in range(90):
        known.note(1, 3, accepted=1.14 * 120, expected=expected, drafts=128)
    factors = known.factors(1, 8, 7)
    assert factors is not None
    assert factors[2] == pytest.approx(1.14, abs=0.005)
    for _ in range(200):
        known.note(1, 3, accepted=60.0, expected=expected, drafts=128)
    assert (known.factors(1, 8, 7) or [9.0])[2] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_a_round_tells_what_each_shorter_length_would_have_brought(seed: int):
    """The rows are given out anew for every mean length, as before a round, and what came is cut to them."""
    rng = np.random.default_rng(seed)
    batch, width = int(rng.integers(1, 9)), 7
    stated = rng.integers(0, 6, (batch, width)) / 5  # many are equal
    room, came = rng.integers(0, width + 1, batch), rng.integers(0, width + 1, batch)
    drafts = torch.arange(batch * width).view(batch, width)
    accepted = []
    for length in range(1, width + 1):
        kept = share_tokens(drafts, torch.tensor(stated), torch.tensor(room), length * batch)
        accepted.append(float(np.minimum((kept >= 0).sum(1).numpy(), came).sum()))
    came = np.minimum(came, room)
    assert accepted_by_length(stated, [*room], [*came]).tolist() == accepted


def test_long_drafts_tell_what_short_ones_would_bring():
    """Six tokens a text are drafted in all rounds. Drafts that are sure are right, so that three tokens a text bring
    most of what six do; nothing but the confidences tells that."""
    wide, rng = costs(more={(8, 56): 0.003}), np.random.default_rng(3)
    known, untold = (Sharing(frozenset({1}), wide, WIDTHS) for _ in range(2))
    survival, brought = np.cumprod(np.full(8, 0.7)), np.zeros(8)
    for _ in range(400):
        sure = rng.random(8) < 0.5
        stated = np.where(sure[:, None], 0.95, 0.4) * np.ones((8, 8))
        came = np.where(sure, 6, rng.integers(0, 2, 8)).tolist()
        expected = 8 * survival.cumsum()
        known.note_stated(1, 6, stated, [8] * 8, came, expected)
        known.note(1, 6, sum(came), expected, 8)
        untold.note(1, 6, sum(came), expected, 8)
        brought += accepted_by_length(stated, [8] * 8, came)
    three, six = (tokens(known, n, survival) for n in (3, 6))
    assert six == pytest.approx(tokens(untold, 6, survival))
    assert six == pytest.approx(3.25, rel=0.04)
    assert three / six == pytest.approx(brought[2] / brought[5], rel=0.03)
    assert tokens(untold, 3, survival) < 0.95 * three


def tokens(known: Sharing, length: int, survival: np.ndarray) -> float:
    """Tokens a text that drafts of a mean length should have accepted."""
    factors = known.factors(1, 8, 8)
    assert factors is not None
    return float(survival[:length].sum()) * factors[length - 1]


def test_a_gain_makes_the_shorter_draft_the_better_one():
    survival = np.tile(np.power(0.8, np.arange(1.0, 8.0)), (8, 1))
    lengths = []
    for factors in (None, [1.3, 1.3, 1.3, 1.0, 1.0, 1.0, 1.0]):
        outlook = Outlook("block", survival, np.full(8, 7), True, (7,), sharing=factors)
        plan = choose_plan([outlook], costs(), WIDTHS)
        lengths.append(plan.lengths[0])
        expected = float(survival[0, : lengths[-1]].sum()) * (1 if factors is None else factors[lengths[-1] - 1])
        assert plan.tokens == pytest.approx(8 * (1 + expected))
    assert lengths == [5, 3]


def test_a_controller_learns_the_gain_of_rounds_that_were_shared():
    """Four of ten tokens at each position survive; of those that have a row every second one does."""
    made = Controller([BLOCK], costs(), WIDTHS)
    ids, rng = [*range(8)], np.random.default_rng(0)
    before = made._sharing.factors(0, 8, 7)
    plan = choose_plan([made._outlook(0, ids, np.full(8, 3))], made.costs, WIDTHS, least=0.0)
    assert plan.lengths == [3] * 8
    for _ in range(600):
        accepted = [int(n) for n in rng.geometric(0.4, 8) - 1]
        made.note(ids, range(8), plan, [3] * 8, [[min(n, 5) for n in accepted]], shared=True)
    after = made._sharing.factors(0, 8, 7)
    assert before is not None
    assert after is not None
    assert after[2] > 1.05  # tokens beyond the third of a draft are accepted, which drafts of three do not have
    other = Controller([BLOCK], costs(), WIDTHS)
    for _ in range(600):
        other.note(ids, range(8), plan, [3] * 8, [[min(int(n), 3) for n in rng.geometric(0.4, 8) - 1]])
    assert other._sharing.factors(0, 8, 7) == before  # nothing was shared
