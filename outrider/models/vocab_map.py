"""Between two vocabularies: which tokens stand for the same bytes, and how a text of one is written in the other."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cached_property

from outrider.core.sampling import Token
from outrider.models.token_bytes import is_byte_token
from outrider.models.tokenizer import Tokenizer


class VocabMap:
    """From a target's tokens to a draft's and back.

    Two tokens are the same where they stand for the same bytes; special tokens where they are written alike, begin
    a text in both, or end one in both.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, target_rows: int, draft_rows: int) -> None:
        """target_rows, draft_rows: the widths of the models' logits; tokens beyond do not exist."""
        self._target, self._draft = target, draft
        own = _by_meaning(draft, draft_rows)
        named = _by_meaning(target, target_rows)
        shared = {index: own[meaning] for meaning, index in named.items() if meaning in own}
        if target.eos_ids and draft.eos_ids:
            shared |= {index: shared.get(index, min(draft.eos_ids)) for index in target.eos_ids}
        if target.bos_id is not None and draft.bos_id is not None:
            shared[target.bos_id] = draft.bos_id
        self.shared = {t: d for t, d in sorted(shared.items()) if t < target_rows and d < draft_rows}
        """Target id -> draft id, of tokens that both have."""
        self._longer: dict[Token, tuple[Token, ...]] = {}
        """Tokens that only the target has, written in draft tokens; filled when a text contains them."""

    @property
    def coverage(self) -> float:
        """The share of the target's tokens that the draft has too."""
        return len(self.shared) / max(1, sum(token is not None for token in self._target.tokens))

    @cached_property
    def beginning(self) -> tuple[Token, ...]:
        """What the draft model reads before a text: its beginning-of-text token where the target has none."""
        return () if self._draft.bos_id is None or self._target.bos_id is not None else (self._draft.bos_id,)

    def translate(self, tokens: Seq[Token]) -> list[Token]:
        """Tokens of the target as tokens of the draft, each by itself; what cannot be written is left out."""
        out: list[Token] = []
        for token in tokens:
            same = self.shared.get(token)
            out += (same,) if same is not None else self._spelled(token)
        return out

    def _spelled(self, token: Token) -> tuple[Token, ...]:
        """A token that only the target has: as text, or byte by byte where it is part of a character."""
        if token not in self._longer:
            names = self._target.tokens
            data = self._target.token_bytes[token] if token < len(names) else b""
            data = (names[token] or "").encode() if data is None else data
            try:
                spelled = self._draft.encode(data.decode(), special=False, allow_special_tokens=False)
            except UnicodeDecodeError:
                spelled = [self._bytes[byte] for byte in data if byte in self._bytes]
            self._longer[token] = tuple(spelled)
        return self._longer[token]

    @cached_property
    def _bytes(self) -> dict[int, Token]:
        """The draft's token of each byte."""
        return {each[0]: i for i, each in enumerate(self._draft.token_bytes) if each is not None and len(each) == 1}


def _by_meaning(tokenizer: Tokenizer, rows: int) -> dict[bytes | str, Token]:
    """Bytes of a text token, or the name of a special token -> id; the lowest id among equal tokens.

    A byte-fallback token, such as `<0x68>`, counts only where no ordinary token stands for the same byte.
    """
    found: dict[bytes | str, Token] = {}
    tokens = zip(tokenizer.tokens, tokenizer.token_bytes, strict=True)
    ranked = sorted(enumerate(tokens), key=lambda each: is_byte_token(each[1][0] or ""))
    for index, (name, data) in ranked:
        meaning = name if data is None else data
        if meaning and index < rows:
            found.setdefault(meaning, index)
    return found
