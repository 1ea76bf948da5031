"""Outputs of tapped layers on CUDA: captured passes return those of the plain pass; states and pages keep them."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from test_graph_runner import VOCAB, decoder, without_kernels
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Span
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.runners.native import NativeRunner
from outrider.verify.seeded import accept_draft

pytestmark = pytest.mark.gpu
TAPS = (0, 2, 1)
TREE = Draft((5, 6, 7, 8, 9, 11), (-1, -1, 0, 1, 1, 3))
DRAFTS = {
    "none": [EMPTY] * 3,
    "chains": [Draft((3, 4, 5)), EMPTY, Draft((7, 8, 9, 10, 11))],
    "trees": [TREE, Draft((3, 4)), TREE],
}
LENGTHS = (5, 62, 300)
PAGE = 16


def runner(pinned: bool = False) -> NativeRunner:
    made = NativeRunner(decoder(), 4096, pinned=pinned)
    made.tap(TAPS)
    made.keep_taps(TAPS)
    return made


def texts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def opened(made: NativeRunner) -> None:
    for i, text in enumerate(texts()):
        made.pool.open(i, text, str(i))
        assert made.pool.reserve(i, len(text) + 24)


def close(ours: Tensor, plain: Tensor) -> bool:
    return ours.shape == plain.shape and float((ours.float() - plain.float()).norm() / plain.float().norm()) < 2e-2


def prompts(drafts: Seq[Draft] | None = None) -> list[Span]:
    """The texts but for their last tokens; with drafts, the last tokens and these."""
    if drafts is None:
        return [Span(i, 0, tuple(text[:-1]), wanted=False) for i, text in enumerate(texts())]
    parts = enumerate(zip(texts(), drafts, strict=True))
    return [Span(i, len(text) - 1, (text[-1],), draft) for i, (text, draft) in parts]


def copied(scores: Scores) -> list[Tensor]:
    assert scores.features is not None
    return [each.clone() for each in scores.features]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_passes_return_what_the_plain_pass_returns(drafts: str, pinned: bool):
    """Prompts, chunks of them, and drafts; mixed in one call too. Pinned, long prompts are read in several passes."""
    made, plain = runner(pinned), runner()
    opened(made)
    opened(plain)
    spans = [prompts(), prompts(DRAFTS[drafts])]
    mixed = [spans[1][0], Span(1, 0, tuple(texts()[1])), Span(2, 290, tuple(texts()[2][290:]))]
    for part in (*spans, mixed):
        got = copied(made.score(part))
        with without_kernels(plain):
            expected = copied(plain.score(part))
        assert [len(each) for each in got] == [span.width for span in part]
        for ours, theirs in zip(got, expected, strict=True):
            assert close(ours, theirs)


def choices_of(spans: Seq[Span]) -> list[list[int]]:
    """The way to each draft's last node but one is chosen, and 90 follows it."""
    out: list[list[int]] = []
    for span in spans:
        path = span.draft.path(max(len(span.draft) - 2, -1))
        after = {parent: span.draft.tokens[node] for parent, node in zip((-1, *path), path, strict=False)}
        out.append([after.get(row, 90) for row in range(-1, len(span.draft))])
    return out


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_states_and_pages_keep_what_was_accepted(drafts: str, pinned: bool):
    """By the kernels at launch and by the host's verdicts: the same, and what a prompt with those tokens has."""
    states: list[DeviceState] = []
    runners = [runner(pinned), runner(pinned)]
    spans = prompts(DRAFTS[drafts])
    choices = choices_of(spans)
    verdicts = [accept_draft(span.draft, own) for span, own in zip(spans, choices, strict=True)]
    for made in runners:
        opened(made)
        made.score(prompts())
        scores = made.score(spans)
        flat = torch.tensor([token for own in choices for token in own], device="cuda")
        state = made.advance_to(scores, verdicts) if states else made.advance(scores, flat)
        assert state is not None
        for span, verdict in zip(spans, verdicts, strict=True):
            made.keep(span, verdict.path, compacted=not states)
        states.append(state)
    one, other = states
    assert one.lengths.tolist() == other.lengths.tolist()
    assert one.last.tolist() == other.last.tolist()
    assert one.accepted.tolist() == other.accepted.tolist() == [verdict.accepted for verdict in verdicts]
    plain = runner()
    opened(plain)
    for i, (text, verdict) in enumerate(zip(texts(), verdicts, strict=True)):
        kept, whole = 1 + verdict.accepted, [*text, *verdict.tokens[:-1]]
        assert one.tokens[i, :kept].tolist() == other.tokens[i, :kept].tolist() == whole[len(text) - 1 :]
        assert close(one.features[i, :kept], other.features[i, :kept])
        with without_kernels(plain):
            (expected,) = copied(plain.score([Span(i, 0, tuple(whole))]))
        assert close(one.features[i, :kept], expected[-kept:])
        for made in runners:
            kept_there, table = made.model.kept, made.pool.table(i)
            assert kept_there is not None
            slots = [table[place // PAGE] * PAGE + place % PAGE for place in range(len(whole))]
            assert kept_there.tokens[slots].tolist() == whole
            assert close(kept_there.features[slots], expected)
