"""From chat messages to a prompt, by the model's own chat template.

A template is untrusted code: it runs in Jinja's sandbox, gets JSON values only, and its output
is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from outrider.core.errors import RequestError
from outrider.core.sampling import MAX_TOKENS

Message = Mapping[str, Any]

MAX_RENDERED_CHARS = 8 * MAX_TOKENS  # of a rendered prompt; no context is longer


class ChatTemplate:
    """A compiled chat template. Raises RequestError where it cannot be compiled."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"this model's chat template is broken: {error}; send a plain prompt instead") from error

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt. Raises RequestError for whatever the template raises."""
        written: list[str] = []
        length = 0
        try:
            for part in self._template.generate(values):
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    break
                written.append(part)
        except Exception as error:  # untrusted code may raise anything
            raise RequestError(f"this model's chat template refuses these messages: {error}") from error
        if length > MAX_RENDERED_CHARS:
            raise RequestError(
                f"the conversation is longer than {MAX_RENDERED_CHARS} characters; send fewer or shorter messages"
            )
        return "".join(written)


def json_value(value: Any, what: str) -> Any:
    """The value converted to plain JSON types, which have no methods a template could misuse."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} must be JSON: strings, numbers, lists and objects ({error})") from error


def check_messages(messages: Seq[Message]) -> list[dict[str, Any]]:
    """The messages as a template expects them: a role and a content, both strings.

    Content given as a list of text parts is joined by line breaks. Content may be left
    out beside tool calls. All other keys are passed on. Raises RequestError for anything else.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Seq) or not messages:
        raise RequestError('messages must be a list such as [{"role": "user", "content": "Hello"}], with one at least')
    return [_check_message(message, f"message {i}") for i, message in enumerate(messages)]


def _check_message(message: Message, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}: role must be a string such as user, assistant or system, got {role!r}")
    if content is None and message.get("tool_calls"):
        content = ""
    elif isinstance(content, (list, tuple)):
        content = "\n".join(_part_text(part, where) for part in content)
    elif not isinstance(content, str):
        raise RequestError(f"{where}: content must be a string or a list of text parts, got {type(content).__name__}")
    return json_value({**message, "role": role, "content": content}, where)


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RequestError(
            f'{where}: a content part of type {kind!r} cannot be read; what can: {{"type": "text", "text": "..."}}'
        )
    return part["text"]


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as Transformers sets it up for chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _tojson
    made.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_SafeNamespace)
    return made


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without Jinja's escaping of <, > and &."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's tokens for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _SafeNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, such as Python's own."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace in a chat template may not hold {name!r}")
