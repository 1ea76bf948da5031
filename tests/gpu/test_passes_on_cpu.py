"""Recorded passes in Triton's interpreter, in float32: what stands for a graph runs its launches again.

Against the plain decoder and against chains drafted step by step. It takes a small part of what a
GPU is for; tests/unit/kernels/test_interpreted.py runs it where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import DrafterContext
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.models.decoder import Decoder
from outrider.runners import graph_runner, graphed_chain, graphed_forward
from outrider.runners.graphed_forward import BatchShape
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import synthetic_pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU test_captured.py does this"),
]
VOCAB = 512


class Again:
    """Stands for a recorded graph."""

    def __init__(self, work: Callable[[], None], pool: Any) -> None:
        self.work = work

    def replay(self) -> None:
        with torch.inference_mode():
            self.work()


class NearInputs:
    """Stands for `PinnedInputs`: the numbers need no copy."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.ints = torch.zeros(size, dtype=torch.int64)

    def array(self) -> np.ndarray:
        return self.ints.numpy()

    def send(self) -> None:
        """They are there."""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> NativeRunner:
    monkeypatch.setattr(graphed_forward, "PDL", False)
    monkeypatch.setattr(graphed_forward, "PinnedInputs", NearInputs)
    monkeypatch.setattr(graphed_chain, "PinnedInputs", NearInputs)
    monkeypatch.setattr(graph_runner, "capture", Again)
    monkeypatch.setattr(graphed_chain, "capture", Again)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    decoder = synthetic_pair("tiny", dtype=torch.float32, seed=3).draft
    made = NativeRunner(decoder, 2048, context=256)
    as_on_cuda(decoder)
    decoder.reserve(made.context)
    made._captured, made.launches = graph_runner.GraphRunner(made), True
    return made


def as_on_cuda(decoder: Decoder) -> None:
    """Norms whose weights are as they were given; on the CPU they take up the number of dimensions."""
    weights = decoder.weights
    for norm in (weights.norm, *(n for layer in weights.layers for n in (layer.attention_norm, layer.mlp_norm))):
        norm.weight, norm._least = norm.weight / len(norm.weight) ** 0.5, None


def read(target: NativeRunner, count: int, drafts: list[Draft]) -> tuple[list[Span], torch.Tensor]:
    """Texts read by plain passes, each with a draft to score next, and what a plain pass says of them."""
    recorder, target._captured = target._captured, None
    spans = []
    for i in range(count):
        text = [(7 * i + 3 * n) % VOCAB for n in range(3 + 5 * i)]
        target.pool.open(i, text, str(i))
        assert target.pool.reserve(i, len(text) + 8)
        target.score([Span(i, 0, tuple(text))])
        spans.append(Span(i, len(text), (i + 1,), drafts[i]))
    plain = target.score(spans)
    target._captured = recorder
    return spans, plain


def test_a_recorded_pass_is_the_plain_one_and_knows_where_texts_stand(target: NativeRunner):
    spans, plain = read(target, 3, [Draft((5, 6, 7)), EMPTY, Draft((8,))])
    got = target.score(spans)
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)
    assert target.captured is not None
    assert [*target.captured.recorded] == [BatchShape(4, 4)]
    standing = target.stand(torch.tensor([5, 6, 100, 101, 200, 300, 301]))
    assert standing is not None
    assert standing.lengths.tolist() == [3 + 2 + 2, 8 + 2, 13 + 2]
    assert standing.last.tolist() == [[6, 100], [2, 200], [3, 300]]


def test_room_made_later_leaves_what_was_recorded_alone(target: NativeRunner):
    """And where rows exceed the room a batch is halved, after which only the host can say where texts stand."""
    recorder = target.captured
    assert recorder is not None
    recorder.most_rows = 8
    spans, plain = read(target, 3, [Draft((5, 6, 7)), EMPTY, Draft((8,))])
    halves = target.score(spans)
    assert target.stand(halves.argmax(-1)) is None
    assert {shape.rows for shape in recorder.recorded} == {4}
    recorder.make_room([BatchShape(4, 4)])
    assert {id(made.arena) for made, _ in recorder.recorded.values()}.isdisjoint({id(recorder.arena)})
    whole, again = target.score(spans), target.score(spans[:1])
    assert BatchShape(4, 4) in recorder.recorded
    assert target.stand(again.argmax(-1)) is not None
    assert torch.equal(again, halves[:4])
    for each in (halves, whole):
        torch.testing.assert_close(each, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab", [0, 256])
def test_chains_drafted_at_once_are_those_drafted_step_by_step(target: NativeRunner, vocab: int):
    """The first guess by the whole head, those after it by the narrow one."""
    setting = DrafterContext(vocab_size=VOCAB, context=256)
    model = DraftModel(target, setting, DraftModelConfig(model="-", k=3, vocab=vocab))
    params = SamplingParams(temperature=1.0, seed=1)
    seqs = [Sequence(i, [3 + i, 300 + i, 7, 9], 4, params, i) for i in range(2)]
    told = [list(draft.tokens) for draft in model._at_once(seqs, [3, 3]) or ()]
    target._captured = None
    target.heads.width = 0
    expected = [[*draft.tokens] for draft in fresh(model, seqs, 1)]
    target.heads.width = vocab
    longer = [Sequence(s.id, [*s.tokens, *first], 4, params, s.seed) for s, first in zip(seqs, expected, strict=True)]
    for chain, draft in zip(expected, fresh(model, longer, 2), strict=True):
        chain += draft.tokens
    assert told == expected
    if model._frequent is not None:
        said = set(model._frequent.tokens)
        assert {token for chain in told for token in chain[1:]} <= said
        assert not {chain[0] for chain in told} <= said


def fresh(model: DraftModel, seqs: list[Sequence], steps: int) -> list[Draft]:
    """Drafted step by step, nothing of the texts being cached."""
    for seq in seqs:
        model.forget(seq)
    return model._chains(seqs, [steps] * len(seqs))
