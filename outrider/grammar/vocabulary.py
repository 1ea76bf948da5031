"""A model's vocabulary for llguidance: bytes by token id, and the end-of-text tokens."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

import numpy as np

from outrider.core.errors import ConfigError, RequestError
from outrider.core.sampling import Token
from outrider.grammar.worker import load_tokenizer


class Vocabulary:
    """Reads `tokenizer.to_json()` (Hugging Face's format), or `tokenizer.token_bytes`, a list of bytes by id.

    Both have `vocab_size` and `eos_ids`. Takes a second or two for a large vocabulary. Raises
    ConfigError where llguidance is not installed, RequestError where it cannot read this tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.size: int = tokenizer.vocab_size
        self.eos_ids: frozenset[Token] = frozenset(tokenizer.eos_ids)
        ends = sorted(i for i in self.eos_ids if i < self.size)
        missing = not ends
        ends = ends or [self.size]  # a token beyond the last, where the model has no end-of-text token
        try:
            if hasattr(tokenizer, "to_json"):
                self.source: dict[str, Any] = {"json": _add_eos(tokenizer.to_json(), ends[0], missing=missing)}
            else:
                self.source = {"tokens": [token.decode("latin-1") for token in tokenizer.token_bytes]}
            self.source["ends"] = ends
            self.ll = load_tokenizer(self.source)
        except ImportError as error:
            raise ConfigError("structured output needs llguidance: pip install llguidance") from error
        except Exception as error:  # whatever it raises, this model has no structured output
            raise RequestError(f"this model's tokenizer cannot be used for structured output: {error}") from error

    def is_special(self, text: str) -> bool:
        """Whether this is one special token, which other tokens never spell."""
        tokens = self.ll.tokenize_str(text, parse_special=True)
        return len(tokens) == 1 and self.ll.is_special_token(tokens[0])

    @cached_property
    def text_bits(self) -> np.ndarray:
        """uint8 [size / 8, rounded up], a bit for each token: 1 where it does not end a text."""
        flags = np.ones(self.size, dtype=np.uint8)
        flags[[i for i in self.eos_ids if i < self.size]] = 0
        return np.packbits(flags, bitorder="little")


def _add_eos(source: str, end: Token, *, missing: bool) -> str:
    """A tokenizer.json, with an end-of-text token added where it has none."""
    if not missing:
        return source
    data = json.loads(source)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [*data["added_tokens"], {"id": end, "content": "<|no end|>", "special": True, **plain}]
    return json.dumps(data)
