"""One sequence's position in a compiled grammar: the `Constraint` of `outrider.core`, by llguidance's LLMatcher."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core.draft import TokenPath
from outrider.core.sampling import Token
from outrider.grammar.vocabulary import Vocabulary

MAX_FORCED = 64  # forced tokens returned at once: more than any draft holds
MAX_RECOMPILE_SECONDS = 0.05  # a grammar that compiles within this may be compiled again between two rounds
MAX_MASK_SECONDS = 0.25  # CPU seconds of one bitmask; usual are 10 to 500 microseconds


class CompiledGrammar:
    """A compiled grammar, from which matchers are made.

    `build` compiles it and returns an LLMatcher at its beginning; `seconds` is the processor time that takes.
    """

    def __init__(self, build: Callable[[], Any], seconds: float) -> None:
        self._build, self._matcher = build, build()
        self._quick = seconds < MAX_RECOMPILE_SECONDS

    def copy(self) -> Any:
        """An LLMatcher at the beginning. All copies share one table of lexer states, which they fill."""
        return self._matcher.deep_copy()

    def renew(self) -> bool:
        """Make further copies start with an empty table; False where that would take too long."""
        if self._quick:
            self._matcher = self._build()
        return self._quick


class _NextTokens(NamedTuple):
    """The tokens allowed at one position."""

    bits: np.ndarray
    """uint8, a bit for each allowed token; end-of-text tokens are not among them."""
    ends: bool
    """Whether the text may end here."""
    goes_on: bool
    """Whether any token is allowed."""


class GrammarMatcher:
    """A grammar and a sequence's position in it. Made by `compile_constraint`; for one thread at a time.

    The LLMatcher is at some path of the draft tree and is moved by consuming tokens and rolling back, so that a chain
    of W draft tokens costs W steps. Results are cached until the sequence advances: a draft model and the target ask
    for the same positions.
    """

    def __init__(self, start: CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._start, self._vocabulary = start, vocabulary
        self._matcher = start.copy()
        self._text: list[Token] = []
        self._path: TokenPath = ()
        """What the LLMatcher has consumed beyond the text."""
        self._rows: dict[TokenPath, _NextTokens] = {}
        self._forced: TokenPath | None = None
        self._renewed = False
        """Whether a full table has been replaced since the sequence last advanced."""
        self._seconds = 0.0
        """CPU seconds the LLMatcher has taken for the row being computed. Only its own calls are
        timed: Python's garbage collector may run between them, and takes longer than most rows."""
        self._none = _NextTokens(np.zeros_like(vocabulary.text_bits), ends=False, goes_on=False)
        self.problem = ""

    @property
    def done(self) -> bool:
        row = self._row(())
        return row.ends and not row.goes_on

    def allowed(self, paths: Seq[TokenPath], stops: frozenset[Token]) -> Tensor:
        rows = [self._none if stops.intersection(path) else self._row(path) for path in paths]
        bits = np.zeros((len(rows), len(self._vocabulary.text_bits)), dtype=np.uint8)
        for i, row in enumerate(rows):
            bits[i] = row.bits
        flags = np.unpackbits(bits, axis=1, bitorder="little")[:, : self._vocabulary.size]
        may_stop = np.array([row.ends and row.goes_on for row in rows], dtype=np.uint8)
        flags[:, [stop for stop in stops if 0 <= stop < self._vocabulary.size]] = may_stop[:, None]
        return torch.from_numpy(flags.view(np.bool_))

    def advance(self, tokens: Seq[Token]) -> None:
        went = self._move_to(tuple(tokens))
        self._text += tokens
        self._path = ()
        self._rows.clear()
        self._forced = None
        self._renewed = False
        if not went:
            self._fail("this text does not fit it")

    def forced(self) -> TokenPath:
        if self._forced is None:
            lost = bool(self.problem) or not self._move_to(())
            self._forced = () if lost else tuple(self._matcher.compute_ff_tokens()[:MAX_FORCED])
        return self._forced

    def fork(self) -> GrammarMatcher:
        twin = GrammarMatcher(self._start, self._vocabulary)
        twin.problem = self.problem
        if self._move_to(()):
            twin._matcher = self._matcher.deep_copy()
        twin._text = list(self._text)
        return twin

    def _row(self, path: TokenPath) -> _NextTokens:
        row = self._rows.get(path)
        if row is None:
            row = self._rows[path] = self._none if self.problem else self._compute(path)
        return row

    def _compute(self, path: TokenPath) -> _NextTokens:
        self._seconds = 0.0
        if not self._move_to(path):
            return self._none
        bits = self._mask()
        if self._replace_failed() and self._move_to(path):
            bits = self._mask()
        failed = self._matcher.is_error()
        if failed or self._seconds > MAX_MASK_SECONDS:
            if not path:
                self._fail("it takes too long")
            if failed:
                self._restart()
            return self._none
        return _NextTokens(bits, self._matcher.is_accepting(), bool(bits.any()))

    def _mask(self) -> np.ndarray:
        text = self._vocabulary.text_bits
        began = time.thread_time()
        bitmask = self._matcher.compute_bitmask()
        self._seconds += time.thread_time() - began
        return np.frombuffer(bitmask, np.uint8)[: len(text)] & text

    def _fail(self, reason: str) -> None:
        """Set `problem` to the LLMatcher's error, or else to this reason."""
        if not self.problem:
            reason = _first_line(self._matcher.get_error()) or reason
            self.problem = f"the grammar cannot be followed any further ({reason}); send a simpler one"

    def _move_to(self, path: TokenPath) -> bool:
        """Move the LLMatcher to the end of this path; False, and somewhere on it, where the grammar forbids the path.

        A rejected token leaves the LLMatcher unchanged, so that it can still roll back.
        """
        went = self._try_move_to(path)
        if self._replace_failed():
            went = self._try_move_to(path)
        return went and not self._matcher.is_error()

    def _try_move_to(self, path: TokenPath) -> bool:
        if self._matcher.is_error():
            self._restart()
        common = _common_length(self._path, path)
        if common < len(self._path) and not self._matcher.rollback(len(self._path) - common):
            self._restart()
            common = 0
        rest = path[common:]
        legal = next((i for i, t in enumerate(rest) if not self._is_text(t)), len(rest))
        took = self._consume(list(rest[:legal])) if legal else 0
        self._path = path[: common + took]
        return took == len(rest)

    def _consume(self, tokens: list[Token]) -> int:
        """How many of these tokens the LLMatcher has consumed: up to the first that is not allowed."""
        began = time.thread_time()
        took = self._matcher.try_consume_tokens(tokens)
        self._seconds += time.thread_time() - began
        return took

    def _is_text(self, token: Token) -> bool:
        return 0 <= token < self._vocabulary.size and token not in self._vocabulary.eos_ids

    def _replace_failed(self) -> bool:
        """Replace an LLMatcher that has failed by one with an empty table; False where none was replaced.

        Other sequences may have filled the table they share. Whether this sequence can be
        followed must depend on itself alone.
        """
        if not self._matcher.is_error() or self._renewed or not self._start.renew():
            return False
        self._renewed = True
        self._restart()
        return True

    def _restart(self) -> None:
        """Replace the LLMatcher, which cannot recover from an error, by a new one that reads the text again."""
        self._matcher = self._start.copy()
        self._matcher.consume_tokens(self._text)
        self._path = ()


def _common_length(a: TokenPath, b: TokenPath) -> int:
    """The length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:200]
