"""A constraint answers for any path in any order as a fresh one would that had read just that text."""

from __future__ import annotations

import gc
import json
import random
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from outrider.core.errors import RequestError
from outrider.core.sampling import Token
from outrider.grammar import GrammarSpec, compile_constraint, matcher
from outrider.grammar.compile import vocabulary_of
from outrider.models.tokenizer import Tokenizer
from outrider.testing.toy import ByteTokenizer

BYTES = ByteTokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}, "kind": {"enum": ["alpha", "alpine"]}},
    "required": ["name", "n", "kind"],
    "additionalProperties": False,
}
RECORDS = [
    {"name": f"Bob {i}", "n": i * 37, "kind": kind, "tags": ["größe", "naïve café"]}
    for i in range(60)
    for kind in ("alpha", "alpine")
]


def trained(eos: bool = True) -> Tokenizer:
    """A byte-level BPE that has seen such JSON: tokens of several characters that straddle the grammar's parts."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<end>", "<tool_call>"] if eos else []
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([json.dumps(r, ensure_ascii=False) for r in RECORDS], trainer)
    return Tokenizer(backend, named={"eos_token": "<end>"} if eos else {})


BPE = trained()
TOKENIZERS = {"bytes": BYTES, "bpe": BPE, "bpe without an end": trained(eos=False)}
SPECS = {
    "line": GrammarSpec.json_schema(SCHEMA, whitespace="line"),
    "any": GrammarSpec.json_schema(SCHEMA),
    "object": GrammarSpec.json_object(),
    "regex": GrammarSpec.regex(r"(ab|abc|[d-f]{2,5})*(\.|x+)"),
    "choice": GrammarSpec.choice(["yes", "yesterday", "no", 'größe\n"x"']),
    "lark": GrammarSpec.lark('start: e\ne: t (("+" | "-") t)*\nt: /[0-9]+/ | "(" e ")"'),
}
every = pytest.mark.parametrize(("kind", "spec"), [(k, s) for k in TOKENIZERS for s in SPECS])


def random_text(kind: str, spec: str, seed: int, length: int) -> list[Token]:
    """A text the grammar allows, token by token from a constraint of its own."""
    rng, made, text = random.Random(seed), compile_constraint(SPECS[spec], TOKENIZERS[kind]), []
    while len(text) < length and not made.done:
        open_tokens = made.allowed([()], frozenset())[0].nonzero()[:, 0].tolist()
        text.append(rng.choice(open_tokens))
        made.advance(text[-1:])
        assert not made.problem
    return text


@every
def test_paths_in_any_order_as_a_fresh_constraint_says(kind: str, spec: str):
    tokenizer = TOKENIZERS[kind]
    stops = frozenset(tokenizer.eos_ids)
    rng = random.Random(5)
    for seed in range(4):
        text = random_text(kind, spec, seed, 24)
        at = rng.randrange(len(text))
        made = compile_constraint(SPECS[spec], tokenizer)
        made.advance(text[:at])
        paths = [tuple(text[at : at + n]) for n in range(len(text) - at + 1)]
        wrong = [(*path, rng.randrange(tokenizer.vocab_size), *text[:2]) for path in paths]
        mixed = [*paths, *wrong]
        rng.shuffle(mixed)
        rows = made.allowed(mixed, stops)
        for row, path in zip(rows, mixed, strict=True):
            assert row.tolist() == _fresh_row(kind, spec, [*text[:at], *path], stops), path
        assert made.allowed([()], stops)[0].tolist() == _fresh_row(kind, spec, text[:at], stops)


def _fresh_row(kind: str, spec: str, tokens: list[Token], stops: frozenset[Token]) -> list[bool]:
    fresh = compile_constraint(SPECS[spec], TOKENIZERS[kind])
    for token in tokens:
        if token in stops or not bool(fresh.allowed([()], stops)[0, token]):
            return [False] * TOKENIZERS[kind].vocab_size
        fresh.advance([token])
    return fresh.allowed([()], stops)[0].tolist()


@every
def test_forced_tokens_are_all_that_is_allowed_one_after_the_other(kind: str, spec: str):
    for seed in range(3):
        text = random_text(kind, spec, seed, 20)
        made = compile_constraint(SPECS[spec], TOKENIZERS[kind])
        for token in text:
            forced = made.forced()
            rows = made.allowed([forced[:n] for n in range(len(forced))], frozenset())
            for row, sure in zip(rows, forced, strict=True):
                assert row.nonzero()[:, 0].tolist() == [sure]
            made.advance([token])


def test_a_constraint_forces_what_leaves_no_choice():
    made = compile_constraint(SPECS["line"], BYTES)
    assert bytes(made.forced()) == b'{"name": "'
    made.advance(list(b'{"name": "x'))
    assert made.forced() == ()
    made.advance(list(b'", "n": 5, '))
    assert bytes(made.forced()) == b'"kind": "alp'
    made.advance(list(b'"kind": "alpi'))
    assert bytes(made.forced()) == b'ne"}'
    assert not made.done
    made.advance(list(b'ne"}'))
    assert made.done
    assert made.forced() == ()
    assert not made.allowed([()], BYTES.eos_ids).any()


def test_stops_are_allowed_where_the_text_may_end_and_may_go_on():
    made = compile_constraint(GrammarSpec.regex("ab*c?"), BYTES)
    stops = frozenset({256, ord("b"), 7})

    def open_now() -> set[Token]:
        return set(made.allowed([()], stops)[0].nonzero()[:, 0].tolist())

    assert open_now() == {ord("a")}
    made.advance(list(b"a"))
    assert open_now() == {ord("c"), *stops}  # an ordinary token that stops, stops
    made.advance(list(b"c"))
    assert made.done
    assert open_now() == set()


def test_nothing_follows_a_path_that_stops():
    made = compile_constraint(GrammarSpec.regex("ab*"), BYTES)
    rows = made.allowed([(97,), (97, 256), (97, 256, 98), (97, 9), (97, 9, 98), (97, 1 << 40)], frozenset({256, 9}))
    assert [bool(row.any()) for row in rows] == [True, False, False, False, False, False]


def test_a_fork_goes_its_own_way():
    made = compile_constraint(SPECS["choice"], BYTES)
    made.advance(list(b"ye"))
    made.allowed([tuple(b"sterd")], frozenset())
    twin = made.fork()
    twin.advance(list(b"sterday"))
    assert twin.done
    assert not made.done
    made.advance(list(b"s"))
    assert bytes(made.forced()) == b""  # it may end here


def test_a_token_that_was_not_allowed_ends_the_text_with_the_reason():
    made = compile_constraint(SPECS["choice"], BYTES)
    made.advance([ord("z")])
    assert "does not fit" in made.problem
    assert not made.allowed([()], BYTES.eos_ids).any()
    assert made.forced() == ()


def test_a_row_that_fails_in_a_draft_leaves_the_text_as_it_was(monkeypatch: pytest.MonkeyPatch):
    """A matcher that once failed stays so; the text's own must not, for a draft that may never be kept."""
    made = compile_constraint(SPECS["lark"], BYTES)
    made.advance(list(b"(1+"))
    before = made.allowed([()], BYTES.eos_ids).tolist()
    made._matcher.consume_token(ord("x"))  # what a limit hit in the middle of a draft does
    assert made._matcher.is_error()
    made._rows.clear()
    made._path = tuple(b"2")
    assert made.allowed([()], BYTES.eos_ids).tolist() == before
    monkeypatch.setattr(matcher, "MAX_MASK_SECONDS", -1.0)
    assert not made.allowed([tuple(b"22")], BYTES.eos_ids).any()
    assert not made.problem
    made.advance(list(b"2"))
    assert not made.allowed([()], BYTES.eos_ids).any()
    assert "takes too long" in made.problem


