"""Types of the fields that clients send: bounded numbers, lists of token ids, text parts.

Validation of a list stops at its first error (fail_fast): pydantic would report an error for each entry, and a client
chooses their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from outrider.core.sampling import MAX_STOP_CHARS, MAX_TOKENS

MAX_LISTED_IDS = 4096
MAX_TOKEN_ID = (1 << 31) - 1  # no vocabulary is larger; the model's own is checked later


def _as_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_ints(value: Any) -> Any:
    return [_as_int(each) for each in value] if isinstance(value, list) and float in set(map(type, value)) else value


def max_entries(limit: int, what: str) -> BeforeValidator:
    """Checks the number of entries before pydantic reports an error for each of them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"at most {limit} {what}")
        return value

    return BeforeValidator(check)


WHOLE = BeforeValidator(_as_int)
"""Makes an integer of 5.0, which JSON and its schemas do not tell from 5."""
WHOLES = BeforeValidator(_as_ints)
"""The same for a whole list in one call: it may hold a million ids."""
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_LISTED_IDS, fail_fast=True), WHOLES]
PromptIds = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True), WHOLES]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Probability = Annotated[float, Field(gt=0, le=1)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    max_entries(MAX_LISTED_IDS, "tokens can be given a bias"),
    Field(max_length=MAX_LISTED_IDS, json_schema_extra={"additionalProperties": False}),
]


class ExtensibleModel(BaseModel):
    """An object that may have other fields, which `ignored_fields` reports."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), use_attribute_docstrings=True)


class StrictModel(BaseModel):
    """An object that may have no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: Any) -> Any:
        """Refuse the first unknown field before pydantic reports an error for each of them."""
        known = [field.alias or name for name, field in cls.model_fields.items()]
        unknown = next((name for name in value if name not in known), None) if isinstance(value, dict) else None
        if unknown is not None:
            said = {"known": ", ".join(known), "name": repr(str(unknown)[:64])}  # last: braces in it are not replaced
            raise PydanticCustomError("extra_forbidden", "{name} is no field of it; it takes {known}", said)
        return value


def text_parts(*types: str) -> Callable[[Any], Any]:
    """A check that the parts of a message are text. The error names another type; such a part is never fetched."""

    def check(value: Any) -> Any:
        for part in value if isinstance(value, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in types:
                said = {"types": " or ".join(types), "kind": repr(kind[:64])}  # the client's text is filled in last
                message = "the model reads text alone, and no part of type {kind}; send parts of type {types}"
                raise PydanticCustomError("text_only", message, said)
        return value

    return check


class TextPart(ExtensibleModel):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(fail_fast=True), BeforeValidator(text_parts("text"))]
