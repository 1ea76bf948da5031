"""The bytes that tokens stand for, however a vocabulary writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"  # how SentencePiece writes a space


def _byte_level_characters() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte: itself where it is printable, else one beyond 255."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_characters()


class OwnTexts(dict[int, str | bytes]):
    """The text of each token of a byte-level vocabulary, decoded on first use. Safe to share between threads.

    A str where the token decodes to whole characters, none of them U+FFFD; else the token's bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token: int) -> str | bytes:
        text = self._backend.decode([token], skip_special_tokens=True)
        own = text if "\N{REPLACEMENT CHARACTER}" not in text else self._bytes_of(token)
        self[token] = own
        return own

    def _bytes_of(self, token: int) -> bytes:
        """The bytes that the decoder makes of a token: those its characters stand for, else its name in UTF-8."""
        name = self._backend.id_to_token(token) or ""
        spelled = _read_byte_level(name)
        return name.encode() if spelled is None else spelled


def bytes_reader(tokenizer: Mapping[str, Any]) -> Callable[[str], bytes | None]:
    """A function from a token, as the vocabulary writes it, to its bytes or None. tokenizer: a tokenizer.json."""
    return _read_byte_level if _mentions(tokenizer.get("decoder"), "ByteLevel") else _read_sentencepiece


def is_byte_token(token: str) -> bool:
    """Whether this is a byte-fallback token of a SentencePiece vocabulary, such as `<0x68>`."""
    return _BYTE_TOKEN.fullmatch(token) is not None


def _read_byte_level(token: str) -> bytes | None:
    found = [_BYTE_LEVEL.get(char) for char in token]
    return bytes(b for b in found if b is not None) if None not in found else None


def _read_sentencepiece(token: str) -> bytes | None:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode("utf-8", "ignore")


def _mentions(part: Any, kind: str) -> bool:
    """Whether a decoder, or one of a sequence of decoders, is of this type."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") == kind or any(_mentions(each, kind) for each in part.get("decoders") or ())
