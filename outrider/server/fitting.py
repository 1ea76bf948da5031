"""Whether a text can fit at all, told from its length alone: encoding what never could would keep others waiting."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from outrider.models.tokenizer import Tokenizer
from outrider.server.tokens import byte_alphabet

NFC_SHRINKS = 4  # at most: of all Unicode 14, ΐ loses most, 7 bytes to 2
KEEPING = ("ByteLevel", "Digits", "Metaspace", "Split")
"""Pre-tokenizers that cut a text and drop nothing of it, unless a Split is told to."""


def least_tokens(text: str, tokenizer: Tokenizer) -> int:
    """The text becomes no fewer tokens than this; 0 where the tokenizer allows no such bound."""
    most, dropped = most_bytes(tokenizer)
    return -(-len(text.encode(errors="replace").translate(None, dropped)) // most) if most else 0


@lru_cache(maxsize=1)  # a server has one tokenizer
def most_bytes(tokenizer: Tokenizer) -> tuple[int, bytes]:
    """The most bytes of a text that one token can stand for, 0 where there is no such bound, and bytes not counted.

    There is one where every byte has a token, or is known to have none, and nothing else is dropped on the way.
    Whatever is not known to keep to that (spaces stripped around special tokens, other normalizers, other models)
    counts as having none.
    """
    spec = json.loads(tokenizer.to_json())
    shrinks, dropped = _shrinks(spec["normalizer"]), _dropped(spec)
    stripped = any(added["lstrip"] or added["rstrip"] for added in spec["added_tokens"])
    if not shrinks or dropped is None or stripped or not _keeps(spec["pre_tokenizer"]):
        return 0, b""
    if dropped and spec["normalizer"]:  # which may make one byte of another
        return 0, b""
    # as spelled in a vocabulary, a token has no fewer bytes than what it stands for
    return shrinks * max(len(token.encode()) for token in tokenizer.tokens if token), dropped


def _parts(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a sequence, however nested."""
    if step is None:
        return []
    return [part for each in step[inner] for part in _parts(each, inner)] if step["type"] == "Sequence" else [step]


def _shrinks(normalizer: dict[str, Any] | None) -> int:
    """How many times fewer bytes a normalized text can have; 0 where there is no bound."""
    times = 1
    for step in _parts(normalizer, "normalizers"):
        if step["type"] == "NFC":
            times *= NFC_SHRINKS
        elif step["type"] == "Replace":
            plain = step["pattern"].get("String")
            if plain is None or len(step["content"].encode()) < len(plain.encode()):
                return 0
        elif step["type"] != "Prepend":
            return 0
    return times


def _keeps(pre_tokenizer: dict[str, Any] | None) -> bool:
    steps = _parts(pre_tokenizer, "pretokenizers")
    return all(step["type"] in KEEPING and step.get("behavior") != "Removed" for step in steps)


def _dropped(spec: dict[str, Any]) -> bytes | None:
    """The bytes that have no token, so that any number of them may be one token or none; None: it cannot be told."""
    model = spec["model"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    vocabulary = model["vocab"]
    if any(step["type"] == "ByteLevel" for step in _parts(spec["pre_tokenizer"], "pretokenizers")):
        found = bytes(byte for char, byte in byte_alphabet().items() if char not in vocabulary)
        return found.translate(None, _NEVER)
    whole = model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return b"" if whole else None


_NEVER = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])  # in no UTF-8
