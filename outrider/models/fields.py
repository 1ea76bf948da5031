"""Typed access to the values of a config.json.

A missing or empty value makes the model unsupported, since families differ in what they leave out. A value of
the wrong type or out of range is an error, whatever would run the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.errors import ConfigError
from outrider.core.sampling import short_repr

Values = Mapping[str, Any]

MAX_INT = 1 << 30
MAX_LAYERS = 4096
MAX_FLOAT = 1e30


class UnsupportedModel(Exception):  # noqa: N818 - not an error: the fallback runs the model
    """The native decoder does not support this configuration."""


class FieldError(ConfigError):
    """A value that no decoder can run with. The caller adds the name of the file."""

    def __init__(self, key: str, must_be: str, value: object) -> None:
        super().__init__(f"{key} must be {must_be}, not {short_repr(value)}")


def read_int(values: Values, key: str, high: int = MAX_INT) -> int:
    """A whole number from 1 to high. Floats are left to the fallback, which accepts some."""
    value = _required(values, key)
    if isinstance(value, float):
        raise UnsupportedModel(f"{key} = {value!r} is no whole number")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise FieldError(key, f"a whole number from 1 to {high}", value)
    return value


def read_float(values: Values, key: str) -> float:
    value = _required(values, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_FLOAT:
        raise FieldError(key, "a number above 0", value)
    if value == 0:
        raise UnsupportedModel(f"{key} = 0")
    return float(value)


def read_optional_float(values: Values, key: str) -> float | None:
    return None if values.get(key) is None else read_float(values, key)


def read_bool(values: Values, key: str) -> bool:
    value = _required({key: False} | dict(values), key)
    if not isinstance(value, bool):
        raise FieldError(key, "true or false", value)
    return value


def read_str(values: Values, key: str) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise FieldError(key, "a string", value)
    return value


def read_str_list(values: Values, key: str) -> list[str]:
    value = values.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise FieldError(key, "a list of strings", value)
    return value


def read_dict(values: Values, key: str) -> dict[str, Any]:
    """A nested object, empty where there is none."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise FieldError(key, "an object", value)
    return value


def _required(values: Values, key: str) -> Any:
    if values.get(key) is None:
        raise UnsupportedModel(f"{key} is not given")
    return values[key]
