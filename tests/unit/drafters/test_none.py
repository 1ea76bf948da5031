"""Plain decoding drafts nothing."""

from outrider.core.draft import EMPTY
from outrider.drafters.base import RoundView
from outrider.drafters.none import NoDraftConfig


def test_nothing_is_drafted(make, context):
    drafter = NoDraftConfig().build(context)
    assert drafter.propose(RoundView([make([1, 1, 1]), make([2])], [5, 0])) == [EMPTY, EMPTY]
    assert (drafter.traits.name, drafter.traits.max_tokens) == ("none", 0)