def test_a_garbage_collection_is_not_counted_as_the_grammars_time(monkeypatch: pytest.MonkeyPatch):
    """In a process of many objects one takes longer than any row may, and it may run at any allocation."""
    limit, collected = 0.05, []

    def burn(phase: str, _info: object) -> None:
        until = time.thread_time() + 2 * limit
        while phase == "start" and time.thread_time() < until:
            pass
        collected.append(phase)

    made = compile_constraint(SPECS["regex"], BPE)
    before = made.allowed([()], frozenset()).tolist()
    made._rows.clear()
    monkeypatch.setattr(matcher, "MAX_MASK_SECONDS", limit)
    thresholds = gc.get_threshold()
    gc.callbacks.append(burn)
    try:
        gc.set_threshold(1, 1, 1)
        again = made._row(())
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(burn)
    assert collected
    assert not made.problem
    assert made.allowed([()], frozenset()).tolist() == before
    assert again.goes_on


def test_end_of_text_is_never_text():
    """Whatever the grammar, an end-of-text token that is no stop of this request may not be chosen."""
    for tokenizer in (BYTES, BPE):
        made = compile_constraint(GrammarSpec.regex("(.|\n)*"), tokenizer)
        row = made.allowed([()], frozenset())[0]
        assert not row[list(tokenizer.eos_ids)].any()
        assert made.allowed([()], tokenizer.eos_ids)[0][list(tokenizer.eos_ids)].all()


def test_no_text_is_ever_broken_utf8():
    """Bytes that would not complete a character are refused."""
    made = compile_constraint(GrammarSpec.regex(".{3}"), BYTES)
    start = made.allowed([()], frozenset())[0]
    assert not start[0x80:0xC2].any()
    assert not start[0xF5:256].any()
    inside = made.allowed([(0xC3,)], frozenset())[0]
    assert set(inside.nonzero()[:, 0].tolist()) == set(range(0x80, 0xC0))
    for seed in range(20):
        rng, made, text = random.Random(seed), compile_constraint(GrammarSpec.regex(".{8}"), BYTES), []
        while not made.done:
            text.append(rng.choice(made.allowed([()], frozenset())[0].nonzero()[:, 0].tolist()))
            made.advance(text[-1:])
        assert len(bytes(text).decode()) == 8


def test_special_tokens_stand_for_themselves():
    vocabulary = vocabulary_of(BPE)
    assert vocabulary.is_special("<tool_call>")
    assert not vocabulary.is_special("name")
    assert not vocabulary_of(BYTES).is_special("<tool_call>")


def test_a_tokenizer_without_bytes_is_refused():
    class Wordless:
        vocab_size = 3
        eos_ids = frozenset({0})

    with pytest.raises(RequestError, match="tokenizer cannot be used"):
        compile_constraint(SPECS["choice"], Wordless())
