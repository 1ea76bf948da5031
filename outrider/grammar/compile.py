"""From a grammar spec to a matcher: compiled in a worker process first, then here, and cached."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from outrider.core.errors import RequestError
from outrider.grammar.matcher import CompiledGrammar, GrammarMatcher
from outrider.grammar.spec import GrammarSpec
from outrider.grammar.vocabulary import Vocabulary
from outrider.grammar.worker import build_matcher
from outrider.grammar.worker_process import (
    CompileJob,
    CompileOutcome,
    CompilerUnavailableError,
    GrammarCostError,
    WorkerProcess,
)

MAX_COMPILE_SECONDS = 2.0  # processor time of one compilation; 900 objects in one schema take 0.3
MAX_COMPILE_BYTES = 64 << 20  # memory of one compilation
MAX_COMPILATIONS = 4  # at once
MAX_WAIT_SECONDS = 5.0  # for another compilation to end
MAX_CACHED_GRAMMARS = 32  # for each tokenizer and salt
MAX_CACHED_CHARS = 1 << 20  # of their sources in total
MAX_CACHED_BYTES = 256 << 20  # for each tokenizer, all salts together
MIN_CACHED_BYTES = 2 << 20  # counted for a grammar, which grows when it is used
MAX_STATES = 30_000  # of a grammar's lexer; each takes 1 to 2 KB
MAX_FUEL = 200_000  # steps of building its patterns; each may take 170 bytes, and (a{1000}){1000} would need a million

_INDENTATION = r"[\x20\x0A\x0D\x09]{0,64}"  # unbounded, a model could write whitespace for ever
_SPACING: dict[str, dict[str, Any]] = {
    "any": {"whitespace_flexible": True, "whitespace_pattern": _INDENTATION},
    "line": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}


def compile_constraint(spec: GrammarSpec, tokenizer: Any, salt: str = "") -> GrammarMatcher:
    """A matcher at the beginning of its text. May be called from any thread.

    `tokenizer` is a model's, or whatever `Vocabulary` can read. A grammar compiled before is used
    again for the same salt only. Raises RequestError where the spec is wrong: GrammarCostError
    where compiling it takes too much, CompilerUnavailableError where it may be tried again.
    """
    return _cache_of(tokenizer).matcher(spec, salt)


def prepare(tokenizer: Any) -> None:
    """Read the tokenizer's vocabulary and start its worker now, so that the first request does not wait for them."""
    cache = _cache_of(tokenizer)
    with suppress(RequestError):  # without a worker each request is told why
        cache.worker.start()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The tokenizer's vocabulary, read once."""
    return _cache_of(tokenizer).vocabulary


@dataclass(frozen=True, slots=True)
class _CachedGrammar:
    grammar: CompiledGrammar
    bytes: int


class _GrammarCache:
    """One tokenizer's vocabulary and worker, and an LRU cache of the grammars compiled for it."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocabulary = Vocabulary(tokenizer)
        self.worker = WorkerProcess(self.vocabulary.source)
        self._grammars: OrderedDict[tuple[str, GrammarSpec], _CachedGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, spec: GrammarSpec, salt: str) -> GrammarMatcher:
        with self._lock:
            if (salt, spec) in self._grammars:
                self._grammars.move_to_end((salt, spec))
                return GrammarMatcher(self._grammars[salt, spec].grammar, self.vocabulary)
        vocabulary = self.vocabulary
        if not _compile_slots.acquire(timeout=MAX_WAIT_SECONDS):
            raise CompilerUnavailableError("too many grammars are being compiled at once; try again")
        try:
            outcome = _check(spec, self.worker)
            grammar = CompiledGrammar(lambda: _compile(spec, vocabulary), outcome.seconds)
        finally:
            _compile_slots.release()
        with self._lock:
            self._grammars[salt, spec] = _CachedGrammar(grammar, max(outcome.bytes, MIN_CACHED_BYTES))
            self._evict(salt)
        return GrammarMatcher(grammar, vocabulary)

    def _evict(self, salt: str) -> None:
        """Drop the oldest grammars: first of this salt, so that it takes no room from others."""
        own = [key for key in self._grammars if key[0] == salt]
        chars = sum(len(spec.source) for _, spec in own)
        while len(own) > MAX_CACHED_GRAMMARS or chars > MAX_CACHED_CHARS:
            chars -= len(own[0][1].source)
            del self._grammars[own.pop(0)]
        while sum(each.bytes for each in self._grammars.values()) > MAX_CACHED_BYTES:
            self._grammars.popitem(last=False)


_caches: WeakKeyDictionary[Any, _GrammarCache] = WeakKeyDictionary()
_caches_lock = threading.Lock()
_compile_slots = threading.BoundedSemaphore(MAX_COMPILATIONS)


def _cache_of(tokenizer: Any) -> _GrammarCache:
    with _caches_lock:
        if tokenizer not in _caches:
            _caches[tokenizer] = _GrammarCache(tokenizer)
        return _caches[tokenizer]


def _check(spec: GrammarSpec, worker: WorkerProcess) -> CompileOutcome:
    """Compile in the worker, and return what it took. Raises RequestError where that fails."""
    try:
        grammar = llguidance_grammar(spec)
        outcome = worker.compile(CompileJob(grammar, MAX_FUEL, MAX_STATES, MAX_COMPILE_SECONDS, MAX_COMPILE_BYTES))
    except ValueError as error:  # llguidance cannot read it: a number of 400 digits
        raise RequestError(_error_message(spec, str(error))) from error
    except GrammarCostError as error:
        raise GrammarCostError(f"the {_name(spec)} {error}; send a simpler one") from None
    if outcome.error:
        raise RequestError(_error_message(spec, outcome.error))
    return outcome


def _compile(spec: GrammarSpec, vocabulary: Vocabulary) -> Any:
    """An LLMatcher at the grammar's beginning. Only for a grammar that the worker has compiled in its limits."""
    return build_matcher(vocabulary.ll, llguidance_grammar(spec), MAX_FUEL, MAX_STATES)


