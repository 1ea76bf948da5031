"""Sequences and rounds without an engine: the text to come is known, so the verdict is too."""

import itertools

import pytest

from outrider.core.draft import Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext, RoundView

_ids = itertools.count()


@pytest.fixture
def make():
    """make(tokens, prompt_len=..., prediction=..., salt=...) -> Sequence with an id of its own."""

    def make_sequence(tokens, prompt_len=0, **fields):
        return Sequence(next(_ids), list(tokens), prompt_len, SamplingParams(), 0, **fields)

    return make_sequence


@pytest.fixture
def context():
    return DrafterContext(vocab_size=1000, context=8192)


@pytest.fixture
def play():
    """play(drafter, seq, coming) runs rounds until `coming` is committed; returns the drafts made."""

    def run(drafter, seq, coming):
        text = [*seq.tokens, *coming]
        drafts = []
        while len(seq.tokens) < len(text):
            (draft,) = drafter.propose(RoundView([seq], [drafter.traits.max_tokens]))
            node, path = -1, []
            for token in text[len(seq.tokens) : -1]:
                child = next((c for c in draft.children(node) if draft.tokens[c] == token), None)
                if child is None:
                    break
                node = child
                path.append(node)
            committed = text[len(seq.tokens) : len(seq.tokens) + len(path) + 1]
            seq.tokens += committed
            drafter.observe([seq], [draft], [Verdict(tuple(committed), tuple(path))])
            drafts.append(draft)
        return drafts

    return run
