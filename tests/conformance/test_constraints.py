"""Structured output under speculation: every drafter gives exactly the text of plain decoding under the same mask.

The judge knows each language as a list of texts and finds what may follow by looking through it: no grammar, no
matcher, no rollback. Tokens are bytes, so that there is one way to spell a text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import pytest
import torch
from conformance_models import native_testbed
from drafter_cast import EVERYBODY, Stage, make_drafter
from plain_decoding import Told, assert_same, choice, opinion, run
from testbed import PIECES, TOKENIZER

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import RequestError
from outrider.core.sampling import SamplingParams, Token, derive_seeds
from outrider.core.sequence import Constraint, Sequence
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.engine.stats import Stats
from outrider.grammar import GrammarSpec, compile_constraint
from outrider.testing.drafters import ScriptedDrafter
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

VOCAB, EOS, CONTEXT, PROMPT = 257, 256, 192, (5, 9)
Mode = Literal["seeded", "distribution"]
everybody = pytest.mark.parametrize("drafter", EVERYBODY)
modes = pytest.mark.parametrize("mode", ["seeded", "distribution"])


class Bytes(ByteTokenizer):
    """With what a draft model compares before it starts."""

    tokens = tuple(map(str, range(VOCAB)))
    bos_id = None


BYTES = Bytes()


def toy(cache_tokens: int = 4096, order: int = 2) -> ToyRunner:
    return ToyRunner(VOCAB, context=CONTEXT, cache_tokens=cache_tokens, order=order)


TOY = toy()


@dataclass(frozen=True)
class Language:
    """A finite language, as a spec and as the list of its texts."""

    spec: GrammarSpec
    texts: tuple[bytes, ...]

    @property
    def constraint(self) -> Constraint:
        return compile_constraint(self.spec, BYTES)

    def follow(self, text: bytes) -> tuple[set[Token], bool]:
        """The bytes that may follow, and whether the text may end here."""
        return {t[len(text)] for t in self.texts if t.startswith(text) and len(t) > len(text)}, text in self.texts


def _records() -> tuple[str, ...]:
    flags = [f'{{"kind": "{kind}", "on": {on}}}' for kind, on in product(("alpha", "beta", "be"), ("true", "false"))]
    return tuple(flags)


def _language(kind: str) -> Language:
    if kind == "choice":
        texts = ("yes", "no", "yesterday", "nowhere", "now", "é", "éclair", "yes!")
        return Language(GrammarSpec.choice(texts), tuple(t.encode() for t in texts))
    if kind == "record":  # long forced runs
        schema = {
            "type": "object",
            "properties": {"kind": {"enum": ["alpha", "beta", "be"]}, "on": {"type": "boolean"}},
            "required": ["kind", "on"],
            "additionalProperties": False,
        }
        spec = GrammarSpec.json_schema(schema, whitespace="line")
        return Language(spec, tuple(t.encode() for t in _records()))
    if kind == "regex":  # may end almost anywhere
        parts = [("ab", "c"), ("", "ab", "c"), ("", "dd"), ("", "x", "xy", "xyz")]
        texts = {"".join(each) for each in product(*parts)}
        pattern = "(ab|c)(ab|c)?(dd)?(x|xy|xyz)?"
        assert all(re.fullmatch(pattern, text) for text in texts)
        return Language(GrammarSpec.regex(pattern), tuple(t.encode() for t in sorted(texts)))
    words = [f"{a}-{b}{c}" for a, b, c in product(("one", "two", "three"), "012", ("", "0", "00"))]  # kind == "lark"
    grammar = 'start: word "-" number\nword: "one" | "two" | "three"\nnumber: /[012]/ /0{0,2}/'
    return Language(GrammarSpec.lark(grammar), tuple(w.encode() for w in words))


LANGUAGES = {kind: _language(kind) for kind in ("choice", "record", "regex", "lark")}


@dataclass(frozen=True)
class Case:
    """A request and the language it is held to."""

    language: Language
    asked: Request


def case(kind: str, prompt: Seq[Token] = PROMPT, **options: Any) -> Case:
    language = LANGUAGES[kind]
    params = SamplingParams(**{"max_tokens": 60, "temperature": 1.0, "seed": 1, **options})
    return Case(language, Request(prompt=tuple(prompt), params=params, constraint=language.constraint))


@cache
def _cases(temperature: float) -> tuple[Case, ...]:
    options: list[dict[str, Any]] = [
        {},
        {"min_tokens": 6},
        {"ignore_eos": True, "repetition_penalty": 1.4},
        {"n": 2, "logprobs": 3},
        {"stop": ("w", "xy"), "presence_penalty": 0.8},
        {"stop_token_ids": (ord("b"),), "top_p": 0.9},
        {"max_tokens": 4, "logit_bias": {ord("a"): 3.0}},
    ]
    rng = random.Random(7)
    return tuple(
        case(kind, (i, rng.randrange(256), 3), temperature=temperature, seed=i, **each)
        for i, (kind, each) in enumerate(product(LANGUAGES, options))
    )


_judged: dict[str, list[Told]] = {}


def judged(one: Case) -> list[Told]:
    """The text of plain decoding, computed once."""
    key = repr((one.language.spec, one.asked.prompt, one.asked.params))
    if key not in _judged:
        _judged[key] = [_plain(one, seed) for seed in derive_seeds(one.asked.params)]
    return _judged[key]


def _plain(one: Case, seed: int) -> Told:
    """Plain decoding by the book: mask, choose, append, see whether it is over."""
    params, tokens, logprobs = one.asked.params, list(one.asked.prompt), []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    seq = Sequence(0, tokens, len(tokens), params, seed, frozenset(stops))
    text = b""

    def told(finish: str, shown: bytes, reason: Token | str | None = None) -> Told:
        return Told(tuple(tokens[seq.prompt_len :]), shown.decode(errors="replace"), finish, reason, tuple(logprobs))

    while True:
        follow, may_end = one.language.follow(text)
        allowed = (follow - stops) | (stops if may_end and follow else set())
        logits = TOY.logits_after(tokens)
        refused = torch.tensor([t not in allowed for t in range(VOCAB)])
        token = choice(logits.masked_fill(refused, float("-inf")), seq)
        if token is None:
            return told("error", text)
        tokens.append(token)
        if params.logprobs is not None:
            logprobs.append(opinion(logits, token, params.logprobs))
        may_stop = seq.generated >= params.min_tokens
        if token in stops:
            return told("stop", text, token)
        text += bytes([token])
        found = [(text.index(s.encode()), s) for s in params.stop if s.encode() in text] if may_stop else []
        if found:
            at, stop = min(found)
            return told("stop", text[:at], stop)
        if not one.language.follow(text)[0]:
            return told("stop", text)
        if seq.generated >= params.max_tokens:
            return told("length", text)


def engine(
    drafter: str,
    cases: Seq[Case] = (),
    mode: Mode = "seeded",
    cache_tokens: int = 4096,
    limits: EngineLimits | None = None,
) -> Engine:
    answers = {
        (one.asked.prompt, seed): told.tokens
        for one in cases
        for seed, told in zip(derive_seeds(one.asked.params), judged(one), strict=True)
    }
    stage = Stage(
        VOCAB,
        CONTEXT,
        BYTES,
        lambda name: toy(64 if name == "cramped" else 4096, 2 if name == "draft" else 1),
        mode,
        answers,
    )
    made = make_drafter(drafter, stage)
    return Engine(toy(cache_tokens), made, make_verifier(mode), BYTES, eos_ids=BYTES.eos_ids, limits=limits)


def check(drafter: str, cases: Seq[Case], **options: Any) -> Stats:
    tried = engine(drafter, cases, **options)
    for texts, one in zip(run(tried, [one.asked for one in cases]), cases, strict=True):
        assert_same(texts, judged(one))
    return tried.stats


def test_the_judge_meets_every_ending():
    ends = {(t.finish, type(t.stop_reason)) for T in (0.0, 1.0) for one in _cases(T) for t in judged(one)}
    assert ends >= {("stop", int), ("stop", str), ("stop", type(None)), ("length", type(None))}


@pytest.mark.parametrize("kind", LANGUAGES)
def test_the_grammar_is_the_list(kind: str):
    """Whatever may follow by the list may follow by the grammar, behind the text and behind every draft."""
    language = LANGUAGES[kind]
    made = language.constraint
    stops = frozenset({EOS})
    ways = sorted({text[:n] for text in language.texts for n in range(len(text) + 1)})
    random.Random(3).shuffle(ways)
    rows = made.allowed([tuple(way) for way in ways], stops)
    for row, way in zip(rows, ways, strict=True):
        follow, may_end = language.follow(way)
        assert set(row.nonzero()[:, 0].tolist()) == follow | ({EOS} if may_end and follow else set())


@everybody
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_gives_the_text_of_plain_decoding(drafter: str, temperature: float):
    cases = _cases(temperature)
    for start in range(0, len(cases), 7):
        check(drafter, cases[start : start + 7])


@everybody
def test_where_the_cache_is_too_small_for_all(drafter: str):
    """Texts are preempted and read again; how far each has come in its grammar is not lost."""
    cases = [case("record", range(1, 25 + i), seed=i, temperature=0.5 * i) for i in range(5)]
    assert check(drafter, cases, cache_tokens=96).preemptions > 0


@everybody
@modes
def test_texts_are_of_the_language_in_either_mode(drafter: str, mode: Mode):
    cases = [case(kind, (i, 1), seed=i, n=3) for i, kind in enumerate(LANGUAGES)]
    tried = engine(drafter, cases, mode)
    for texts, one in zip(run(tried, [one.asked for one in cases]), cases, strict=True):
        for told in texts:
            assert told.finish == "stop"
            assert told.text.encode() in one.language.texts


@pytest.mark.parametrize("drafter", [name for name in EVERYBODY if name not in ("none", "cramped")])
@modes
def test_forced_tokens_are_drafted_whatever_the_drafter_and_all_accepted(drafter: str, mode: Mode):
    cases = [case("record", (i, 7), seed=i) for i in range(20, 24)]  # seeds of records that are not cut short
    tried = engine(drafter, cases, mode)
    run(tried, [one.asked for one in cases])
    forced = tried.stats.drafters["grammar"]
    assert forced.drafted >= 4 * 20
    assert forced.rejected == 0
    assert tried.stats.all.rounds < tried.stats.tokens / 2


def test_none_is_plain_decoding():
    stats = check("none", [case("record")])
    assert stats.all.drafted == 0
    assert stats.all.rounds == stats.tokens


def test_no_speculation_for_one_request_alone():
    still, quick = case("record", (1, 1)), case("record", (2, 2))
    still = replace(still, asked=replace(still.asked, max_draft=0))
    tried = engine("suffix", [still, quick])
    texts = run(tried, [still.asked, quick.asked])
    assert texts == [judged(still), judged(quick)]
    assert tried.stats.drafters["grammar"].emitted < tried.stats.tokens


def test_the_drafter_is_not_asked_where_tokens_are_forced_and_hears_of_them():
    """It sees an empty draft and every committed token, as in a mix; a request without constraint is its own."""
    asked_for: list[tuple[int, int]] = []

    def script(seq: Sequence, budget: int) -> Draft:
        asked_for.append((seq.id, seq.generated))
        return EMPTY

    class Listening(ScriptedDrafter):
        heard: dict[int, list[Token]]

        def observe(self, seqs: Any, drafts: Any, verdicts: Any) -> None:
            super().observe(seqs, drafts, verdicts)
            for seq, draft, verdict in zip(seqs, drafts, verdicts, strict=True):
                assert not len(draft)
                assert not verdict.path
                self.heard.setdefault(seq.id, []).extend(verdict.tokens)

    drafter = Listening(script)
    drafter.heard = {}
    tried = Engine(toy(), drafter, make_verifier("seeded"), BYTES, eos_ids=BYTES.eos_ids)
    one, other = case("record"), Request(prompt=(8, 8), params=SamplingParams(max_tokens=9))
    (texts, free) = run(tried, [one.asked, other])
    assert tuple(drafter.heard[0]) == texts[0].tokens
    assert tuple(drafter.heard[1]) == free[0].tokens
    assert {at for seq, at in asked_for if seq == 1} == set(range(1, 8))  # for the last token there is no room to draft
    text = texts[0].tokens
    for at in (at for seq, at in asked_for if seq == 0):
        assert len(LANGUAGES["record"].follow(bytes(text[:at]))[0]) > 1


def test_n_texts_go_their_own_ways():
    one = case("lark", n=16)
    (texts,) = run(engine("grammar", [one]), [one.asked])
    assert_same(texts, judged(one))
    assert len({told.text for told in texts}) > 3


def test_a_request_may_be_sent_again():
    """Submitting copies the constraint: the request's own stays at its beginning."""
    one = case("record")
    tried = engine("mix", [one])
    assert run(tried, [one.asked]) == run(tried, [one.asked]) == [judged(one)]