def llguidance_grammar(spec: GrammarSpec) -> str:
    """The spec as llguidance takes it."""
    from llguidance import LLMatcher

    if spec.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(spec.source, overrides=_schema_options(spec))  # pyright: ignore[reportArgumentType]
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.source)
    return LLMatcher.grammar_from_lark(
        spec.source if spec.kind == "lark" else "start: CHOICE\nCHOICE: " + lark_rule(spec)
    )


def lark_rule(spec: GrammarSpec) -> str:
    """The right side of a Lark rule that the same texts match."""
    from llguidance import regex_to_lark

    if spec.kind == "json_schema":
        return "%json " + json.dumps({**json.loads(spec.source), "x-guidance": _schema_options(spec)})
    if spec.kind == "regex":
        return f"/{regex_to_lark(spec.source)}/"
    if spec.kind == "choice":
        return " | ".join(json.dumps(each) for each in dict.fromkeys(json.loads(spec.source)))
    return "%lark {\n" + spec.source + "\n}"


def _schema_options(spec: GrammarSpec) -> dict[str, Any]:
    return {"lenient": False, "coerce_one_of": False, **_SPACING[spec.whitespace]}


_KIND_NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "grammar", "choice": "list of choices"}
_POSITION = re.compile(r"(?:at )?(\d+)\(\d+\): ")
_COMPLEX = ("too big", "too large", "fuel", "too many", "Unable to determine")


def _name(spec: GrammarSpec) -> str:
    return "list of tools" if spec.parts else _KIND_NAMES[spec.kind]


def _error_message(spec: GrammarSpec, error: str) -> str:
    """The message for an error of llguidance, about what the client sent and not about the grammar made from it."""
    name, why = _name(spec), _one_line(error)
    place = _POSITION.match(why)
    if place and not (spec.kind == "lark" and not spec.parts):
        why = why[place.end() :]
    where = ""
    if place and spec.parts:
        part = spec.parts[min(int(place[1]) - 2, len(spec.parts) - 1)]
        where, name = f"{part}: ", "format" if part == "response_format" else "schema"
    unsupported = "Unimplemented keys: "
    if unsupported in why:
        keys = why.partition(unsupported)[2].strip('[]" ').replace('"', "")
        return f"{where}the JSON schema uses {keys}, which cannot be enforced here; leave it out"
    if "coerce_one_of" in why:
        message = "the JSON schema uses oneOf with branches that may overlap, which cannot be enforced here; use anyOf"
        return where + message
    if "NoExtension" in why:
        return f"{where}no text at all fits the {name}; check it for contradictions or a rule without an end"
    if any(sign in why for sign in _COMPLEX):
        return f"{where}the {name} is too complex; send a simpler one"
    return f"{where}the {name} is not valid: {why}"


_SOURCE_LINE = re.compile(r"\d+ \|")


def _one_line(error: str) -> str:
    """llguidance's error on one line of at most 300 characters, without the lines of the grammar that it quotes."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    kept = [line for line in lines if line and not set(line) <= set("^ |") and not _SOURCE_LINE.match(line)]
    return "; ".join(dict.fromkeys(kept))[:300]
