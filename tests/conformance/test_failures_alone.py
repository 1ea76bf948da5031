"""What goes wrong with one request ends that request, says why, and leaves every other as it was."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product

import pytest
import torch
from drafter_cast import EVERYBODY
from plain_decoding import World, assert_same, plain, request, run, told_by
from testbed import CONTEXT, EOS, TOKENIZER, VOCAB
from torch import Tensor
from toy_world import TOY, WORLD, target

from outrider.core.draft import Draft
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence, Span
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import Request
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.drafters import ScriptedDrafter
from outrider.testing.toy import ToyRunner
from outrider.verify.base import make_verifier

everybody = pytest.mark.parametrize("drafter", EVERYBODY)
POISON = 13


class PoisonedToy(ToyRunner):
    """Says nothing but NaN once the poison is in the text; drafts included."""

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        scores = super().score(spans, after)
        rows = scores.logits.clone()
        at = 0
        for span in spans:
            end = span.start + len(span.tokens)
            text = [self.slots[self._slot(span.seq_id, p)] for p in range(end)]
            for node in range(-1, len(span.draft)) if span.wanted else ():
                way = [span.draft.tokens[n] for n in span.draft.path(node)]
                if POISON in (*text, *way):
                    rows[at] = float("nan")
                at += 1
        return replace(scores, logits=rows)


def _poisoned_logits(tokens: Seq[Token]) -> Tensor:
    clean = WORLD.logits_after(tokens)
    return torch.full_like(clean, float("nan")) if POISON in tokens else clean


POISONED = replace(WORLD, logits_after=_poisoned_logits)


def others(count: int = 4, **options: object) -> list[Request]:
    """Innocent requests; the poison is banned, so that no text comes upon it by itself."""
    return [
        request([i + 1, 2], max_tokens=15, temperature=0.4 * i, seed=i, banned_token_ids=(POISON,), **options)
        for i in range(count)
    ]


def on(drafter: str, requests: list[Request], made: ToyRunner | None = None) -> Engine:
    """An engine like `toy_world.engine`, on another target."""
    tried = TOY.engine(drafter, requests)
    return Engine(made or target(), tried.drafter, tried.verifier, TOKENIZER, eos_ids=TOKENIZER.eos_ids)


def finish_all(tried: Engine, requests: list[Request]) -> dict[int, list[Event]]:
    heard: dict[int, list[Event]] = {i: [] for each in requests for i in tried.submit(each)}
    while tried.busy:
        for event in tried.step():
            heard[event.seq_id].append(event)
        tried.check()
    return heard


def assert_alone(drafter: str, bad: Request, world: World, message: str, made: ToyRunner | None = None) -> None:
    """The bad request fails as in plain decoding, with this message; those around it are untouched."""
    good = others()
    tried = on(drafter, [*good, bad], made)
    heard = list(finish_all(tried, [*good[:2], bad, *good[2:]]).values())
    (last,) = [events for events in heard if events[-1].error]
    assert message in last[-1].error
    assert told_by(last) == plain(world, bad)[0]
    assert told_by(last).finish == "error"
    for events, asked in zip((e for e in heard if e is not last), good, strict=True):
        assert_same([told_by(events)], plain(world, asked))


@everybody
def test_nan_from_the_start(drafter: str):
    """The prompt holds the poison: no token comes, and the message speaks of NaN."""
    assert_alone(drafter, request([POISON, 2], max_tokens=15), POISONED, "NaN", PoisonedToy(VOCAB, context=CONTEXT))


def _text_that_takes_poison() -> Request:
    """A request whose own text comes upon the poison after a few tokens."""
    for seed in range(200):
        asked = request([3, 3], max_tokens=30, temperature=1.0, seed=seed)
        if 3 < len(plain(POISONED, asked)[0].tokens) < 8 and plain(POISONED, asked)[0].finish == "error":
            return asked
    raise AssertionError("no seed leads to the poison")


@everybody
def test_nan_after_a_few_tokens(drafter: str):
    """What came before the failure is the text of plain decoding, however it was drafted."""
    bad = _text_that_takes_poison()
    assert_alone(drafter, bad, POISONED, "NaN", PoisonedToy(VOCAB, context=CONTEXT))


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
@pytest.mark.parametrize("shape", [None, (-1, 0, 1), (-1, -1, 1)])
def test_nan_in_a_draft_that_is_not_kept_fails_nobody(mode: str, shape: tuple[int, ...] | None):
    """The draft always holds the poison, which the request bans: rows behind it are NaN and never reached."""

    def script(seq: Sequence, budget: int) -> Draft:
        return Draft((4, POISON, 5), shape).first_nodes(budget)

    verifier = make_verifier(mode)  # pyright: ignore[reportArgumentType]
    tried = Engine(PoisonedToy(VOCAB), ScriptedDrafter(script), verifier, TOKENIZER, eos_ids=TOKENIZER.eos_ids)
    asked = others()
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert told[0].finish in ("stop", "length")
        if mode == "seeded" or each.params.greedy:
            assert_same(told, plain(WORLD, each))


Processor = Callable[[Seq[Token], Tensor], Tensor]


def _raise(tokens: Seq[Token], logits: Tensor) -> Tensor:
    raise KeyError("no such thing")


def _after(count: int, then: Processor) -> Processor:
    return lambda tokens, logits: then(tokens, logits) if len(tokens) >= count else logits


FAULTS: dict[str, tuple[Processor, str]] = {
    "raises": (_raise, "logits_processors[1] failed: KeyError: 'no such thing'"),
    "returns nothing": (lambda tokens, logits: None, "logits_processors[1] must return logits"),  # pyright: ignore[reportAssignmentType]
    "returns another shape": (lambda tokens, logits: logits[:-1], "logits_processors[1] must return logits of shape"),
    "rules out everything": (lambda tokens, logits: logits - float("inf"), "no token is left"),
    "returns NaN": (lambda tokens, logits: logits * float("nan"), "logits_processors"),
}


@pytest.mark.parametrize(
    ("drafter", "fault"),
    [*((name, "raises") for name in EVERYBODY), *product(("none", "hidden-oracle"), FAULTS)],
)
def test_a_logits_processor_that_fails(drafter: str, fault: str):
    """At the ninth token of the text: seven of its own come first, as in plain decoding."""
    then, message = FAULTS[fault]
    processors = (lambda tokens, logits: logits, _after(9, then))
    bad = request([1, 5], max_tokens=30, ignore_eos=True, temperature=0.5, seed=3, logits_processors=processors)
    assert len(plain(WORLD, bad)[0].tokens) == 7
    assert_alone(drafter, bad, WORLD, message)


@everybody
def test_a_processor_that_fails_only_behind_drafts_nobody_keeps(drafter: str):
    """It raises wherever its text holds a token that the request bans: only a draft can bring that about."""

    def touchy(tokens: Seq[Token], logits: Tensor) -> Tensor:
        if 6 in tokens:
            raise RuntimeError("the draft is none of my business")
        return logits

    bans = {"banned_token_ids": (6,), "logits_processors": (touchy,)}
    asked = [request([1, i], max_tokens=25, temperature=0.7 * i, seed=i, **bans) for i in range(3)]
    for told, each in zip(run(TOY.engine(drafter, asked), asked), asked, strict=True):
        assert_same(told, TOY.judged(each))


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": (3, 4), "banned_token_ids": (4, 3)},
        {"allowed_token_ids": (EOS,), "min_tokens": 1},
        {"allowed_token_ids": (5, 7), "stop_token_ids": (5, 7), "min_tokens": 4},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["seeded", "distribution"])
def test_options_that_leave_nothing(options: dict[str, object], temperature: float, mode: str):
    bad = request([2, 2], max_tokens=9, temperature=temperature, seed=0, **options)
    fine = others()
    tried = TOY.engine("noise", fine, mode=mode)  # pyright: ignore[reportArgumentType]
    heard = list(finish_all(tried, [bad, *fine]).values())
    assert heard[0][-1].finish == "error"
    for word in ("allowed_token_ids", "banned_token_ids", "min_tokens"):
        assert word in heard[0][-1].error
    for events in heard[1:]:
        assert told_by(events).finish in ("stop", "length")


def test_a_failure_gives_its_pages_back_and_nothing_of_it_is_shared():
    """The same prompt again reads every token again: pages of a failed text are not trusted."""
    bad = request([POISON, *range(1, 12), *range(1, 12), *range(1, 12)], max_tokens=4)
    tried = on("none", [], PoisonedToy(VOCAB))
    for _ in range(2):
        ((told,),) = run(tried, [bad])
        assert told.finish == "error"
        assert tried.target.pool.used == 0
    assert tried.stats.shared_tokens == 0


def test_a_target_that_breaks_takes_no_text_with_it():
    """An exception from the pass itself reaches the caller; cancelling everything leaves the engine clean."""

    class Breaking(ToyRunner):
        def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
            if any(len(span.draft) for span in spans):
                raise RuntimeError("out of memory")
            return super().score(spans, after)

    tried = Engine(Breaking(VOCAB), ScriptedDrafter(lambda seq, k: Draft((1,) * k)), make_verifier("seeded"), TOKENIZER)
    ids = [tried.submit(each)[0] for each in others()]
    tried.step()
    with pytest.raises(RuntimeError, match="out of memory"):
        tried.step()
    tried.target.pool.check()
    for seq_id in ids:
        assert tried.cancel(seq_id) is not None
    tried.check()
    assert tried.target.pool.used == 0


def _nothing_after(end: Callable[[str, Seq[Token]], bool]) -> Processor:
    """As a grammar does: behind the end of the text nothing is allowed."""

    def grammar(tokens: Seq[Token], logits: Tensor) -> Tensor:
        done = end(TOKENIZER.decode(tokens), tokens)
        return logits - float("inf") if done else logits

    return grammar


@everybody
def test_a_row_behind_a_stop_token_fails_nobody(drafter: str):
    """A draft runs past the end of the text, where a grammar rules everything out; the text ended well before."""
    after_end = _nothing_after(lambda _, tokens: EOS in tokens)
    options = {"logit_bias": {EOS: 3.0}, "logits_processors": (after_end,)}
    asked = [request([1, i], max_tokens=60, temperature=0.8, seed=i, **options) for i in range(1, 5)]
    for told, each in zip(run(TOY.engine(drafter, asked), asked), asked, strict=True):
        assert TOY.judged(each)[0].finish == "stop"
        assert_same(told, TOY.judged(each))


@everybody
def test_a_row_behind_a_stop_string_fails_nobody(drafter: str):
    after_end = _nothing_after(lambda text, _: "o" in text)
    options = {"stop": ("o",), "logits_processors": (after_end,), "ignore_eos": True}
    asked = [request([1, i], max_tokens=90, temperature=0.8, seed=i, **options) for i in range(3)]
    for told, each in zip(run(TOY.engine(drafter, asked), asked), asked, strict=True):
        assert TOY.judged(each)[0].stop_reason == "o"
        assert_same(told, TOY.judged(each))