@everybody
def test_where_nothing_is_allowed_that_request_fails_alone(drafter: str):
    good = [case("regex", (i, 4), seed=i) for i in range(3)]
    bad = case("record", (9, 9), banned_token_ids=(ord("a"), ord("b")))
    tried = engine(drafter, [*good, bad])
    ids = [tried.submit(one.asked)[0] for one in [*good[:2], bad, good[2]]]
    heard: dict[int, str] = dict.fromkeys(ids, "")
    last = {}
    while tried.busy:
        for event in tried.step():
            heard[event.seq_id] += event.text
            last[event.seq_id] = event
        tried.check()
    assert last[ids[2]].finish == "error"
    assert "the constraint" in last[ids[2]].error
    assert heard[ids[2]] == '{"kind": "'
    assert [heard[i] for i in (ids[0], ids[1], ids[3])] == [judged(one)[0].text for one in good]


@pytest.mark.parametrize("spec", [GrammarSpec.regex("(a|b){0}"), GrammarSpec.lark('start: ""')], ids=["regex", "lark"])
def test_a_constraint_that_allows_only_nothing_is_refused(spec: GrammarSpec):
    with pytest.raises(RequestError, match="empty text"):
        engine("none").submit(Request(prompt=PROMPT, constraint=compile_constraint(spec, BYTES)))


