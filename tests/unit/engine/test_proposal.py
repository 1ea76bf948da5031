"""What a draft is offered for, where the host sees it before it is scored."""

from __future__ import annotations

import pytest
import torch

from outrider.control.review import Offer
from outrider.core.device_row import ConfidenceRow
from outrider.core.draft import EMPTY, Draft
from outrider.core.host_copy import HostCopy
from outrider.engine.proposal import offer_of

STATED = ConfidenceRow(HostCopy(torch.tensor([[0.5, 0.5, 0.25, 0.9]])), 0)


def test_a_chain_that_states_its_confidence_is_offered_token_by_token():
    offer = offer_of(Draft((7, 8, 9), expected=1.5, confidence=STATED), 1)
    assert offer == Offer(3, 1.5, pytest.approx([0.5, 0.25, 0.0625]))


@pytest.mark.parametrize(
    "draft",
    [
        Draft((7, 8, 9), expected=1.5),
        Draft((7, 8, 9), (-1, -1, 0), expected=1.5, confidence=STATED),
    ],
    ids=["nothing stated", "tree"],
)
def test_others_are_offered_as_far_as_planned(draft: Draft):
    assert offer_of(draft, 2) == Offer(2, 1.5)
    assert offer_of(draft, 5) == Offer(3, 1.5)


def test_a_sampled_draft_is_scored_whole_whatever_it_states():
    draft = Draft((7, 8, 9), probs=torch.ones(3, 10) / 10, expected=1.5, confidence=STATED)
    assert offer_of(draft, 2) == Offer(2, 1.5, whole=True)


def test_no_draft_is_no_offer():
    assert offer_of(EMPTY, 3) == Offer()
