"""`max_round_tokens` holds for rounds of drafts too: the memory plan (target/memory.py, Work.rows) counts on it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
from plain_decoding import request
from testbed import CONTEXT, TOKENIZER, VOCAB

from outrider.core.sequence import Span
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.drafters import liar
from outrider.testing.toy import ToyRunner
from outrider.verify.base import make_verifier


class Counting(ToyRunner):
    """Notes how many tokens each pass reads."""

    def __init__(self) -> None:
        super().__init__(VOCAB, context=CONTEXT)
        self.read: list[int] = []

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self.read.append(sum(span.width for span in spans))
        return super().score(spans, after)


@pytest.mark.parametrize(("batch", "most"), [(3, 4), (8, 9), (8, 20), (4, 4)])
def test_no_pass_reads_more_than_a_round_may(batch: int, most: int):
    target = Counting()
    limits = EngineLimits(max_batch=batch, max_round_tokens=most)
    tried = Engine(target, liar(VOCAB), make_verifier("seeded"), TOKENIZER, limits=limits)
    for i in range(batch):
        tried.submit(request([1 + i, 2], max_tokens=12, ignore_eos=True))
    while tried.busy:
        tried.step()
    assert max(target.read) <= most
