"""Chunks of a stream that differ from one that was parsed in their text alone: known without parsing them.

An engine writes every chunk of a stream alike, around another text. Where the bytes before and after the text are those
of a chunk that was parsed, and what is between is a JSON string, the chunk is what that one was, with another text:
nothing of it need be read, and it is passed on as it came, or with the other name of the model in it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_PLAIN = r'[^"\\\x00-\x1f]*'
_STRING = rf'{_PLAIN}(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}){_PLAIN})*'
_TEXT = re.compile(rf'"(?:text|content)": ?"({_STRING})"')
_MODEL = re.compile(rf'"model": ?"({_STRING})"')
_STRING_BYTES = re.compile(_STRING.encode())
_FINISHED = ("usage", "metrics", "error")


@dataclass(frozen=True, slots=True)
class PlainChunks:
    """Chunks like one that was parsed."""

    before: bytes
    """Of an event, up to its text."""
    after: bytes
    """From the end of its text to the end of the event."""
    sent_before: bytes
    """Sent in place of `before`: with our name of the model."""

    def passed(self, data: bytes) -> bytes | None:
        """What the client is sent where all of these are such chunks, and whole; None otherwise."""
        if not data.endswith(self.after):
            return None
        first, last = len(self.before), len(self.after) - 2
        events = data[:-2].split(b"\n\n")
        for event in events:
            if not (event.startswith(self.before) and event.endswith(self.after[:-2])):
                return None
            if _STRING_BYTES.fullmatch(event, first, len(event) - last) is None:
                return None
        if not data.isascii():
            try:
                data.decode()
            except UnicodeDecodeError:
                return None
        if self.sent_before == self.before:
            return data
        return b"".join(b"%b%b\n\n" % (self.sent_before, event[first:]) for event in events)


def plain_chunks(data: str, value: dict[str, Any], name: str) -> PlainChunks | None:
    """Those like this one; None where it is not plain: more or less than text, or its end.

    data: of its event, and value: its JSON. name: what clients call the model.
    """
    if _text_of(value) is None or (found := _TEXT.search(data)) is None:
        return None
    before, after = data[: found.start(1)], data[found.end(1) :]
    ours = before
    if value.get("model") not in (None, name):
        model = _MODEL.search(before)
        if model is None:
            return None
        ours = f"{before[: model.start(1)]}{json.dumps(name)[1:-1]}{before[model.end(1) :]}"
    # the judge of all that: with another text, and our name, the JSON is the same but for those
    other = json.loads(f"{ours}\\u0000{after}")
    if _text_of(other) != "\0" or other != _with_text(value, "\0") | ({"model": name} if ours != before else {}):
        return None
    return PlainChunks(f"data: {before}".encode(), f"{after}\n\n".encode(), f"data: {ours}".encode())


def _text_of(value: dict[str, Any]) -> str | None:
    """The text of a chunk that has one choice, not ended, and nothing of a response's end."""
    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or any(value.get(key) for key in _FINISHED):
        return None
    choice = choices[0]
    if not isinstance(choice, dict) or choice.get("finish_reason"):
        return None
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    return text if isinstance(text, str) else None


def _with_text(value: dict[str, Any], text: str) -> dict[str, Any]:
    (choice,) = value["choices"]
    delta = choice.get("delta")
    new = {"delta": delta | {"content": text}} if isinstance(delta, dict) else {"text": text}
    return value | {"choices": [choice | new]}
