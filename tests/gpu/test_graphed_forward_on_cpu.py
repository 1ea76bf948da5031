"""Captured passes in Triton's interpreter, in float32: what replaces a graph runs its launches again.

Against the plain decoder and against chains drafted step by step. It takes a small part of what a
GPU is for; tests/unit/kernels/test_interpreted.py runs it where there is none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft
from outrider.core.draws import Draws
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import DrafterContext, RoundView
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.models.decoder import Decoder
from outrider.runners import graph_runner, graphed_chain, graphed_forward, graphed_prompt
from outrider.runners.base import ChainStart, Scores
from outrider.runners.cuda_graphs import BatchShape
from outrider.runners.device_state import DeviceState
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import synthetic_pair
from outrider.verify.seeded import SeededVerifier, accept_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="on a GPU test_graph_runner.py does this"),
]
VOCAB = 512


class Again:
    """Takes the place of a captured graph."""

    def __init__(self, work: Callable[[], None], pool: Any, name: str = "") -> None:
        self.work = work

    def replay(self) -> None:
        with torch.inference_mode():
            self.work()


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> NativeRunner:
    monkeypatch.setattr(graphed_forward, "PDL", False)
    monkeypatch.setattr(graph_runner, "capture", Again)
    monkeypatch.setattr(graphed_chain, "capture", Again)
    monkeypatch.setattr(graphed_prompt, "capture", Again)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    decoder = synthetic_pair("tiny", dtype=torch.float32, seed=3).draft
    made = NativeRunner(decoder, 2048, context=256)
    as_on_cuda(decoder)
    decoder.reserve(made.context)
    made.graphs, made.asynchronous = graph_runner.GraphRunner(made.model), True
    return made


def as_on_cuda(decoder: Decoder) -> None:
    """Norms whose weights are as they were given; on the CPU they take up the number of dimensions."""
    weights = decoder.weights
    for norm in (weights.norm, *(n for layer in weights.layers for n in (layer.attention_norm, layer.mlp_norm))):
        norm.weight, norm._scaled_eps = norm.weight / len(norm.weight) ** 0.5, None


def read(target: NativeRunner, count: int, drafts: list[Draft]) -> tuple[list[Span], torch.Tensor]:
    """Texts read by plain passes, each with a draft to score next, and what a plain pass says of them."""
    graphs, target.graphs = target.graphs, None
    spans = []
    for i in range(count):
        text = [(7 * i + 3 * n) % VOCAB for n in range(3 + 5 * i)]
        target.pool.open(i, text, str(i))
        assert target.pool.reserve(i, len(text) + 8)
        target.score([Span(i, 0, tuple(text))])
        spans.append(Span(i, len(text), (i + 1,), drafts[i]))
    plain = target.score(spans).logits
    target.graphs = graphs
    return spans, plain


def test_a_captured_pass_is_the_plain_one_and_knows_where_sequences_stand(target: NativeRunner):
    spans, plain = read(target, 3, [Draft((5, 6, 7)), EMPTY, Draft((8,))])
    got = target.score(spans)
    torch.testing.assert_close(got.logits, plain, rtol=1e-4, atol=1e-4)
    assert target.graphs is not None
    assert [*target.graphs.captured] == [BatchShape(4, 4)]
    state = target.advance(got, torch.tensor([5, 6, 100, 101, 200, 300, 301]))
    assert state is not None
    assert state.lengths.tolist() == [3 + 2 + 2, 8 + 2, 13 + 2]
    assert state.last.tolist() == [[6, 100], [2, 200], [3, 300]]


@pytest.mark.parametrize("kept", [False, True])
def test_prompts_are_read_as_by_a_plain_pass(target: NativeRunner, kept: bool):
    """Texts of several pages, one of them behind what is cached, and one whose logits nobody asks for."""
    graphs, texts = (
        target.graphs,
        [[(5 * i + 3 * n) % VOCAB for n in range(length)] for i, length in enumerate([40, 21, 7])],
    )
    assert graphs is not None
    if kept:
        target.keep_taps([1])
    for seq_id in range(6):  # the same three texts twice
        target.pool.open(seq_id, texts[seq_id % 3], str(seq_id))
        assert target.pool.reserve(seq_id, len(texts[seq_id % 3]))

    def spans(first: int) -> list[Span]:
        head = Span(first, 0, tuple(texts[0][:5]), wanted=False)
        target.score([head])
        rest = [Span(first + 1, 0, tuple(texts[1])), Span(first + 2, 0, tuple(texts[2]), wanted=False)]
        return [Span(first, 5, tuple(texts[0][5:])), *rest]

    target.graphs = None
    plain = target.score(spans(0))
    target.graphs = graphs
    assert graphs.prompts.score(spans(3)) is None  # nothing is captured yet
    assert [*graphs.prompts.capture((64, 128))] == [128, 64]
    got = graphs.prompts.score(spans(3))
    assert got is not None
    torch.testing.assert_close(got.logits, plain.logits, rtol=1e-4, atol=1e-4)
    pages = [target.pool.table(seq_id) for seq_id in range(6)]
    for group in target.model.groups:
        for cache in group:
            for i, text in enumerate(texts):
                slots = [
                    torch.tensor([table[p // 16] * 16 + p % 16 for p in range(len(text))]) for table in pages[i::3]
                ]
                torch.testing.assert_close(cache[:, slots[1]], cache[:, slots[0]], rtol=1e-4, atol=1e-4)
    drafting = spans(3)[0]._replace(draft=Draft((1, 2)))
    assert graphs.prompts.score([drafting]) is None
    many = [Span(3, 0, (1,), wanted=False)] * 5
    assert graphs.prompts.score(many) is None  # too many texts for 64 rows


def test_padding_of_a_draft_is_scored_and_never_accepted(target: NativeRunner):
    """Read as token 0, which the target chooses there: accepted on the device, the host would not know of it."""
    block = HostCopy(torch.tensor([[5, -1, -1], [-1, -1, -1], [7, 0, 8]]))
    drafts = [Draft(DeviceRow(block, row, 3, padded=True), known=True) for row in range(3)]
    spans, plain = read(target, 3, [Draft((5, 0, 0)), Draft((0, 0, 0)), Draft((7, 0, 8))])
    got = target.score([span._replace(draft=draft) for span, draft in zip(spans, drafts, strict=True)])
    torch.testing.assert_close(got.logits, plain, rtol=1e-4, atol=1e-4)
    choices = [[5, 0, 0, 9], [0, 0, 0, 9], [7, 0, 8, 9]]
    state = target.advance(got, torch.tensor(choices).flatten())
    assert state is not None
    assert state.accepted is not None
    assert state.tokens is not None
    assert state.accepted.tolist() == [1, 0, 3]
    assert state.lengths.tolist() == [3 + 2 + 1, 8 + 2, 13 + 2 + 3]
    assert state.last.tolist() == [[5, 0], [2, 0], [8, 9]]
    assert [row[: 1 + n] for row, n in zip(state.tokens.tolist(), [1, 0, 3], strict=True)] == [
        [1, 5],
        [2],
        [3, 7, 0, 8],
    ]
    for draft, own, accepted in zip(drafts, choices, [1, 0, 3], strict=True):
        assert accept_draft(draft, own).accepted == accepted  # as the host sees it


@pytest.mark.parametrize("packed", [False, True])
def test_a_pass_makes_the_choices_that_the_verifier_makes_of_its_logits(target: NativeRunner, packed: bool):
    """And knows where they leave its sequences: chains shorter than the pass is wide, padding, greedy and sampled."""
    graphs = target.graphs
    assert graphs is not None
    if packed:
        graphs._packed = [BatchShape(4, 4, packed=8)]
    block = HostCopy(torch.tensor([[9, -1]]))
    drafts = [Draft((5, 6, 7)), EMPTY, Draft(DeviceRow(block, 0, 2, padded=True), known=True)]
    spans, plain = read(target, 3, [*drafts[:2], Draft((9, 0))])
    seqs = [
        Sequence(
            id=span.seq_id,
            tokens=[1] * span.start + [*span.tokens],
            prompt_len=span.start,
            params=SamplingParams(temperature=temperature, seed=seed),
            seed=seed,
        )
        for span, temperature, seed in zip(spans, (0.7, 0.0, 1.3), (1, 2, (1 << 64) - 3), strict=True)
    ]
    verifier = SeededVerifier()
    draws = verifier.draws(seqs)
    assert draws is not None
    spans = [span._replace(draft=draft) for span, draft in zip(spans, drafts, strict=True)]
    left_out = target.score_and_choose(spans, None, draws)
    choices = None if left_out.choices is None else left_out.choices.tolist()
    assert not len(left_out.logits)
    got = target.score_and_choose(spans, None, replace(draws, logits=True))
    assert [*graphs.captured] == [BatchShape(4, 4, packed=8 if packed else 0)]
    torch.testing.assert_close(got.logits, plain, rtol=1e-4, atol=1e-4)
    assert got.choices is not None
    expected = verifier.decide(seqs, [*drafts[:2], Draft((9, 0))], got.logits)
    assert expected is not None
    assert got.choices.tolist() == expected.list() == choices
    state, by_host = target.advance(got, got.choices), target.advance(got, got.choices.clone())
    assert state is not None
    assert by_host is not None
    for one, other in ((state.lengths, by_host.lengths), (state.last, by_host.last)):
        assert one.tolist() == other.tolist()
    assert state.accepted is not None
    assert state.accepted.tolist() == by_host.accepted.tolist()


@pytest.mark.parametrize("taps", [(), (0, 1)])
@pytest.mark.parametrize("prompts", [(20,), (3,), (20, 30), (40,), (40, 20)], ids=str)
def test_once_captured_rounds_of_any_widths_capture_nothing_and_are_scored_as_plainly(
    target: NativeRunner, prompts: tuple[int, ...], taps: tuple[int, ...]
):
    """Decoding sequences with drafts beside prompts: one short one, several, and long ones."""
    plain = NativeRunner(target.model.decoder, 2048, context=256)
    scores = []
    for runner in (plain, target):
        runner.tap(taps)
        list(runner.capture(3, 2))
        made = 0 if runner.graphs is None else len(runner.graphs.captured)
        spans, _ = read(runner, 2, [Draft((5,)), EMPTY])
        for i, length in enumerate(prompts, start=10):
            runner.pool.open(i, (), str(i))
            assert runner.pool.reserve(i, length)
            spans.insert(1, Span(i, 0, tuple((5 * i + n) % VOCAB for n in range(length))))
        scores.append(runner.score(spans))
        assert runner.graphs is None or len(runner.graphs.captured) == made
    torch.testing.assert_close(scores[1].logits, scores[0].logits, rtol=1e-4, atol=1e-4)
    for own, expected in zip(scores[1].features or (), scores[0].features or (), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


TREES = [
    Draft((8, 9)),
    EMPTY,
    Draft((5, 6, 7, 8, 9, 11), (-1, -1, 0, 1, 1, 3)),  # 6, 8, 11 are accepted: nodes 1, 3, 5
]
CHOICES = [8, -1, 41, 42, 6, 50, 8, 51, 11, 52, 53]  # after 8 nothing can be chosen: it is read again


@pytest.mark.parametrize(
    ("taps", "on_device", "packed"),
    [((), False, 0), ((), True, 12), ((0, 1), False, 12), ((0, 1), True, 0)],
)
def test_trees_are_scored_accepted_and_followed_as_on_the_plain_path(
    target: NativeRunner, taps: tuple[int, ...], on_device: bool, packed: int, monkeypatch: pytest.MonkeyPatch
):
    """Chains and an empty draft beside a tree that crosses a page, and a round behind it from the state alone.

    packed: rows of a pass that takes the rounds' 11 and 8.
    """
    plain = NativeRunner(target.model.decoder, 2048, context=256)
    replayed = note_shapes(target, packed, monkeypatch)
    drafts = [device_draft(draft) for draft in TREES] if on_device else TREES
    scores, states, behind = [], [], []
    for runner in (plain, target):
        runner.tap(taps)
        if taps:
            runner.keep_taps(taps)
        spans, _ = read(runner, 3, drafts)
        scores.append(runner.score(spans))
        states.append(runner.advance(scores[-1], torch.tensor(CHOICES)))
        scores[-1] = copied(scores[-1])
        unknown = [span._replace(start=0, tokens=(0,), draft=draft) for span, draft in zip(spans, BEHIND, strict=True)]
        behind.append(copied(runner.score(unknown, states[-1])))
    assert [shape.packed for shape in replayed] == [packed] * 2
    for one, other in (scores, behind):
        torch.testing.assert_close(other.logits, one.logits, rtol=1e-4, atol=1e-4)
        for ours, theirs in zip(other.features or (), one.features or (), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert scores[1].positions() == [4, 5, 6, 9, 14, 15, 15, 16, 16, 16, 17]
    assert behind[1].positions() == [5, 6, 10, 11, 12, 18, 19, 19]
    for state in states:
        assert state is not None
        assert state.lengths.tolist() == [5, 10, 18]
        assert state.last.tolist() == [[1, 8], [2, 42], [11, 53]]
    compare_kept(target, plain, states)


def note_shapes(target: NativeRunner, packed: int, monkeypatch: pytest.MonkeyPatch) -> list[BatchShape]:
    """The shapes of the captured passes that are replayed from now on, one of so many packed rows among them."""
    graphs, shapes = target.graphs, []
    assert graphs is not None
    graphs._packed = [BatchShape(4, 8, packed=packed)] if packed else []
    chosen = graphs.shape_of
    monkeypatch.setattr(graphs, "shape_of", lambda spans, **how: shapes.append(chosen(spans, **how)) or shapes[-1])
    return shapes


def test_chains_of_different_lengths_go_by_their_rows_alone(target: NativeRunner, monkeypatch: pytest.MonkeyPatch):
    """11 rows of at most 7 go into a pass of 16, not of 4 x 8."""
    drafts = [Draft((5, 6, 7, 8, 9, 10)), EMPTY, Draft((8, 9))]
    spans, plain = read(target, 3, [device_draft(each) for each in drafts])
    replayed = note_shapes(target, 16, monkeypatch)
    got = target.score(spans)
    torch.testing.assert_close(got.logits, plain, rtol=1e-4, atol=1e-4)
    assert replayed == [BatchShape(4, 8, packed=16)]
    state = target.advance(got, torch.tensor([5, 6, 7, 99, 1, 1, 1, 200, 8, 9, 301]))
    assert state is not None
    assert state.lengths.tolist() == [3 + 2 + 3, 8 + 2, 13 + 2 + 2]
    assert state.last.tolist() == [[7, 99], [2, 200], [9, 301]]


BEHIND = [Draft((3,)), Draft((1, 2)), Draft((1, 2), (-1, -1))]


def device_draft(draft: Draft) -> Draft:
    """The same draft, its tokens and parents on the device."""

    def row(values: Any) -> DeviceRow:
        return DeviceRow(HostCopy(torch.tensor([[*values, 99, 99]])), 0, len(values))

    parents = None if draft.parents is None else row(draft.parents)
    return replace(draft, tokens=row(draft.tokens), parents=parents, known=True)


def copied(scores: Scores) -> Scores:
    """As it is now: the next pass writes to the same place."""
    features = None if scores.features is None else [each.clone() for each in scores.features]
    places = [] if scores.positions is None else scores.positions().tolist()
    return replace(scores, features=features, positions=lambda: places)


def compare_kept(target: NativeRunner, plain: NativeRunner, states: list[Any]) -> None:
    """The same keys, values and tapped outputs, of the tokens that were kept."""
    theirs, ours = states
    for i, length in enumerate(ours.lengths.tolist()):
        slots = [[r.pool.table(i)[p // 16] * 16 + p % 16 for p in range(length - 1)] for r in (plain, target)]
        for one, other in zip(plain.model.groups[0], target.model.groups[0], strict=True):
            torch.testing.assert_close(other[:, slots[1]], one[:, slots[0]], rtol=1e-4, atol=1e-4)
        assert_same_kept(target, plain, slots)
        if ours.features is not None:
            kept = 1 + int(ours.accepted[i])
            assert kept == 1 + int(theirs.accepted[i])
            assert ours.tokens[i, :kept].tolist() == theirs.tokens[i, :kept].tolist()
            torch.testing.assert_close(ours.features[i, :kept], theirs.features[i, :kept], rtol=1e-4, atol=1e-4)


def assert_same_kept(target: NativeRunner, plain: NativeRunner, slots: list[list[int]]) -> None:
    """The same tokens and tapped outputs in the pages, at these slots of the plain runner and of the other."""
    theirs, ours = plain.model.kept, target.model.kept
    assert (theirs is None) == (ours is None) == (not plain.model.taps)
    if theirs is not None and ours is not None:
        assert ours.tokens[slots[1]].tolist() == theirs.tokens[slots[0]].tolist()
        torch.testing.assert_close(ours.features[slots[1]], theirs.features[slots[0]], rtol=1e-4, atol=1e-4)


def test_room_made_later_leaves_what_was_captured_alone(target: NativeRunner):
    """And where rows exceed the room a batch is halved, after which only the host knows the state of its sequences."""
    graphs = target.graphs
    assert graphs is not None
    graphs.max_rows = 8
    spans, plain = read(target, 3, [Draft((5, 6, 7)), EMPTY, Draft((8,))])
    halves = target.score(spans)
    assert halves.handle is None
    assert {shape.rows for shape in graphs.captured} == {4}
    before = {id(made.buffers) for made, _ in graphs.captured.values()}
    graphs.make_room([BatchShape(4, 4)])
    whole, again = target.score(spans), target.score(spans[:1])
    assert id(graphs.captured[BatchShape(4, 4)][0].buffers) not in before
    assert target.advance(again, again.logits.argmax(-1)) is not None
    assert torch.equal(again.logits, halves.logits[:4])
    for each in (halves, whole):
        torch.testing.assert_close(each.logits, plain, rtol=1e-4, atol=1e-4)


def test_a_long_prompt_that_is_pinned_returns_the_outputs_of_all_its_tokens(target: NativeRunner):
    """It is read in several passes; its pages hold them too."""
    plain = NativeRunner(target.model.decoder, 2048, context=256)
    target.graphs = graph_runner.GraphRunner(target.model, pinned=True)
    text = [(7 * n) % VOCAB for n in range(35)]
    features = []
    for runner in (plain, target):
        runner.tap((0, 1))
        runner.keep_taps((0, 1))
        runner.pool.open(0, text)
        assert runner.pool.reserve(0, len(text))
        (own,) = runner.score([Span(0, 0, tuple(text))]).features or ()
        assert len(own) == 35
        features.append(own.clone())
        slots = [runner.pool.table(0)[place // 16] * 16 + place % 16 for place in range(35)]
        assert runner.model.kept is not None
        assert runner.model.kept.tokens[slots].tolist() == text
        torch.testing.assert_close(runner.model.kept.features[slots], own, rtol=0, atol=0)
    torch.testing.assert_close(features[1], features[0], rtol=1e-4, atol=1e-4)


def test_a_round_behind_another_knows_its_positions_where_it_is_scored_in_halves(target: NativeRunner):
    """The host is a round behind: noise is by position, which only the device knows then."""
    graphs = target.graphs
    assert graphs is not None
    graphs.max_rows = 8
    spans, _ = read(target, 3, [EMPTY] * 3)
    state = target.advance(target.score(spans), torch.tensor([7, 8, 9]))
    drafts = [Draft((5, 6, 7)), Draft((8, 9), (-1, -1)), EMPTY]
    known = [Span(i, s.start + 1, (7 + i,), draft) for i, (s, draft) in enumerate(zip(spans, drafts, strict=True))]
    halves = target.score([span._replace(start=0, tokens=(0,)) for span in known], state)
    assert halves.handle is None
    assert halves.positions is not None
    assert halves.positions().tolist() == [5, 6, 7, 8, 10, 11, 11, 15]
    target.graphs = None
    torch.testing.assert_close(halves.logits, target.score(known).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab", [0, 256])
def test_chains_drafted_at_once_are_those_drafted_step_by_step(target: NativeRunner, vocab: int):
    """The first token by the whole head, those after it by the reduced one."""
    context = DrafterContext(vocab_size=VOCAB, context=256)
    model = DraftModel(target, context, DraftModelConfig(model="-", k=3, vocab=vocab))
    params = SamplingParams(temperature=1.0, seed=1)
    seqs = [Sequence(i, [3 + i, 300 + i, 7, 9], 4, params, i) for i in range(2)]
    told = [list(draft.tokens) for draft in model.propose(RoundView(seqs, [3, 3])) or ()]
    target.graphs = None
    target.model.heads.size = 0
    expected = [[*draft.tokens] for draft in fresh(model, seqs, 1)]
    target.model.heads.size = vocab
    longer = [Sequence(s.id, [*s.tokens, *first], 4, params, s.seed) for s, first in zip(seqs, expected, strict=True)]
    for chain, draft in zip(expected, fresh(model, longer, 2), strict=True):
        chain += draft.tokens
    assert told == expected
    if model._vocab is not None:
        said = set(model._vocab.tokens)
        assert {token for chain in told for token in chain[1:]} <= said
        assert not {chain[0] for chain in told} <= said


def test_chains_and_passes_behind_a_state_are_those_of_texts_that_the_host_knows(target: NativeRunner):
    """Drafts of several blocks, and of the host, behind a round; tokens that only the target has are capped."""
    spans, _ = read(target, 3, [EMPTY] * 3)
    lengths, last = [span.start + 2 for span in spans], [(i + 1, token) for i, token in enumerate((7, VOCAB + 9, 5))]
    starts = [ChainStart(s.seq_id, seed=s.seq_id, temperature=0.7) for s in spans]
    state = DeviceState(torch.tensor(lengths), torch.tensor(last))
    chains = [list(chain) for chain in target.draft_chains(starts, 3, state) or ()]
    capped = [(one, min(other, VOCAB - 1)) for one, other in last]
    known = [replace(s, length=n, last=two) for s, n, two in zip(starts, lengths, capped, strict=True)]
    assert chains == [list(chain) for chain in target.draft_chains(known, 3) or ()]
    block, other = HostCopy(torch.tensor([chains[2], chains[0]])), HostCopy(torch.tensor([[9, 8, 7, 6]])[:, 1:])
    tokens = [DeviceRow(block, 1, 3), (11, 12), DeviceRow(other, 0, 2)]
    drafts = [Draft(each, known=isinstance(each, DeviceRow)) for each in tokens]
    unknown = [Span(s.seq_id, 0, (0,), draft) for s, draft in zip(spans, drafts, strict=True)]
    scored = target.score(unknown, state).logits
    written = [
        Span(s.seq_id, n - 1, (two[1],), Draft(tuple(draft.tokens)))
        for s, n, two, draft in zip(spans, lengths, capped, drafts, strict=True)
    ]
    assert torch.equal(scored, target.score(written).logits)


def fresh(model: DraftModel, seqs: list[Sequence], steps: int) -> list[Draft]:
    """Drafted step by step, nothing of the texts being cached."""
    for seq in seqs:
        model.forget(seq)
        assert model.cache.make_room(seq, steps) == steps
    return model._chains(seqs, [steps] * len(seqs))


def chosen(scores: Scores) -> torch.Tensor:
    assert scores.choices is not None
    return scores.choices


@pytest.mark.parametrize("k", [2, 3])  # 3 rows in a pass of 4, and 4
def test_a_repeated_pass_is_the_one_launched_anew(target: NativeRunner, k: int):
    count = 2
    drafts = torch.arange(count * k).view(count, k) * 7 % VOCAB
    spans, _ = read(target, count, [EMPTY] * count)
    assert all(target.pool.reserve(span.seq_id, 64) for span in spans)
    spans = [span._replace(draft=Draft(DeviceRow(HostCopy(drafts), i, k), known=True)) for i, span in enumerate(spans)]
    draws = Draws(list(range(count)), [1.0] * count, False)

    def choices(rounds: int, *, repeats: bool) -> tuple[list[list[int]], int]:
        scores, again = target.score_and_choose(spans, None, draws), 0
        told = [chosen(scores).tolist()]
        for _ in range(rounds - 1):
            state = target.advance(scores, chosen(scores))
            assert state is not None
            if repeats and target.can_repeat(scores, state):
                again += 1
                scores = target.repeat(scores)
            else:
                scores = target.score_and_choose(spans, state, draws)
            told.append(chosen(scores).tolist())
        return told, again

    told, again = choices(4, repeats=True)
    assert again > 0
    assert told == choices(4, repeats=False)[0]


@pytest.mark.parametrize("turned", [False, True])
def test_a_repeated_pass_reads_the_drafts_that_are_there_now(target: NativeRunner, turned: bool):
    """Drafts that are not side by side in memory are copied for each pass: no such pass is repeated."""
    count, k = 2, 3
    base = torch.zeros((k, count) if turned else (count, k), dtype=torch.int64)
    drafts = base.t() if turned else base
    read_spans, _ = read(target, count, [EMPTY] * count)
    assert all(target.pool.reserve(span.seq_id, 64) for span in read_spans)
    draws = Draws(list(range(count)), [0.0] * count, False)

    def spans() -> list[Span]:
        copy = HostCopy(drafts)
        return [s._replace(draft=Draft(DeviceRow(copy, i, k), known=True)) for i, s in enumerate(read_spans)]

    def choices(*, repeats: bool) -> tuple[list[list[int]], int]:
        base.fill_(1)
        scores, again = target.score_and_choose(spans(), None, draws), 0
        told = [chosen(scores).tolist()]
        for number in range(3):
            state = target.advance(scores, chosen(scores))
            assert state is not None
            base.fill_(20 + number)
            if repeats and target.can_repeat(scores, state):
                again += 1
                scores = target.repeat(scores)
            else:
                scores = target.score_and_choose(spans(), state, draws)
            told.append(chosen(scores).tolist())
        return told, again

    told, again = choices(repeats=True)
    assert (again > 0) != turned
    assert told == choices(repeats=False)[0]
