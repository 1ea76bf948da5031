"""Tokens as clients see them: what each adds to a text, and its bytes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from outrider.core.sampling import Token
from outrider.engine.text import UNFINISHED
from outrider.models.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
MIN_LOGPROB = -9999.0  # OpenAI's number for a token that cannot be; JSON has no infinity


def byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell each byte: itself where it prints, else a letter from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenTexts:
    """The texts and bytes of a vocabulary's tokens, worked out as they are asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = lru_cache(maxsize=65536)(self._text)
        self.bytes = lru_cache(maxsize=65536)(self._bytes)

    def top(self, token: Token, logprob: float) -> dict[str, Any]:
        """A token and its log-probability in the shape of a chat's logprobs."""
        return {"token": self.text(token), "logprob": bounded(logprob), "bytes": self.bytes(token)}

    def _text(self, token: Token) -> str:
        return self.tokenizer.token_text(token)

    def _bytes(self, token: Token) -> list[int] | None:
        """None where the vocabulary does not tell."""
        text = self.text(token)
        if UNFINISHED not in text:
            return list(text.encode())
        spelled = self.tokenizer.id_to_token(token) or ""
        if found := _BYTE.fullmatch(spelled):
            return [int(found[1], 16)]
        if all(char in _ALPHABET for char in spelled):
            return [_ALPHABET[char] for char in spelled]
        return None


_ALPHABET = byte_alphabet()


def bounded(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
