"""What whole answers and streams of every route share; chat.py and completions.py say what a choice looks like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from outrider.core.sampling import Token
from outrider.engine.events import Event
from outrider.server.telling import Head, Told, Wishes, metrics, usage
from outrider.server.tokens import TokenTexts
from outrider.server.translate import Asked


class AnswerTeller(ABC):
    """Puts one request's answer together from its events."""

    def __init__(self, head: Head, asked: Asked, wishes: Wishes, texts: TokenTexts) -> None:
        self.head, self.asked, self.wishes, self.texts = head, asked, wishes, texts
        self.told = [Told() for _ in range(len(asked.prompts) * asked.n)]

    def add(self, index: int, event: Event) -> None:
        """Take an event. A Problem where the text failed."""
        self.told[index].add(event)

    @property
    def at_length(self) -> bool:
        """Whether the answer tells of every token, which takes long enough to write for others to notice."""
        return self.wishes.logprobs is not None or self.wishes.provenance

    def end(self) -> Iterator[dict[str, Any]]:
        """The chunk after all choices have ended, where it is wanted."""
        if self.wishes.usage:
            yield self.head.wrap([], chunk=True) | {"usage": self._usage()}

    def answer(self) -> dict[str, Any]:
        """The whole answer, when every text has ended."""
        choices = [self._choice(i, told) for i, told in enumerate(self.told)]
        figures = metrics([told.stats for told in self.told])
        return self.head.wrap(choices) | {"usage": self._usage(), "metrics": figures}

    @abstractmethod
    def _choice(self, index: int, told: Told) -> dict[str, Any]:
        """One choice of a whole answer."""

    def _wrap(self, index: int, said: dict[str, Any], **more: Any) -> dict[str, Any]:
        """A chunk with one choice in it: what it says, and what is told beside that."""
        choice = {"index": index} | said | {"logprobs": None, "finish_reason": None} | more
        chunk = self.head.wrap([choice], chunk=True)
        return chunk | {"usage": None} if self.wishes.usage else chunk

    def _last(self, index: int, said: dict[str, Any], reason: str | None, stop: Token | str | None) -> dict[str, Any]:
        """The chunk that ends a choice, with its figures."""
        ended = self._wrap(index, said, finish_reason=reason, stop_reason=stop)
        return ended | {"metrics": metrics([self.told[index].stats])}

    def _usage(self) -> dict[str, Any]:
        return usage(map(len, self.asked.prompts), self.told, self.asked.n)
