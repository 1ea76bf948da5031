"""Events to /v1/completions: whole answers and chunks of a stream, the prompt echoed where asked for. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from outrider.core import Token, TokenLogprob
from outrider.engine.events import Event
from outrider.engine.text import TextStream
from outrider.server.teller import AnswerTeller
from outrider.server.telling import Head, Told, Wishes, provenance
from outrider.server.tokens import TokenTexts, bounded
from outrider.server.translate import Asked

Scored = tuple[Token, str, TokenLogprob | None]
"""A token, the text it adds, and its log-probability, which a prompt's first token has none of."""


class Echo:
    """A prompt to be told before its choices: its text and, where they are wanted, its tokens' log-probabilities."""

    def __init__(
        self, text: str | None, tokens: Seq[Token], scores: Seq[TokenLogprob] | None, texts: TokenTexts
    ) -> None:
        """text: the prompt as the client wrote it; None: it came as ids."""
        stream = TextStream(texts.tokenizer)
        pieces = [stream.push(token) for token in tokens]
        pieces[-1] += stream.flush()
        self.text = "".join(pieces) if text is None else text
        self.scored: list[Scored] = []
        if scores is not None:
            self.scored = list(zip(tokens, pieces, (None, *scores), strict=True))


class CompletionTeller(AnswerTeller):
    """Tells an answer as text, the prompt before it where it is echoed."""

    def __init__(self, head: Head, asked: Asked, wishes: Wishes, texts: TokenTexts, echoes: Seq[Echo] = ()) -> None:
        super().__init__(head, asked, wishes, texts)
        self.echoes = echoes
        self._offsets = [0] * len(self.told)
        self._only_echo = not asked.requests

    def begin(self) -> Iterator[dict[str, Any]]:
        """The chunks before any text: the prompts, where they are echoed."""
        for index in range(len(self.told)) if self.echoes else ():
            echo = self.echoes[index // self.asked.n]
            yield self._wrap(index, {"text": echo.text}, logprobs=self._logprobs(index, echo.scored))
            if self._only_echo:
                yield self._last(index, {"text": ""}, "length", None)

    def chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        """The chunks of a stream that an event makes."""
        if event.text or (event.tokens and (self.wishes.logprobs is not None or self.wishes.provenance)):
            more = {"provenance": provenance(event)} if self.wishes.provenance else {}
            scored = self._logprobs(index, _scored([event]))
            yield self._wrap(index, {"text": event.text}, logprobs=scored, **more)
        if event.finish:
            yield self._last(index, {"text": ""}, event.finish, event.stop_reason)

    def _choice(self, index: int, told: Told) -> dict[str, Any]:
        echo = self.echoes[index // self.asked.n] if self.echoes else None
        scored = [*(echo.scored if echo else ()), *_scored(told.events)]
        more = {"provenance": [each for event in told.events for each in provenance(event)]}
        return {
            "index": index,
            "text": (echo.text if echo else "") + told.text,
            "logprobs": self._logprobs(index, scored),
            "finish_reason": told.finish or "length",
            "stop_reason": told.events[-1].stop_reason if told.events else None,
            **(more if self.wishes.provenance else {}),
        }

    def _logprobs(self, index: int, scored: Iterable[Scored]) -> dict[str, Any] | None:
        """OpenAI's four lists; offsets go on from the tokens told before."""
        if self.wishes.logprobs is None:
            return None
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, piece, score in scored:
            out["tokens"].append(self.texts.text(token))
            out["token_logprobs"].append(None if score is None else bounded(score.logprob))
            out["top_logprobs"].append(None if score is None else self._top(score))
            out["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(piece)
        return out

    def _top(self, score: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the one that stands; of two that look the same, the likelier counts."""
        out: dict[str, float] = {}
        for token, value in sorted((*score.top, (score.token, score.logprob)), key=lambda each: -each[1]):
            out.setdefault(self.texts.text(token), bounded(value))
        return out


def _scored(events: Iterable[Event]) -> list[Scored]:
    return [
        (token, piece, score)
        for event in events
        for token, piece, score in zip(event.tokens, event.pieces, event.logprobs, strict=False)
    ]
