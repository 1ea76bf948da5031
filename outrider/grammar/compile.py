"""From a spec to a constraint: compiled beside the caller, within a time limit, and remembered."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from outrider.core.errors import OutriderError, RequestError
from outrider.grammar.matcher import GrammarConstraint
from outrider.grammar.spec import GrammarSpec
from outrider.grammar.vocabulary import Vocabulary

MAX_SECONDS = 5.0  # that one compilation may take
MAX_AT_ONCE = 4  # compilations, those included that ran out of time and have not ended yet
MAX_KEPT = 32  # compiled grammars for each tokenizer
MAX_KEPT_CHARS = 1 << 20  # of their sources, all together
MAX_STATES = 30_000  # of a grammar's lexer; each takes 1 to 2 KB
MAX_FUEL = 200_000  # steps in building its patterns; each may leave 170 bytes, and (a{1000}){1000} would take a million
QUICK = 0.05  # seconds: what compiles within them may be compiled again between two rounds

_INDENTATION = r"[\x20\x0A\x0D\x09]{0,64}"  # unbounded, a model can go on with it for ever
_SPACING: dict[str, dict[str, Any]] = {
    "any": {"whitespace_flexible": True, "whitespace_pattern": _INDENTATION},
    "line": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
}


def compile_constraint(spec: GrammarSpec, tokenizer: Any) -> GrammarConstraint:
    """A constraint at the beginning of its text. May be called from any thread.

    `tokenizer` is a model's, or whatever `Vocabulary` can read. RequestError says what is
    wrong with the spec, or that compiling it took too long.
    """
    return _shop(tokenizer).make(spec)


def prepare(tokenizer: Any) -> None:
    """Read the tokenizer's vocabulary now, so that the first request does not wait for it."""
    _shop(tokenizer)


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """The tokenizer's vocabulary, read once."""
    return _shop(tokenizer).vocabulary


class _Shop:
    """One tokenizer's vocabulary and the grammars compiled for it; the least recently asked for goes first."""

    def __init__(self, tokenizer: Any) -> None:
        self.vocabulary = Vocabulary(tokenizer)
        self._kept: OrderedDict[GrammarSpec, _Start] = OrderedDict()
        self._lock = threading.Lock()

    def make(self, spec: GrammarSpec) -> GrammarConstraint:
        with self._lock:
            if spec in self._kept:
                self._kept.move_to_end(spec)
                return GrammarConstraint(self._kept[spec], self.vocabulary)
        start = _within(MAX_SECONDS, lambda: _Start(spec, self.vocabulary))
        with self._lock:
            self._kept[spec] = start
            while len(self._kept) > MAX_KEPT or sum(len(each.source) for each in self._kept) > MAX_KEPT_CHARS:
                self._kept.popitem(last=False)
            return GrammarConstraint(start, self.vocabulary)


class _Start:
    """A compiled grammar; see `matcher.Beginning`."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        began = time.thread_time()
        self._spec, self._vocabulary = spec, vocabulary
        self._matcher = _compile(spec, vocabulary)
        self._quick = time.thread_time() - began < QUICK

    def copy(self) -> Any:
        return self._matcher.deep_copy()

    def renew(self) -> bool:
        if self._quick:
            self._matcher = _compile(self._spec, self._vocabulary)
        return self._quick


_shops: WeakKeyDictionary[Any, _Shop] = WeakKeyDictionary()
_opening = threading.Lock()
_slots = threading.BoundedSemaphore(MAX_AT_ONCE)


def _shop(tokenizer: Any) -> _Shop:
    with _opening:
        if tokenizer not in _shops:
            _shops[tokenizer] = _Shop(tokenizer)
        return _shops[tokenizer]


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of work, done in a thread of its own. Work that overruns is left to end by its own limits."""
    slots = _slots
    if not slots.acquire(timeout=seconds):
        raise RequestError("too many grammars are being compiled at once; try again later, or send a simpler one")
    answers: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(work())
        except Exception as error:
            answers.put(error)
        finally:
            slots.release()

    threading.Thread(target=run, name="grammar", daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except Empty:
        raise RequestError(f"the grammar took more than {seconds:g} s to compile; send a simpler one") from None
    if isinstance(answer, OutriderError):
        raise answer
    if isinstance(answer, Exception):
        raise RequestError(f"the grammar cannot be compiled: {_plain(str(answer))}") from answer
    return answer


def _compile(spec: GrammarSpec, vocabulary: Vocabulary) -> Any:
    """A matcher at the grammar's beginning that has found its first row, so that its first user need not wait."""
    import llguidance

    limits = llguidance.LLParserLimits(initial_lexer_fuel=MAX_FUEL, max_lexer_states=MAX_STATES, verbose_errors=False)
    start = llguidance.LLMatcher(vocabulary.ll, _grammar(spec), log_level=0, limits=limits)
    start.compute_bitmask()
    if start.is_error():
        raise RequestError(_refusal(spec, start.get_error()))
    return start


def _grammar(spec: GrammarSpec) -> str:
    """The spec in llguidance's own terms."""
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


_NAMES = {"json_schema": "JSON schema", "regex": "regex", "lark": "grammar", "choice": "list of choices"}


def _refusal(spec: GrammarSpec, error: str) -> str:
    """llguidance's message, made clear."""
    name, why = _NAMES[spec.kind], _plain(error)
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


def _plain(error: str) -> str:
    """One line, without llguidance's picture of the place, and not too long."""
    lines = [line.strip() for line in error.replace("<non-verbose/>", "").splitlines()]
    kept = [line for line in lines if line and not set(line) <= set("^ |")]
    return "; ".join(dict.fromkeys(kept))[:300]