@everybody
def test_a_grammar_that_begins_in_the_middle_of_a_draft(drafter: str):
    """vLLM #44297: where `</think>` lay inside the window, the rest of it lost the mask."""
    grammar = 'start: think body\nthink[lazy]: /[a-z]{0,30}/ "!"\nbody: "<" /[0-9]{2}/ ">"'
    made = compile_constraint(GrammarSpec.lark(grammar), BYTES)
    params = SamplingParams(temperature=1.0, max_tokens=60, n=6, seed=4, logit_bias={ord("!"): 4.0})
    asked = Request(prompt=PROMPT, params=params, constraint=made)
    (texts,) = run(engine(drafter), [asked])
    assert all(re.fullmatch(r"[a-z]{0,30}!<[0-9]{2}>", told.text) for told in texts)
    assert [told.text for told in texts] == [told.text for told in run(engine("none"), [asked])[0]]


@everybody
def test_the_end_of_the_grammar_beats_the_length_limit(drafter: str):
    """SGLang #31599, for grammars: a text that is complete with its last permitted token ends by `stop`."""
    whole = judged(case("record"))[0]
    for room, finish in ((0, "stop"), (-1, "length"), (5, "stop")):
        one = case("record", max_tokens=len(whole.tokens) + room)
        (texts,) = run(engine(drafter, [one]), [one.asked])
        assert texts[0].finish == finish
        assert_same(texts, judged(one))


class PieceBytes(type(TOKENIZER)):
    """The testbed's tokens, some of several characters, some of none, as bytes."""

    token_bytes = tuple(piece.encode() for piece in PIECES)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(
    "drafter", ["mix", "grammar", "draft-model:model=draft", "draft-model:model=other,beams=3,k=3"]
)
def test_on_a_real_decoder(family: str, drafter: str):
    """Text equal with and without speculation, of the language, with tokens of several characters."""
    bed = native_testbed(family)
    made = compile_constraint(GrammarSpec.regex("(ab|ba|c ?){2,9}(d|é|h{3})"), PieceBytes())
    params = [SamplingParams(temperature=T, seed=3, max_tokens=30, n=2) for T in (0.0, 0.8)]
    asked = [Request(prompt=(3, 5, 7), params=each, constraint=made) for each in params]
    told = run(bed.engine(drafter), asked)
    assert told == run(bed.engine("none"), asked)
    assert all(re.fullmatch("(ab|ba|c ?){2,9}(d|é|h{3})", each.text) for texts in told for each in texts)
