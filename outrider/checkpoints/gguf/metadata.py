"""Typed access to a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

import numpy as np

from outrider.checkpoints.gguf.header import MetadataValue, Texts
from outrider.core.errors import ConfigError


class Metadata:
    """Typed access to a file's metadata. Raises ConfigError where a key is missing or of the wrong type."""

    def __init__(self, values: Mapping[str, MetadataValue], where: str) -> None:
        self.values, self.where = values, where

    def fail(self, why: str) -> ConfigError:
        return ConfigError(f"{self.where}: {why}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]  # one number for each layer, all equal
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self.fail(f"{key} should be one whole number, found {self._quote(key)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise self.fail(f"{key} should be a number, found {self._quote(key)}")
        return shortest_decimal(value)

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"{key} should be a string, found {self._quote(key)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.fail(f"{key} should be true or false, found {self._quote(key)}")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, Texts):
            raise self.fail(f"{key} should be a list of strings, found {self._quote(key)}")
        return value.decoded

    def numbers(self, key: str) -> list[float]:
        value = self.values.get(key)
        # all items of a list have the same type, so the first one is checked
        if not isinstance(value, list) or (value and not isinstance(value[0], (int, float))):
            raise self.fail(f"{key} should be a list of numbers, found {self._quote(key)}")
        return list(value)

    def token(self, name: str, size: int) -> int | None:
        """The id of a special token (`bos`, `eos`, ...); None where the file has none or it is out of range."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self.values:
            return None
        token = self.values[key]
        return token if isinstance(token, int) and 0 <= token < size else None

    def _quote(self, key: str) -> str:
        value = self.values.get(key)
        shown = value.decoded if isinstance(value, Texts) else value
        return f"{shown!r:.60}" if key in self.values else "nothing"


def shortest_decimal(value: float) -> float:
    """The shortest decimal that is the same float32, since the file stores 1e-5 as 9.999999747378752e-06."""
    return float(str(np.float32(value)))
