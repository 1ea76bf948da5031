"""The values of a config.json, each taken out with its type checked.

A missing or empty value is "not ours", since families differ in what they leave out. A value of the wrong
type, or beyond any sense, is broken for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.core.errors import ConfigError
from outrider.core.sampling import shown

Values = Mapping[str, Any]

MOST = 1 << 30
MAX_LAYERS = 4096
LARGEST = 1e30


class NotOurs(Exception):  # noqa: N818 - not an error: the fallback takes over
    """This configuration asks for something the native decoder does not do."""


class FieldError(ConfigError):
    """A value that no decoder could run with. Whoever knows the file adds its name."""

    def __init__(self, key: str, must_be: str, value: object) -> None:
        super().__init__(f"{key} must be {must_be}, not {shown(value)}")


def whole(values: Values, key: str, most: int = MOST) -> int:
    """A size. Floats are left to the fallback, which takes some."""
    value = _given(values, key)
    if isinstance(value, float):
        raise NotOurs(f"{key} = {value!r} is no whole number")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise FieldError(key, f"a whole number from 1 to {most}", value)
    return value


def number(values: Values, key: str) -> float:
    value = _given(values, key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
        raise FieldError(key, "a number above 0", value)
    if value == 0:
        raise NotOurs(f"{key} = 0")
    return float(value)


def optional_number(values: Values, key: str) -> float | None:
    return None if values.get(key) is None else number(values, key)


def flag(values: Values, key: str) -> bool:
    value = _given({key: False} | dict(values), key)
    if not isinstance(value, bool):
        raise FieldError(key, "true or false", value)
    return value


def text(values: Values, key: str) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise FieldError(key, "a string", value)
    return value


def texts(values: Values, key: str) -> list[str]:
    value = values.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise FieldError(key, "a list of strings", value)
    return value


def group(values: Values, key: str) -> dict[str, Any]:
    """An object inside the object, empty where there is none."""
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise FieldError(key, "an object", value)
    return value


def _given(values: Values, key: str) -> Any:
    if values.get(key) is None:
        raise NotOurs(f"{key} is not given")
    return values[key]
