"""Which tokens a draft model drafts from: the frequent ones always, and in some columns those seen lately.

Names, other scripts and the words of a program are rare in general and frequent where they occur. So an eighth of the
columns hold tokens of the texts being drafted for that the other columns lack, first in, first out. At first they hold
the next most frequent tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.core.sampling import Token, is_int
from outrider.core.sequence import Sequence
from outrider.runners.base import Runner
from outrider.runners.reduced_head import ReducedHead

MIN_TOKENS = 256
RECENT_SHARE = 8
"""One in so many columns is for tokens seen lately."""
MAX_RANKING_BYTES = 64 << 20
"""Enough for four million ids, more than any vocabulary has."""


class ReducedVocab:
    """The tokens of a reduced head, by column. Their number is fixed, however many tokens are seen.

    The recent tokens come from other texts too, so drafts, and with them the speed of a text, depend on those, but the
    text never does. Timing a response might reveal that a rare token was seen before. Texts of different salts must
    share nothing, so recent tokens are kept for one salt at a time: none while texts of several salts are drafted for
    together, and they are dropped when the salt changes.
    """

    def __init__(self, head: ReducedHead, tokens: Seq[Token], vocab_size: int) -> None:
        """tokens: the head's current tokens, the most frequent first."""
        self.head, self.tokens, self.vocab_size = head, [*tokens], vocab_size
        self.first = len(tokens) - len(tokens) // RECENT_SHARE
        """The first column that changes."""
        self.spare = tuple(tokens[self.first :])
        self._held = set(self.tokens)
        self._oldest = self.first
        self._read: dict[int, int] = {}
        """By sequence id: the number of tokens that were looked at."""
        self._salt: str | None = ""

    def note(self, seqs: Seq[Sequence]) -> None:
        """Look at the new tokens of these texts, which are about to be drafted for."""
        if not seqs:
            return
        salts = {seq.salt for seq in seqs}
        salt = salts.pop() if len(salts) == 1 else None
        if salt != self._salt:
            self._salt, self._oldest = salt, self.first
            self._read.clear()
            self._set(dict(enumerate(self.spare, self.first)))
        if salt is not None:
            self._set(self._new_columns(seqs))

    def forget(self, seq: Sequence) -> None:
        self._read.pop(seq.id, None)

    def _new_columns(self, seqs: Seq[Sequence]) -> dict[int, Token]:
        """Columns for new tokens that have none, in place of the oldest; of too many tokens, the last get one."""
        new: dict[Token, None] = {}
        for seq in seqs:
            unread = seq.tokens[self._read.get(seq.id, 0) :]
            new |= dict.fromkeys(t for t in unread if t not in self._held and t < self.vocab_size)
            self._read[seq.id] = len(seq.tokens)
        changes: dict[int, Token] = {}
        for token in [*new][max(0, len(new) - len(self.spare)) :]:
            changes[self._oldest] = token
            self._oldest = self._oldest + 1 if self._oldest + 1 < len(self.tokens) else self.first
        return changes

    def _set(self, changes: dict[int, Token]) -> None:
        changes = {column: token for column, token in changes.items() if self.tokens[column] != token}
        if not changes:
            return
        self._held.difference_update(self.tokens[column] for column in changes)
        self._held.update(changes.values())
        for column, token in changes.items():
            self.tokens[column] = token
        self.head.put([*changes], [*changes.values()])


def read_ranking(file: str, vocab_size: int) -> list[Token]:
    """Token ids from a JSON list, the most frequent first; for an empty name none, so that tokens rank by id.

    In BPE vocabularies ids are in the order in which merges were learned: the most frequent first.
    """
    if not file:
        return []
    path = Path(file).expanduser()
    where = f"draft-model: ranking={file}"
    try:
        if path.stat().st_size > MAX_RANKING_BYTES:
            raise ConfigError(f"{where} has more than {MAX_RANKING_BYTES} bytes; a list of token ids is smaller")
        ids = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}; name a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); it should hold a list of token ids") from error
    if not isinstance(ids, list) or not ids:
        raise ConfigError(f"{where} must hold a list of token ids, the most frequent first, such as [13, 11, 279]")
    for token in ids:
        if not is_int(token) or not 0 <= token < vocab_size:
            raise ConfigError(f"{where}: {token!r} is no token of this model; ids run from 0 to {vocab_size - 1}")
    for token, times in Counter(ids).items():
        if times > 1:
            raise ConfigError(f"{where} names token {token} {times} times; each belongs there once")
    return ids


def reduce_vocab(model: Runner, size: int, ranking: Iterable[Token], vocab_size: int) -> ReducedVocab | None:
    """Let a draft model score only `size` of its first `vocab_size` tokens; None: it scores them all.

    ranking: tokens, the most frequent first; those it does not name come behind, in the order of ids.
    """
    if not 0 < size < vocab_size:
        model.reduce_vocab(())
        return None
    tokens = [*dict.fromkeys((*(t for t in ranking if t < vocab_size), *range(vocab_size)))][:size]
    head = model.reduce_vocab(tokens)
    if head is None:
        raise ConfigError(f"draft-model: vocab={size} needs a native draft model, and this one is not; leave out vocab")
    return ReducedVocab(head, tokens, vocab_size)
