"""The outputs of tapped layers: those of Transformers, for prompts, chunks and drafts, returned and kept in pages."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance_models import make_model, save, transformers_world
from plain_decoding import assert_same, request, run
from test_cancellation import run_with_cancels
from test_trees_in_flight import AsyncNativeRunner, TreesAhead, answers_of
from testbed import TOKENIZER, VOCAB, Testbed
from torch import Tensor

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import TargetPass
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.models.load import load_decoder
from outrider.runners.device_state import DeviceState
from outrider.runners.native import NativeRunner
from outrider.testing.drafters import ScriptedDrafter, random_trees
from outrider.verify.base import make_verifier
from outrider.verify.seeded import accept_draft, drop_missing_token

PAGE = 8
CLOSE = 1e-4
TEXT = [int(t) for t in torch.randint(1, VOCAB, (80,), generator=torch.Generator().manual_seed(3))]
TREE = Draft((5, 6, 7, 8, 9, 11), (-1, -1, 0, 1, 1, 3))


class Model:
    """A tiny model, as Transformers runs it and as the package does."""

    def __init__(self, family: str, folder: Any) -> None:
        self.theirs = make_model(family)
        self.decoder = load_decoder(save(self.theirs, folder), device="cpu")
        self.world = transformers_world(self.theirs)

    def runner(self, taps: Seq[int] = (0, 1), kind: type[NativeRunner] = NativeRunner) -> NativeRunner:
        made = kind(self.decoder, 512, page_size=PAGE)
        made.tap(taps)
        if taps:
            made.keep_taps(taps)
        return made

    @torch.inference_mode()
    def features(self, text: Seq[Token], taps: Seq[int] = (0, 1)) -> Tensor:
        """[len(text), taps * hidden]; Transformers returns the last layer's outputs after the final norm."""
        out = self.theirs(input_ids=torch.tensor([list(text)]), use_cache=False, output_hidden_states=True)
        return torch.cat([out.hidden_states[layer + 1][0] for layer in taps], -1)

    @torch.inference_mode()
    def comparable(self, ours: Tensor, taps: Seq[int] = (0, 1)) -> Tensor:
        """Our outputs [..., taps * hidden], the last layer's after the final norm."""
        last, parts = len(self.decoder.config.layers) - 1, ours.chunk(len(taps), -1)
        norm = self.theirs.model.norm
        return torch.cat([norm(x) if tap == last else x for tap, x in zip(taps, parts, strict=True)], -1)

    def assert_features(self, ours: Tensor, text: Seq[Token], rows: Seq[int], taps: Seq[int] = (0, 1)) -> None:
        """Ours [rows, taps * hidden] are those of these places of a text."""
        expected = self.features(text, taps)[list(rows)]
        torch.testing.assert_close(self.comparable(ours, taps), expected, rtol=CLOSE, atol=CLOSE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Model] = {}

    def model(family: str = "llama") -> Model:
        if family not in made:
            made[family] = Model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return model


def opened(runner: NativeRunner, seq_id: int, text: Seq[Token], salt: str = "") -> int:
    """Pages for a text and a draft; how much of it is cached."""
    cached = runner.pool.open(seq_id, text, salt)
    assert runner.pool.reserve(seq_id, len(text) + 12)
    return cached


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("taps", [(0, 1), (1, 0), (1,)], ids=str)
def test_they_are_those_of_transformers(models: Any, family: str, taps: tuple[int, ...]):
    """Of a prompt, of chunks of one beside it, and of a chain and a tree behind them."""
    model = models(family)
    runner = model.runner(taps)
    texts = [TEXT[:37], TEXT[20:50]]
    for i, text in enumerate(texts):
        opened(runner, i, text, str(i))
    (whole,) = runner.score([Span(0, 0, tuple(texts[0][:36]), wanted=False)]).features
    model.assert_features(whole, texts[0], range(36), taps)
    for start, end in ((0, 11), (11, 12), (12, 29)):
        span = Span(1, start, tuple(texts[1][start:end]), wanted=False)
        (chunk,) = runner.score([span]).features
        model.assert_features(chunk, texts[1], range(start, end), taps)
        runner.keep(span, (), trim=False)
    drafts = (Draft((3, 4, 5)), TREE)
    spans = [Span(i, len(t) - 1, (t[-1],), draft) for i, (t, draft) in enumerate(zip(texts, drafts, strict=True))]
    scores = runner.score(spans)
    for text, span, features in zip(texts, spans, scores.features, strict=True):
        assert len(features) == span.width
        model.assert_features(features[:1], text, [len(text) - 1], taps)
        for node in range(len(span.draft)):
            way = [*text, *(span.draft.tokens[n] for n in span.draft.path(node))]
            model.assert_features(features[node + 1 : node + 2], way, [len(way) - 1], taps)


