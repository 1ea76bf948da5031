"""From generated text to content and tool calls, incrementally. Nothing it reads is executed."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.grammar.tools import CALL_CLOSE, CALL_OPEN, ToolFormat

_CALL_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_OTHER_JSON = re.compile(r'\{\s*(?:[^\s"]|"(?!n?$|na$|nam$|name$|name"))')  # its first key is not `name`
_MAX_HEAD_CHARS = 256  # beyond, the text is no call


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A part of one call: the first has its id and name, the others pieces of its arguments."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""

    def as_delta(self) -> dict[str, Any]:
        """An entry of a chunk's `delta.tool_calls`."""
        if not self.id:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **self.as_call()}

    def as_call(self) -> dict[str, Any]:
        """An entry of `message.tool_calls`, where the call is complete."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class ParsedOutput:
    """The content and calls in a piece of text."""

    content: str
    calls: list[ToolDelta]


def parse_tool_calls(text: str, form: ToolFormat, *, new_id: Callable[[], str] | None = None) -> ParsedOutput:
    """Parse a complete text: its content, and each call in one piece."""
    parser = ToolParser(form, new_id=new_id)
    parts = [parser.push(text), parser.finish()]
    calls: dict[int, ToolDelta] = {}
    for delta in (delta for part in parts for delta in part.calls):
        before = calls.get(delta.index)
        calls[delta.index] = replace(before, arguments=before.arguments + delta.arguments) if before else delta
    return ParsedOutput("".join(part.content for part in parts), list(calls.values()))


class ToolParser:
    """Reads text a character at a time, so that the result does not depend on how it is split.

    Text that begins like a call but is none is content, and nothing of it is lost.
    """

    def __init__(self, form: ToolFormat, *, new_id: Callable[[], str] | None = None) -> None:
        self._open, self._close = (CALL_OPEN, CALL_CLOSE) if form == "hermes" else ("", "}")
        self._new_id = new_id or (lambda: f"call_{secrets.token_hex(12)}")
        self._read = self._text if self._open else self._start
        """The state: the method that takes the next character."""
        self._held = ""
        """Text that may begin a call; never long."""
        self._between = False
        """Whether only whitespace has followed the last call."""
        self._space: list[str] = []
        """That whitespace: content, unless another call follows."""
        self._depth, self._quote, self._escaped = 0, False, False
        self._content: list[str] = []  # lists of pieces, here and in calls: appending to a string copies it
        self._calls: list[tuple[ToolDelta, list[str]]] = []
        self.calls = 0
        """The number of calls that have begun."""

    def push(self, text: str) -> ParsedOutput:
        """The content and calls that this piece completes."""
        for char in text:
            self._read(char)
        return self._take()

    def finish(self) -> ParsedOutput:
        """The text that was held back, once the text has ended."""
        if self._read == self._head:
            self._content += [self._open, self._held]
        elif self._read == self._text and self._held:
            self._content += [*self._space, self._held]
        self._held = ""
        self._space.clear()
        return self._take()

    def _take(self) -> ParsedOutput:
        calls = [replace(delta, arguments="".join(pieces)) for delta, pieces in self._calls]
        out = ParsedOutput("".join(self._content), calls)
        self._content, self._calls = [], []
        return out

    def _start(self, char: str) -> None:
        """Without marks, a text that begins with a brace is a call."""
        self._read = self._head if char == "{" else self._text
        self._read(char)

    def _text(self, char: str) -> None:
        """Content, up to a mark. A possible beginning of a mark is held back, and so is whitespace between calls."""
        self._held += char
        marked = bool(self._open) and self._held.endswith(self._open)
        mark = len(self._open) if marked else _overlap(self._held, self._open)
        at = len(self._held) - mark
        text, self._held = self._held[:at], self._held[at:]
        if self._between and not text.strip():
            self._space.append(text)
        else:
            self._content += [*self._space, text]
            self._space.clear()
            self._between = False
        if marked:
            self._held = ""
            self._space.clear()
            self._read = self._head

    def _head(self, char: str) -> None:
        self._held += char
        found = _CALL_HEAD.fullmatch(self._held) if char == "{" else None
        if found:
            self._calls.append((ToolDelta(self.calls, id=self._new_id(), name=found[1]), []))
            self.calls += 1
            self._held, self._depth = "", 0
            self._read = self._arguments
            self._read(char)
        elif len(self._held) > _MAX_HEAD_CHARS or self._is_no_call():
            self._content += [self._open, self._held]
            self._held, self._between = "", False
            self._read = self._text

    def _is_no_call(self) -> bool:
        return self._held.endswith(self._close) if self._open else bool(_OTHER_JSON.match(self._held))

    def _arguments(self, char: str) -> None:
        """One JSON object, to its closing bracket; brackets inside strings do not count."""
        if self._quote:
            self._quote = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        else:
            self._quote = char == '"'
            self._depth += (char in "{[") - (char in "}]")
        if not self._calls:  # the call began in an earlier piece
            self._calls.append((ToolDelta(self.calls - 1), []))
        self._calls[-1][1].append(char)
        if not self._depth and not self._quote:
            self._read = self._tail

    def _tail(self, char: str) -> None:
        """The call's closing brace and mark, which are dropped."""
        self._held = (self._held + char)[-len(self._close) :]
        if self._held == self._close:
            self._held, self._between = "", True
            self._read = self._text


def _overlap(text: str, mark: str) -> int:
    """The length of the longest beginning of the mark that the text ends with."""
    if mark[:1] not in text:  # as a rule
        return 0
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
