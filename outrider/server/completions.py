"""Events to /v1/completions: whole answers and chunks of a stream, the prompt echoed where asked for. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import Token
from outrider.engine.events import Event
from outrider.engine.text import TextStream
from outrider.server.teller import AnswerTeller
from outrider.server.telling import Head, Told, Wishes, provenance
from outrider.server.tokens import TokenTexts, bounded
from outrider.server.translate import Asked

Scored = tuple[Token, str, TokenLogprob | None]
"""A token, the text it adds, and its log-probability, which a prompt's first token has none of."""
Lists = dict[str, list[Any]]
"""OpenAI's four lists of log-probabilities."""
ECHO_PIECE = 256  # tokens of an echo in one chunk of a stream


class Echo:
    """A prompt to be told before its choices: its text and, where they are wanted, its tokens' log-probabilities.

    These are spelled out once, however many choices repeat them.
    """

    def __init__(
        self, text: str | None, tokens: Seq[Token], scores: Seq[TokenLogprob] | None, texts: TokenTexts
    ) -> None:
        """text: the prompt as the client wrote it; None: it came as ids."""
        stream = TextStream(texts.tokenizer)
        pieces = [stream.push(token) for token in tokens]
        pieces[-1] += stream.flush()
        self.text = "".join(pieces) if text is None else text
        self.lists: Lists | None = None
        self.length = sum(map(len, pieces))
        """The offset at which its choices begin."""
        if scores is not None:
            self.lists = spell(zip(tokens, pieces, (None, *scores), strict=True), 0, texts)

    def parts(self) -> Iterator[tuple[str, Lists | None]]:
        """For a stream: the text, and the lists a piece at a time."""
        count = len(self.lists["tokens"]) if self.lists else 1
        for at in range(0, count, ECHO_PIECE):
            piece = {name: values[at : at + ECHO_PIECE] for name, values in (self.lists or {}).items()}
            yield "" if at else self.text, piece or None


class CompletionTeller(AnswerTeller):
    """Tells an answer as text, the prompt before it where it is echoed."""

    def __init__(self, head: Head, asked: Asked, wishes: Wishes, texts: TokenTexts, echoes: Seq[Echo] = ()) -> None:
        super().__init__(head, asked, wishes, texts)
        self.echoes = echoes
        self._offsets = [echo.length for echo in echoes for _ in range(asked.n)] or [0] * len(self.told)
        self._only_echo = not asked.requests

    def begin(self) -> Iterator[dict[str, Any]]:
        """The chunks before any text: the prompts, where they are echoed."""
        for index in range(len(self.told)) if self.echoes else ():
            for text, lists in self.echoes[index // self.asked.n].parts():
                yield self._wrap(index, {"text": text}, logprobs=lists)
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
        lists = self._logprobs(index, _scored(told.events))
        if echo and echo.lists and lists:
            lists = {name: [*echo.lists[name], *values] for name, values in lists.items()}
        more = {"provenance": [each for event in told.events for each in provenance(event)]}
        return {
            "index": index,
            "text": (echo.text if echo else "") + told.text,
            "logprobs": lists,
            "finish_reason": told.finish or "length",
            "stop_reason": told.events[-1].stop_reason if told.events else None,
            **(more if self.wishes.provenance else {}),
        }

    def _logprobs(self, index: int, scored: Seq[Scored]) -> Lists | None:
        """What is told of a choice's next tokens; offsets go on from the tokens told before."""
        if self.wishes.logprobs is None:
            return None
        at = self._offsets[index]
        self._offsets[index] += sum(len(piece) for _, piece, _ in scored)
        return spell(scored, at, self.texts)


def spell(scored: Iterable[Scored], at: int, texts: TokenTexts) -> Lists:
    """Tokens that follow each other in a text from the offset `at` on."""
    out: Lists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, piece, score in scored:
        out["tokens"].append(texts.text(token))
        out["token_logprobs"].append(None if score is None else bounded(score.logprob))
        out["top_logprobs"].append(None if score is None else _top(score, texts))
        out["text_offset"].append(at)
        at += len(piece)
    return out


def _top(score: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """The likeliest tokens and the one that stands; of two that look the same, the likelier counts."""
    out: dict[str, float] = {}
    for token, value in sorted((*score.top, (score.token, score.logprob)), key=lambda each: -each[1]):
        out.setdefault(texts.text(token), bounded(value))
    return out


def _scored(events: Iterable[Event]) -> list[Scored]:
    return [
        (token, piece, score)
        for event in events
        for token, piece, score in zip(event.tokens, event.pieces, event.logprobs, strict=False)
    ]
