"""A draft token that alone begins a new block of rows is left out, and only where one sequence runs."""

from __future__ import annotations

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.testing.drafters import ScriptedDrafter
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier


def widths(block: int, draft: int, requests: int = 1, *, sampled: bool = False) -> set[int]:
    """Rows of the spans that were scored with a draft."""
    seen: set[int] = set()

    class Watched(ToyRunner):
        row_block = block

        def score(self, spans, after=None):
            seen.update(span.rows for span in spans if len(span.draft))
            return super().score(spans, after)

    def script(seq, budget: int) -> Draft:
        tokens = (1,) * min(draft, budget)
        return Draft(tokens, probs=torch.full((len(tokens), 64), 1 / 64, dtype=torch.float64) if sampled else None)

    drafter = ScriptedDrafter(script, max_tokens=draft)
    engine = Engine(Watched(), drafter, make_verifier("distribution" if sampled else "seeded"), ByteTokenizer())
    for i in range(requests):
        engine.submit(Request(prompt=(2, i), params=SamplingParams(max_tokens=40, ignore_eos=True)))
    for _ in range(8):
        engine.step()
    return seen


@pytest.mark.parametrize(("draft", "rows"), [(1, 2), (3, 4), (4, 4), (5, 6), (7, 8), (8, 8), (9, 10)])
def test_a_lone_last_token_is_left_out(draft: int, rows: int):
    assert widths(4, draft) == {rows}


def test_where_each_row_costs_the_same_nothing_is_left_out():
    assert widths(1, 4) == {5}


def test_together_rows_add_up_differently_and_nothing_is_left_out():
    assert widths(4, 4, requests=2) == {5}


def test_a_sampled_token_is_never_left_out():
    """It may have ended the draft because of its own chance; without it the text would be biased."""
    assert widths(4, 4, sampled=True) == {5}
