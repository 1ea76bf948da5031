"""From a grammar spec to a matcher: compiled in a thread of its own, within a time limit, and cached."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from outrider.core.errors import OutriderError, RequestError
from outrider.grammar.matcher import CompiledGrammar, GrammarMatcher
from outrider.grammar.spec import GrammarSpec
from outrider.grammar.vocabulary import Vocabulary

MAX_COMPILE_SECONDS = 5.0  # of one compilation
MAX_COMPILATIONS = 4  # at once, including those that ran out of time and have not ended yet
MAX_CACHED_GRAMMARS = 32  # for each tokenizer
MAX_CACHED_CHARS = 1 << 20  # of their sources in total
MAX_STATES = 30_000  # of a grammar's lexer; each takes 1 to 2 KB
MAX_FUEL = 200_000  # steps of building its patterns; each may take 170 bytes, and (a{1000}){1000} would need a million

_INDENTATION = r"[\x20\x0A\x0D\x09]{0,64}"  # unbounded, a model could write whitespace for ever
_SPACING: dict[str, dict[str, Any]] = {
    "any": {"whitespace_flexible": True, "whitespace_pattern": _INDENTATION},
    "line": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}


def compile_constraint(spec: GrammarSpec, tokenizer: Any) -> GrammarMatcher:
    """A matcher at the beginning of its text. May be called from any thread.

    `tokenizer` is a model's, or whatever `Vocabulary` can read. Raises RequestError where the
    spec is wrong, or compiling it takes too long.
    """
    return _cache_of(tokenizer).matcher(spec)


def prepare(tokenizer: Any) -> None:
    """Read the tokenizer's vocabulary now, so that the first request does not wait for it."""
    _cache_of(tokenizer)


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The tokenizer's vocabulary, read once."""
    return _cache_of(tokenizer).vocabulary


class _GrammarCache:
    """One tokenizer's vocabulary and an LRU cache of the grammars compiled for it."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocabulary = Vocabulary(tokenizer)
        self._grammars: OrderedDict[GrammarSpec, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        with self._lock:
            if spec in self._grammars:
                self._grammars.move_to_end(spec)
                return GrammarMatcher(self._grammars[spec], self.vocabulary)

        def compile_spec() -> Any:
            return _compile(spec, self.vocabulary)

        grammar = _run_with_timeout(MAX_COMPILE_SECONDS, lambda: CompiledGrammar(compile_spec))
        with self._lock:
            self._grammars[spec] = grammar
            while len(self._grammars) > MAX_CACHED_GRAMMARS or self._chars() > MAX_CACHED_CHARS:
                self._grammars.popitem(last=False)
            return GrammarMatcher(grammar, self.vocabulary)

    def _chars(self) -> int:
        return sum(len(spec.source) for spec in self._grammars)


_caches: WeakKeyDictionary[Any, _GrammarCache] = WeakKeyDictionary()
_caches_lock = threading.Lock()
_compile_slots = threading.BoundedSemaphore(MAX_COMPILATIONS)


def _cache_of(tokenizer: Any) -> _GrammarCache:
    with _caches_lock:
        if tokenizer not in _caches:
            _caches[tokenizer] = _GrammarCache(tokenizer)
        return _caches[tokenizer]


def _run_with_timeout(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of work, done in a thread of its own. Work that overruns is left to end by its own limits."""
    slots = _compile_slots
    if not slots.acquire(timeout=seconds):
        raise RequestError("too many grammars are being compiled at once; try again later, or send a simpler one")
    results: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        try:
            results.put(work())
        except Exception as error:
            results.put(error)
        finally:
            slots.release()

    threading.Thread(target=run, name="grammar", daemon=True).start()
    try:
        result = results.get(timeout=seconds)
    except Empty:
        raise RequestError(f"the grammar took more than {seconds:g} s to compile; send a simpler one") from None
    if isinstance(result, OutriderError):
        raise result
    if isinstance(result, Exception):
        raise RequestError(f"the grammar cannot be compiled: {_one_line(str(result))}") from result
    return result


def _compile(spec: GrammarSpec, vocabulary: Vocabulary) -> Any:
    """An LLMatcher at the grammar's beginning, with its first bitmask computed already."""
    import llguidance

    limits = llguidance.LLParserLimits(initial_lexer_fuel=MAX_FUEL, max_lexer_states=MAX_STATES, verbose_errors=False)
    start = llguidance.LLMatcher(vocabulary.ll, _grammar(spec), log_level=0, limits=limits)
    start.compute_bitmask()
    if start.is_error():
        raise RequestError(_error_message(spec, start.get_error()))
    return start


def _grammar(spec: GrammarSpec) -> str:
    """The spec as llguidance's grammar."""
    from llguidance import LLMatcher

    if spec.kind == "json_schema":
        strict = {"lenient": False, "coerce_one_of": False}
        return LLMatcher.grammar_from_json_schema(spec.source, overrides={**strict, **_SPACING[spec.whitespace]})  # pyright: ignore[reportArgumentType]
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.source)
    if spec.kind == "choice":
        choices = dict.fromkeys(json.loads(spec.source))
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(json.dumps(each) for each in choices))
    return LLMatcher.grammar_from_lark(spec.source)


_KIND_NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "grammar", "choice": "list of choices"}


def _error_message(spec: GrammarSpec, error: str) -> str:
    """The message for an error of llguidance."""
    name, why = _KIND_NAMES[spec.kind], _one_line(error)
    unsupported = "Unimplemented keys: "
    if unsupported in why:
        keys = why.partition(unsupported)[2].strip('[]" ').replace('"', "")
        return f"the JSON schema uses {keys}, which cannot be enforced here; leave it out"
    if "coerce_one_of" in why:
        return "the JSON schema uses oneOf with branches that may overlap, which cannot be enforced here; use anyOf"
    if "NoExtension" in why:
        return f"no text at all fits the {name}; check it for contradictions or a rule without an end"
    if "too big" in why or "too large" in why or "fuel" in why or "too many" in why:
        return f"the {name} is too complex ({why}); send a simpler one"
    return f"the {name} is not valid: {why}"


def _one_line(error: str) -> str:
    """llguidance's error on one line of at most 300 characters, without its marks of the position."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    kept = [line for line in lines if line and not set(line) <= set("^ |")]
    return "; ".join(dict.fromkeys(kept))[:300]
