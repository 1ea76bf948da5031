"""A model that recites, so that a test knows each byte of what the command line is given to show."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.loading.load import LoadedModel
from outrider.runners.base import Scores
from outrider.testing.toy import ByteTokenizer, ToyRunner

SONG = "one two three, five two three, nine two three, done two three."


class Reciter(ToyRunner):
    """After a prompt that ends in a colon and a space: this answer, then the end of text."""

    def __init__(self, answer: str, *, context: int = 512) -> None:
        super().__init__(257, context=context, order=24)
        self.book = [*b": ", *answer.encode(), 256]

    def _make_row(self, tail: tuple[int, ...]) -> Tensor:
        """The byte that follows the longest end of the tail that the book has."""
        row = torch.full((self.vocab_size,), -9.0)
        for size in range(len(tail), 0, -1):
            end = list(tail[-size:])
            for i in range(len(self.book) - size):
                if self.book[i : i + size] == end:
                    row[self.book[i + size]] = 9.0
                    return row
        return row


class ChatBytes(ByteTokenizer):
    """Writes a conversation as lines of `role: content`."""

    def __init__(self) -> None:
        self.chats: list[list[Mapping[str, str]]] = []
        self.template = ""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def template_text(self) -> str:
        return self.template

    def encode_chat(self, messages: Seq[Mapping[str, str]]) -> list[int]:
        self.chats.append(list(messages))
        return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode() + b"assistant: ")


@dataclass
class Stage:
    """What the fake loader hands out, and what it was asked for."""

    answer: str = SONG
    context: int = 512
    tokenizer: ChatBytes = field(default_factory=ChatBytes)
    asked: dict[str, Any] = field(default_factory=dict)
    before_score: Callable[[int], None] = lambda passes: None
    """Called with the number of passes so far, before each."""

    def load(self, model: str, **options: Any) -> LoadedModel:
        self.asked = {"model": model, **options}
        target = Reciter(self.answer, context=self.context)
        score, passes = target.score, iter(range(1 << 20))

        def watched(*given: Any) -> Scores:
            self.before_score(next(passes))
            return score(*given)

        target.score = watched
        return LoadedModel(model, Path("nowhere"), target, self.tokenizer, "float32")  # type: ignore[arg-type]


@dataclass
class Ran:
    code: int
    out: str
    err: str


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
