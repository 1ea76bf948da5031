"""Recognizes the chunks of a stream that differ from a parsed chunk only in their text, without parsing them.

An engine writes all chunks of a stream alike except for their text. Where the bytes before and after the text equal
those of a parsed chunk, and the bytes between them are a JSON string, only the text differs: the chunk need not be
parsed, and is passed on as it is, or with the served name of the model in place of the replica's.
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
    """The bytes around the text in chunks like one that was parsed."""

    before: bytes
    """The bytes of an event up to its text."""
    after: bytes
    """From the end of its text to the end of the event."""
    sent_before: bytes
    """Sent in place of `before`: with the served name of the model."""

    def passed(self, data: bytes) -> bytes | None:
        """The bytes for the client where `data` is only complete chunks of this kind; None otherwise."""
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
    """The chunks like this one; None where it is not plain: it has no text, more than text, or ends its choice.

    data: the data of its event. value: that data, parsed. name: what clients call the model.
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
    # check the result: with another text and the served name, the JSON must differ only in these
    other = json.loads(f"{ours}\\u0000{after}")
    if _text_of(other) != "\0" or other != _with_text(value, "\0") | ({"model": name} if ours != before else {}):
        return None
    return PlainChunks(f"data: {before}".encode(), f"{after}\n\n".encode(), f"data: {ours}".encode())


def _text_of(value: dict[str, Any]) -> str | None:
    """The text of a chunk with one choice, not ended, and no usage, metrics or error; None for any other chunk."""
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
