"""From the text of an answer back to content and tool calls, piece by piece as it comes. Nothing it reads is run."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from outrider.grammar.tools import CLOSE, OPEN, ToolFormat

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([a-zA-Z0-9_-]{1,64})"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_LONGEST_HEAD = 256  # characters; beyond, it was no call after all


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """More of one call: its id and name with the first, pieces of its arguments with the rest."""

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
        """An entry of `message.tool_calls`, where the call is whole."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class Parsed:
    """What a piece of text brought."""

    content: str
    calls: list[ToolDelta]


def parse_tool_calls(text: str, form: ToolFormat, *, new_id: Callable[[], str] | None = None) -> Parsed:
    """A whole answer at once: its content, and each call in one piece."""
    parser = ToolParser(form, new_id=new_id)
    parts = [parser.push(text), parser.finish()]
    whole: dict[int, ToolDelta] = {}
    for delta in (delta for part in parts for delta in part.calls):
        before = whole.get(delta.index)
        whole[delta.index] = replace(before, arguments=before.arguments + delta.arguments) if before else delta
    return Parsed("".join(part.content for part in parts), list(whole.values()))


class ToolParser:
    """Reads an answer a character at a time, so that where it was cut into pieces makes no difference.

    What begins like a call and turns out to be none is content, not a letter of it lost.
    """

    def __init__(self, form: ToolFormat, *, new_id: Callable[[], str] | None = None) -> None:
        self._open, self._close = (OPEN, CLOSE) if form == "hermes" else ("", "}")
        self._new_id = new_id or (lambda: f"call_{secrets.token_hex(12)}")
        self._read = self._text if self._open else self._start
        """What the next character is part of."""
        self._held = ""
        """Text that may turn out to begin a call; never long."""
        self._between = False
        """Nothing but space has come since the last call."""
        self._space: list[str] = []
        """That space: content too, if no other call follows."""
        self._depth, self._quoted, self._escaped = 0, False, False
        self._content: list[str] = []  # in pieces until it is taken, here and in calls: adding to a text copies it
        self._calls: list[tuple[ToolDelta, list[str]]] = []
        self.calls = 0
        """How many have begun."""

    def push(self, text: str) -> Parsed:
        """What this piece makes certain."""
        for char in text:
            self._read(char)
        return self._take()

    def finish(self) -> Parsed:
        """What was held back, once the answer has ended."""
        if self._read == self._head:
            self._content += [self._open, self._held]
        elif self._read == self._text and self._held:
            self._content += [*self._space, self._held]
        self._held = ""
        self._space.clear()
        return self._take()

    def _take(self) -> Parsed:
        calls = [replace(delta, arguments="".join(pieces)) for delta, pieces in self._calls]
        out = Parsed("".join(self._content), calls)
        self._content, self._calls = [], []
        return out

    def _start(self, char: str) -> None:
        """Without marks, a call is an answer that begins with a brace."""
        self._read = self._head if char == "{" else self._text
        self._read(char)

    def _text(self, char: str) -> None:
        """Content, up to a mark. What may be the mark's beginning is held back, and so is space between calls."""
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
        found = _HEAD.fullmatch(self._held) if char == "{" else None
        if found:
            self._calls.append((ToolDelta(self.calls, id=self._new_id(), name=found[1]), []))
            self.calls += 1
            self._held, self._depth = "", 0
            self._read = self._arguments
            self._read(char)
        elif len(self._held) > _LONGEST_HEAD or (self._open and self._held.endswith(self._close)):
            self._content += [self._open, self._held]
            self._held, self._between = "", False
            self._read = self._text

    def _arguments(self, char: str) -> None:
        """One JSON object, counted by its brackets; those inside strings do not count."""
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        else:
            self._quoted = char == '"'
            self._depth += (char in "{[") - (char in "}]")
        if not self._calls:  # the call began in a piece before
            self._calls.append((ToolDelta(self.calls - 1), []))
        self._calls[-1][1].append(char)
        if not self._depth and not self._quoted:
            self._read = self._tail

    def _tail(self, char: str) -> None:
        """The call's own closing brace and mark, which nobody needs to see."""
        self._held = (self._held + char)[-len(self._close) :]
        if self._held == self._close:
            self._held, self._between = "", True
            self._read = self._text


def _overlap(text: str, mark: str) -> int:
    """How much of the mark's beginning the text ends with."""
    if mark[:1] not in text:  # as a rule
        return 0
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