def test_nothing_is_returned_where_nothing_is_tapped(models: Any):
    runner = models().runner(())
    opened(runner, 0, TEXT[:5])
    scores = runner.score([Span(0, 0, tuple(TEXT[:5]))])
    assert scores.features is None
    assert runner.advance_to(scores, [accept_draft(EMPTY, [4])]) is None
    assert runner.advance(scores, torch.tensor([4])) is None  # more than one token was read


def test_a_layer_that_is_not_there_is_refused(models: Any):
    with pytest.raises(ConfigError, match="no layer 2 to tap: this model's layers are 0 to 1"):
        models().runner((0, 2))


DRAFTS = {
    "chain, whole": (Draft((5, 6, 7)), [5, 6, 7, 20]),
    "chain, in part": (Draft((5, 6, 7)), [5, 9, 7, 20]),
    "chain, not at all": (Draft((5, 6, 7)), [9, 6, 7, 20]),
    "chain, nothing follows": (Draft((5, 6, 7)), [5, 6, -1, 20]),
    "tree": (TREE, [6, 3, 8, 3, 11, 3, 20]),
    "tree, in part": (TREE, [6, 3, 9, 3, 11, 3, 20]),
    "tree, not at all": (TREE, [1, 3, 9, 3, 11, 3, 20]),
    "tree, nothing follows": (TREE, [6, 3, 8, 3, -1, 3, 20]),
    "no draft": (EMPTY, [20]),
}


@pytest.mark.parametrize("names", [[name] for name in DRAFTS] + [list(DRAFTS)], ids=lambda names: ", ".join(names[:2]))
def test_the_state_is_the_same_by_choices_and_by_verdicts(models: Any, names: list[str]):
    """`advance` by the choices after every row, `advance_to` by what the host made of them."""
    model = models()
    states: list[DeviceState] = []
    runners = [model.runner(), model.runner()]
    for runner in runners:
        spans: list[Span] = []
        for i, name in enumerate(names):
            text = TEXT[i : i + 12 + i]
            opened(runner, i, text, str(i))
            runner.score([Span(i, 0, tuple(text[:-1]), wanted=False)])
            spans.append(Span(i, len(text) - 1, (text[-1],), DRAFTS[name][0]))
        scores = runner.score(spans)
        choices = [DRAFTS[name][1] for name in names]
        verdicts: Any = [
            drop_missing_token(accept_draft(span.draft, own), scores.logits, 0, None)  # pyright: ignore[reportArgumentType]
            for span, own in zip(spans, choices, strict=True)
        ]
        by_choices = runner is runners[0]
        flat = torch.tensor([token for own in choices for token in own])
        state = runner.advance(scores, flat) if by_choices else runner.advance_to(scores, verdicts)
        assert state is not None
        states.append(state)
        for span, verdict in zip(spans, verdicts, strict=True):
            assert runner.keep(span, verdict.path, compacted=by_choices) == span.start + 1 + verdict.accepted
    one, other = states
    assert one.lengths.tolist() == other.lengths.tolist()
    assert one.last.tolist() == other.last.tolist()
    assert one.accepted.tolist() == other.accepted.tolist() == [verdict.accepted for verdict in verdicts]
    for i, verdict in enumerate(verdicts):
        text, kept = TEXT[i : i + 12 + i], 1 + verdict.accepted
        assert one.tokens[i, :kept].tolist() == other.tokens[i, :kept].tolist() == [text[-1], *verdict.tokens[:-1]]
        assert torch.equal(one.features[i, :kept], other.features[i, :kept])
        whole = [*text, *verdict.tokens[:-1]]
        model.assert_features(one.features[i, :kept], whole, range(len(text) - 1, len(whole)))
        for runner in runners:
            assert_kept(model, runner, i, whole)
    compare_next_round(runners, states)


