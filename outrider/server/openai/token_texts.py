"""Tokens as clients see them: text, bytes and log-probability."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from outrider.core.sampling import Token
from outrider.engine.client import EngineTokenizer
from outrider.engine.text import UNFINISHED

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
MIN_LOGPROB = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity


def byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies spell each byte: as itself where it is printable, else as a character from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenTexts:
    """The texts and bytes of a vocabulary's tokens, cached."""

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = lru_cache(maxsize=65536)(self._text)
        self.bytes = lru_cache(maxsize=65536)(self._bytes)

    def top(self, token: Token, logprob: float) -> dict[str, Any]:
        """A token and its log-probability as chat completions show them."""
        return {"token": self.text(token), "logprob": clamp_logprob(logprob), "bytes": self.bytes(token)}

    def _text(self, token: Token) -> str:
        return self.tokenizer.token_text(token)

    def _bytes(self, token: Token) -> list[int] | None:
        """The token's bytes; None where the vocabulary does not say."""
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


def clamp_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
