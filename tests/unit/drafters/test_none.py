"""Plain decoding drafts nothing."""

from outrider.core.draft import EMPTY
from outrider.drafters.none import NoDraftConfig


def test_nothing_is_drafted(make, setting):
    drafter = NoDraftConfig().build(setting)
    assert drafter.propose([make([1, 1, 1]), make([2])], [5, 0]) == [EMPTY, EMPTY]
    assert (drafter.name, drafter.max_tokens) == ("none", 0)
