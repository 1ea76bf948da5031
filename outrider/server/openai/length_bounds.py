"""A lower bound on a text's tokens by its bytes alone, so that a text that cannot fit is not encoded."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from outrider.engine.client import EngineTokenizer
from outrider.server.openai.token_texts import byte_alphabet

MAX_NFC_SHRINK = 4  # of all Unicode 14, ΐ shrinks most under NFC: 7 bytes to 2
LOSSLESS_STEPS = ("ByteLevel", "Digits", "Metaspace", "Split")
"""Pre-tokenizers that split a text and drop nothing of it, unless a Split is set to remove."""


def min_token_count(text: str, tokenizer: EngineTokenizer) -> int:
    """The text has at least this many tokens; 0 where the tokenizer allows no bound."""
    size, dropped = max_bytes_per_token(tokenizer)
    return -(-len(text.encode(errors="replace").translate(None, dropped)) // size) if size else 0


@lru_cache(maxsize=1)  # a server has one tokenizer
def max_bytes_per_token(tokenizer: EngineTokenizer) -> tuple[int, bytes]:
    """The most bytes of a text that one token covers, 0 where there is no bound, and the bytes not counted.

    There is a bound where every byte has a token, or is known to have none, and nothing else is dropped. Anything
    else (spaces stripped around special tokens, other normalizers, other models) has none.
    """
    spec = json.loads(tokenizer.to_json())
    shrink, dropped = _max_shrink(spec["normalizer"]), _bytes_without_token(spec)
    stripped = any(added["lstrip"] or added["rstrip"] for added in spec["added_tokens"])
    if not shrink or dropped is None or stripped or not _is_lossless(spec["pre_tokenizer"]):
        return 0, b""
    if dropped and spec["normalizer"]:  # it may turn one byte into another
        return 0, b""
    # a token's spelling in the vocabulary has at least as many bytes as the text it covers
    spellings = (*spec["model"]["vocab"], *(added["content"] for added in spec["added_tokens"]))
    return shrink * max(len(token.encode()) for token in spellings), dropped


def _flat_steps(step: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a sequence, flattened."""
    if step is None:
        return []
    return [part for each in step[inner] for part in _flat_steps(each, inner)] if step["type"] == "Sequence" else [step]


def _max_shrink(normalizer: dict[str, Any] | None) -> int:
    """The factor by which normalization can reduce the bytes of a text, at most; 0 where there is no bound."""
    times = 1
    for step in _flat_steps(normalizer, "normalizers"):
        if step["type"] == "NFC":
            times *= MAX_NFC_SHRINK
        elif step["type"] == "Replace":
            plain = step["pattern"].get("String")
            if plain is None or len(step["content"].encode()) < len(plain.encode()):
                return 0
        elif step["type"] != "Prepend":
            return 0
    return times


def _is_lossless(pre_tokenizer: dict[str, Any] | None) -> bool:
    steps = _flat_steps(pre_tokenizer, "pretokenizers")
    return all(step["type"] in LOSSLESS_STEPS and step.get("behavior") != "Removed" for step in steps)


def _bytes_without_token(spec: dict[str, Any]) -> bytes | None:
    """The bytes without a token: any number of them may become one token, or none. None: these bytes are not known."""
    model = spec["model"]
    if model["type"] != "BPE" or model["continuing_subword_prefix"] or model["end_of_word_suffix"]:
        return None
    vocabulary = model["vocab"]
    if any(step["type"] == "ByteLevel" for step in _flat_steps(spec["pre_tokenizer"], "pretokenizers")):
        found = bytes(byte for char, byte in byte_alphabet().items() if char not in vocabulary)
        return found.translate(None, _NOT_UTF8)
    complete = model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return b"" if complete else None


_NOT_UTF8 = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])  # bytes that UTF-8 never has
