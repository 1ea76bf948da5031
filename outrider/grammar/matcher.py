"""One text's place in a compiled grammar: the `Constraint` of `outrider.core`, by llguidance's matcher."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core.sampling import Token
from outrider.grammar.vocabulary import Vocabulary

Path = tuple[Token, ...]

MAX_FORCED = 64  # tokens forced at once: more than any draft holds
SLOWEST = 0.25  # seconds of this thread's own time that one row may take; usual are 10 to 500 microseconds


class Beginning(Protocol):
    """A compiled grammar, before any text."""

    def copy(self) -> Any:
        """An LLMatcher at the beginning. All copies share, and fill, one table of lexer states."""
        ...

    def renew(self) -> bool:
        """Let further copies begin with an empty table; False where that would take too long."""
        ...


class _Row(NamedTuple):
    """What may follow one place."""

    bits: np.ndarray
    """uint8, a bit for each token that goes on; none of them ends the text."""
    ends: bool
    """The text may end here."""
    goes_on: bool


class GrammarConstraint:
    """A grammar and a text in it. Made by `compile_constraint`; one thread at a time.

    The matcher stands somewhere in the tree of paths asked for and is moved by taking
    tokens and rolling back, so that a chain of W drafted tokens costs W steps. Rows are
    kept until the text moves on: a draft model and the target ask for the same ones.
    """

    def __init__(self, start: Beginning, vocabulary: Vocabulary) -> None:
        self._start, self._vocabulary = start, vocabulary
        self._matcher = start.copy()
        self._text: list[Token] = []
        self._path: Path = ()
        """What the matcher has taken beyond the text."""
        self._rows: dict[Path, _Row] = {}
        self._forced: Path | None = None
        self._renewed = False
        """A full table has been replaced once since the text last moved."""
        self._nowhere = _Row(np.zeros_like(vocabulary.text_bits), ends=False, goes_on=False)
        self.problem = ""

    @property
    def done(self) -> bool:
        row = self._row(())
        return row.ends and not row.goes_on

    def allowed(self, paths: Seq[Path], stops: frozenset[Token]) -> Tensor:
        rows = [self._nowhere if stops.intersection(path) else self._row(path) for path in paths]
        bits = np.zeros((len(rows), len(self._vocabulary.text_bits)), dtype=np.uint8)
        for i, row in enumerate(rows):
            bits[i] = row.bits
        flags = np.unpackbits(bits, axis=1, bitorder="little")[:, : self._vocabulary.size]
        may_stop = np.array([row.ends and row.goes_on for row in rows], dtype=np.uint8)
        flags[:, [stop for stop in stops if 0 <= stop < self._vocabulary.size]] = may_stop[:, None]
        return torch.from_numpy(flags.view(np.bool_))

    def advance(self, tokens: Seq[Token]) -> None:
        went = self._go(tuple(tokens))
        self._text += tokens
        self._path = ()
        self._rows.clear()
        self._forced = None
        self._renewed = False
        if not went:
            self._give_up("this text does not fit it")

    def forced(self) -> Path:
        if self._forced is None:
            lost = bool(self.problem) or not self._go(())
            self._forced = () if lost else tuple(self._matcher.compute_ff_tokens()[:MAX_FORCED])
        return self._forced

    def fork(self) -> GrammarConstraint:
        twin = GrammarConstraint(self._start, self._vocabulary)
        twin.problem = self.problem
        if self._go(()):
            twin._matcher = self._matcher.deep_copy()
        twin._text = list(self._text)
        return twin

    def _row(self, path: Path) -> _Row:
        row = self._rows.get(path)
        if row is None:
            row = self._rows[path] = self._nowhere if self.problem else self._look(path)
        return row

    def _look(self, path: Path) -> _Row:
        began = time.thread_time()
        if not self._go(path):
            return self._nowhere
        bits = self._mask()
        if self._recovers() and self._go(path):
            bits = self._mask()
        failed = self._matcher.is_error()
        if failed or time.thread_time() - began > SLOWEST:
            if not path:
                self._give_up("it takes too long")
            if failed:
                self._start_over()
            return self._nowhere
        return _Row(bits, self._matcher.is_accepting(), bool(bits.any()))

    def _mask(self) -> np.ndarray:
        text = self._vocabulary.text_bits
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(text)] & text

    def _give_up(self, reason: str) -> None:
        """Say why the text cannot go on: what the matcher says, or else this reason."""
        if not self.problem:
            reason = _first_line(self._matcher.get_error()) or reason
            self.problem = f"the grammar cannot be followed any further ({reason}); send a simpler one"

    def _go(self, path: Path) -> bool:
        """Stand behind the text and this path; False, and somewhere on the way, where the grammar does not lead there.

        A token that is refused leaves the matcher as it was, so that the way back stays open.
        """
        went = self._walk(path)
        if self._recovers():
            went = self._walk(path)
        return went and not self._matcher.is_error()

    def _walk(self, path: Path) -> bool:
        if self._matcher.is_error():
            self._start_over()
        common = _common(self._path, path)
        if common < len(self._path) and not self._matcher.rollback(len(self._path) - common):
            self._start_over()
            common = 0
        rest = path[common:]
        legal = next((i for i, t in enumerate(rest) if not self._is_text(t)), len(rest))
        took = self._matcher.try_consume_tokens(list(rest[:legal])) if legal else 0
        self._path = path[: common + took]
        return took == len(rest)

    def _is_text(self, token: Token) -> bool:
        return 0 <= token < self._vocabulary.size and token not in self._vocabulary.eos_ids

    def _recovers(self) -> bool:
        """Whether the matcher has just failed and another, with an empty table, stands in its place.

        Other texts may have filled the one they shared. Whether this text can be followed
        must depend on itself alone.
        """
        if not self._matcher.is_error() or self._renewed or not self._start.renew():
            return False
        self._renewed = True
        self._start_over()
        return True

    def _start_over(self) -> None:
        """A matcher that failed stays so; a fresh one reads the text again."""
        self._matcher = self._start.copy()
        self._matcher.consume_tokens(self._text)
        self._path = ()


def _common(a: Path, b: Path) -> int:
    """How many tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:200]