def compare_next_round(runners: list[NativeRunner], states: list[DeviceState]) -> None:
    """Each sequence reads on from its own length: the caches are the same."""
    logits = []
    for runner, state in zip(runners, states, strict=True):
        for i in range(len(state)):
            assert runner.pool.reserve(i, int(state.lengths[i]) + 2)
        logits.append(runner.score([Span(i, 0, (0,), Draft((1, 2))) for i in range(len(state))], state).logits)
    assert torch.equal(*logits)


def assert_kept(model: Model, runner: NativeRunner, seq_id: int, text: Seq[Token]) -> None:
    """The pages of a text hold its tokens and the outputs there."""
    kept, table = runner.model.kept, runner.pool.table(seq_id)
    assert kept is not None
    slots = [table[place // PAGE] * PAGE + place % PAGE for place in range(len(text))]
    assert kept.tokens[slots].tolist() == list(text)
    model.assert_features(kept.features[slots], text, range(len(text)))


@pytest.mark.parametrize("chunks", [[40], [3, 1, 4, 8, 1, 23], [7, 1, 7, 1, 7, 1, 16], [1] * 40, [9, 31]], ids=str)
def test_pages_hold_the_outputs_of_what_was_read(models: Any, chunks: list[int]):
    """Also those that another sequence begins on."""
    model = models()
    runner = model.runner()
    opened(runner, 0, TEXT[:40])
    start = 0
    for count in chunks:
        end = start + count
        span = Span(0, start, tuple(TEXT[start:end]), wanted=end == 40)
        scores = runner.score([span])
        if span.wanted:
            assert runner.advance_to(scores, [accept_draft(EMPTY, [TEXT[40]])]) is not None
        start = runner.keep(span, (), trim=False)
    runner.pool.publish(0, TEXT[:40], 40)
    assert_kept(model, runner, 0, TEXT[:40])
    longer = [*TEXT[:40], *TEXT[60:70]]
    assert opened(runner, 1, longer) == 40
    assert_kept(model, runner, 1, longer[:40])
    runner.score([Span(1, 40, tuple(longer[40:]), wanted=False)])
    assert_kept(model, runner, 1, longer)
    assert_kept(model, runner, 0, TEXT[:40])


def test_nothing_is_returned_of_what_is_only_kept(models: Any):
    """And other layers than those that are kept are not tapped besides."""
    model = models()
    runner = model.runner(())
    runner.keep_taps((1, 0))
    runner.tap(())
    opened(runner, 0, TEXT[:9])
    assert runner.score([Span(0, 0, tuple(TEXT[:9]))]).features is None
    assert runner.model.kept is not None
    slots = [runner.pool.table(0)[place // PAGE] * PAGE + place % PAGE for place in range(9)]
    model.assert_features(runner.model.kept.features[slots], TEXT[:9], range(9), (1, 0))
    with pytest.raises(ConfigError, match=r"layers \[1, 0\] of the target are tapped, and a second drafter"):
        runner.tap((0, 1))
    with pytest.raises(ConfigError, match="use drafters whose heads read the same layers"):
        runner.keep_taps((0,))


class Record:
    """A drafter's share in following the target: notes what it is shown of each text."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.traits = replace(self.traits, follows_target=True, taps=(0, 1))
        self.shown: dict[int, list[tuple[int, list[Token], Tensor]]] = {}
        """By sequence: the place of the first token, tokens, and their outputs."""
        self.texts: dict[int, list[Token]] = {}
        self.cancelled: set[int] = set()

    def process(self, work: TargetPass) -> None:
        row = 0
        for seq, span, features in zip(work.seqs, work.spans, work.scores.features, strict=True):
            shown = self.shown.setdefault(seq.id, [])
            read = len(span.tokens) - span.wanted  # one token and a draft: the state has it
            if read:
                shown.append((span.start, list(span.tokens[:read]), features[:read].clone()))
            if span.wanted:
                kept = 1 + int(work.state.accepted[row])
                tokens = work.state.tokens[row, :kept].tolist()
                shown.append((int(work.state.lengths[row]) - 1 - kept, tokens, work.state.features[row, :kept].clone()))
                row += 1
        assert row == (0 if work.state is None else len(work.state))

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self.texts[seq.id] = list(seq.tokens)
        if seq.finish == "cancelled":
            self.cancelled.add(seq.id)


class RecordingTrees(Record, ScriptedDrafter):
    """Drafts random trees once the host knows the text."""


class RecordingAhead(Record, TreesAhead):
    """Drafts trees from the device's state."""


def following(model: Model, kind: str, chunk: int) -> tuple[Engine, list[Request], Testbed]:
    """An engine whose drafter follows the target, what to ask it, and the judge."""
    runner = model.runner(kind=NativeRunner if kind == "waiting" else AsyncNativeRunner)
    world = Testbed(model.world, lambda _: runner, lambda _: runner)
    options = {"max_tokens": 40, "ignore_eos": True}
    asked = [request(TEXT[9 * i : 20 + 12 * i], temperature=0.5 * i, seed=i, **options) for i in range(3)]
    if kind == "ahead":
        drafter: Any = RecordingAhead(answers_of(world, asked), "mixed")
    else:
        drafter = RecordingTrees(random_trees(VOCAB).script)
    limits = EngineLimits(max_batch=3, max_round_tokens=chunk)
    verifier = make_verifier("seeded")
    return Engine(runner, drafter, verifier, TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits), asked, world


@pytest.mark.parametrize("chunk", [9, 512])
@pytest.mark.parametrize("kind", ["waiting", "in flight", "ahead"])
def test_a_drafter_that_follows_the_target_sees_every_token_once(models: Any, kind: str, chunk: int):
    """In order, with the outputs that Transformers says, however its rounds are launched."""
    model = models()
    tried, asked, world = following(model, kind, chunk)
    drafter: Any = tried.drafter
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, world.judged(each), tolerance=CLOSE)
    assert tried.stats.draft_failures == 0
    assert len(drafter.texts) == 3
    check_shown(model, drafter)


@pytest.mark.parametrize("chunk", [9, 512])
@pytest.mark.parametrize("kind", ["waiting", "in flight", "ahead"])
def test_so_it_does_with_texts_that_are_cancelled_in_flight(models: Any, kind: str, chunk: int):
    model = models()
    for seed in range(8):
        tried, asked, world = following(model, kind, chunk)
        told = run_with_cancels(tried, asked, random.Random(seed))
        for made, one, n in told.values():
            if one.finish != "cancelled":
                assert_same([one], [world.judged(made)[n]], tolerance=CLOSE)
        assert tried.stats.draft_failures == 0
        check_shown(model, tried.drafter)


def check_shown(model: Model, drafter: Any) -> None:
    for seq_id, text in drafter.texts.items():
        end = 0
        for place, tokens, outputs in drafter.shown.get(seq_id, ()):  # none of one that never began
            assert place == end
            end = place + len(tokens)
            count = len(text[place:end])  # a round that is cut off by the end of the text shows more
            assert tokens[:count] == text[place:end]
            model.assert_features(outputs[:count], text, range(place, place + count))
        assert end >= len(text) - 1 or seq_id in drafter.cancelled
