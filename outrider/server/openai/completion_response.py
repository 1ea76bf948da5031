"""From events to the responses of /v1/completions, with the prompt echoed where requested. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

from outrider.core.outputs import TokenLogprob
from outrider.core.sampling import Token
from outrider.engine.events import Event
from outrider.engine.text import TextStream
from outrider.server.openai.response_builder import (
    ChoiceBuffer,
    ResponseBuilder,
    ResponseMeta,
    ResponseOptions,
    provenance_of_event,
)
from outrider.server.openai.token_texts import TokenTexts, clamp_logprob
from outrider.server.openai.translate import TranslatedRequest

ScoredToken = tuple[Token, str, TokenLogprob | None]
"""A token, the text it adds, and its log-probability; None for a prompt's first token."""
LogprobLists = dict[str, list[Any]]
"""OpenAI's four lists of log-probabilities."""
ECHO_CHUNK_TOKENS = 256  # tokens of an echo in one chunk of a stream


class EchoedPrompt:
    """A prompt repeated before its choices: its text and, where wanted, its tokens' log-probabilities.

    The lists are made once, however many choices repeat them.
    """

    def __init__(
        self, text: str | None, tokens: Seq[Token], scores: Seq[TokenLogprob] | None, texts: TokenTexts
    ) -> None:
        """text: the prompt as the client wrote it; None: it was sent as token ids."""
        stream = TextStream(texts.tokenizer)
        pieces = [stream.push(token) for token in tokens]
        pieces[-1] += stream.flush()
        self.text = "".join(pieces) if text is None else text
        self.lists: LogprobLists | None = None
        self.length = sum(map(len, pieces))
        """The text offset at which its choices begin."""
        if scores is not None:
            self.lists = logprob_lists(zip(tokens, pieces, (None, *scores), strict=True), 0, texts)

    def parts(self) -> Iterator[tuple[str, LogprobLists | None]]:
        """For a stream: the text, and the lists in pieces of ECHO_CHUNK_TOKENS."""
        count = len(self.lists["tokens"]) if self.lists else 1
        for at in range(0, count, ECHO_CHUNK_TOKENS):
            piece = {name: values[at : at + ECHO_CHUNK_TOKENS] for name, values in (self.lists or {}).items()}
            yield "" if at else self.text, piece or None


class CompletionResponseBuilder(ResponseBuilder):
    """Builds text, after the prompt where it is echoed."""

    def __init__(
        self,
        meta: ResponseMeta,
        request: TranslatedRequest,
        options: ResponseOptions,
        texts: TokenTexts,
        echoes: Seq[EchoedPrompt] = (),
    ) -> None:
        super().__init__(meta, request, options, texts)
        self.echoes = echoes
        self._offsets = [echo.length for echo in echoes for _ in range(request.n)] or [0] * len(self.buffers)
        self._only_echo = not request.requests

    def first_chunks(self) -> Iterator[dict[str, Any]]:
        """The prompts, where they are echoed."""
        for index in range(len(self.buffers)) if self.echoes else ():
            for text, lists in self.echoes[index // self.request.n].parts():
                yield self._chunk(index, {"text": text}, logprobs=lists)
            if self._only_echo:
                yield self._final_chunk(index, {"text": ""}, "length", None)

    def event_chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        if event.text or (event.tokens and (self.options.logprobs is not None or self.options.provenance)):
            more = {"provenance": provenance_of_event(event)} if self.options.provenance else {}
            scored = self._logprobs(index, _scored([event]))
            yield self._chunk(index, {"text": event.text}, logprobs=scored, **more)
        if event.finish:
            yield self._final_chunk(index, {"text": ""}, event.finish, event.stop_reason)

    def _choice(self, index: int, buffer: ChoiceBuffer) -> dict[str, Any]:
        echo = self.echoes[index // self.request.n] if self.echoes else None
        lists = self._logprobs(index, _scored(buffer.events))
        if echo and echo.lists and lists:
            lists = {name: [*echo.lists[name], *values] for name, values in lists.items()}
        more: dict[str, Any] = {}
        if self.options.provenance:
            more["provenance"] = [each for event in buffer.events for each in provenance_of_event(event)]
        return {
            "index": index,
            "text": (echo.text if echo else "") + buffer.text,
            "logprobs": lists,
            "finish_reason": buffer.finish or "length",
            "stop_reason": buffer.events[-1].stop_reason if buffer.events else None,
            **more,
        }

    def _logprobs(self, index: int, scored: Seq[ScoredToken]) -> LogprobLists | None:
        """The lists of a choice's next tokens; offsets continue from the tokens before."""
        if self.options.logprobs is None:
            return None
        at = self._offsets[index]
        self._offsets[index] += sum(len(piece) for _, piece, _ in scored)
        return logprob_lists(scored, at, self.texts)


def logprob_lists(scored: Iterable[ScoredToken], at: int, texts: TokenTexts) -> LogprobLists:
    """OpenAI's lists for consecutive tokens; the first is at text offset `at`."""
    out: LogprobLists = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, piece, score in scored:
        out["tokens"].append(texts.text(token))
        out["token_logprobs"].append(None if score is None else clamp_logprob(score.logprob))
        out["top_logprobs"].append(None if score is None else _top(score, texts))
        out["text_offset"].append(at)
        at += len(piece)
    return out


def _top(score: TokenLogprob, texts: TokenTexts) -> dict[str, float]:
    """The most likely tokens and the token itself; of two with the same text, the more likely one."""
    out: dict[str, float] = {}
    for token, value in sorted((*score.top, (score.token, score.logprob)), key=lambda each: -each[1]):
        out.setdefault(texts.text(token), clamp_logprob(value))
    return out


def _scored(events: Iterable[Event]) -> list[ScoredToken]:
    return [
        (token, piece, score)
        for event in events
        for token, piece, score in zip(event.tokens, event.pieces, event.logprobs, strict=False)
    ]
