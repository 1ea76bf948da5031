"""LLM for asyncio: many callers at once, their texts decoded as one batch on a thread of its own."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, overload

from outrider.core.errors import OutriderError, RequestError
from outrider.core.sampling import SamplingParams, Token, derive_seeds
from outrider.engine.arguments import (
    Conversation,
    Message,
    Params,
    Prompt,
    params_for,
    split_conversations,
    split_prompts,
)
from outrider.engine.events import Event
from outrider.engine.request import CheckedRequest, Request, validate_request
from outrider.engine.results import Result, build_result
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.models.tokenizer import Tokenizer
from outrider.server.queue.engine_thread import EngineThread
from outrider.server.queue.jobs import Job, Unavailable
from outrider.server.queue.local_engine import LocalEngine

CLOSED = "this AsyncLLM is closed; make a new one"


class AsyncLLM:
    """A model and a drafter that many coroutines ask at once.

        async with AsyncLLM("demo") as llm:
            one, two = await asyncio.gather(llm.agenerate("Rain"), llm.agenerate("Sun", max_tokens=8))

    A call that is cancelled frees what it holds within a round. Any event loop may call it.
    """

    def __init__(self, model: str | os.PathLike[str] | LoadedModel, **options: Any) -> None:
        """Loads the model before it returns. `options` are those of `LLM`."""
        self.llm = LLM(model, **options)
        """The LLM that runs on the engine's thread. Other threads may use its tokenizer, but not call it."""
        self._thread = EngineThread(lambda: LocalEngine(self.llm), max_queue=sys.maxsize)
        self._jobs: set[Job] = set()
        self._thread.start()
        self._thread.loaded.wait()

    @overload
    async def agenerate(self, prompts: str | list[Token], params: Params = None, **options: Any) -> Result: ...
    @overload
    async def agenerate(
        self, prompts: list[str] | list[list[Token]], params: Params = None, **options: Any
    ) -> list[Result]: ...
    async def agenerate(self, prompts: Any, params: Params = None, **options: Any) -> Result | list[Result]:
        """Complete one prompt, or several; `options` are those of `LLM.generate`, but for progress."""
        return await self._answer(*split_prompts(prompts), params, options)

    @overload
    async def achat(self, messages: Conversation, params: Params = None, **options: Any) -> Result: ...
    @overload
    async def achat(
        self, messages: list[str] | Seq[Seq[Message]], params: Params = None, **options: Any
    ) -> list[Result]: ...
    async def achat(self, messages: Any, params: Params = None, **options: Any) -> Result | list[Result]:
        """Answer a conversation, or several, as `LLM.chat` does."""
        return await self._answer(*split_conversations(messages), params, options)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[Event, None]:
        """The events of one text as they come. Closing the generator cancels the text."""
        request = await self._request(prompt, params, options)
        if request.params.n != 1:
            raise RequestError(f"astream gives one text, got n={request.params.n}; use agenerate for several")
        async with self._submit(self._sequences(request)) as job:
            async for _, event in job:
                if isinstance(event, Event):
                    yield event

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm.get_tokenizer()

    def close(self) -> None:
        """Cancel what runs, end the thread and free the model. Nothing can be asked afterwards."""
        self._thread.drain(math.inf)  # refuses new requests
        for job in list(self._jobs):
            job.cancel()
            job.fail(OutriderError(CLOSED))
        self._thread.stopped.wait()
        self.llm.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:
        return f"<AsyncLLM: {self.llm!r}>"

    async def _answer(
        self, prompts: list[Any], single: bool, params: Params, options: dict[str, Any]
    ) -> Result | list[Result]:
        """Run prompts or conversations to their end, beside those of other callers."""
        if not prompts:
            return []
        pairs = list(zip(prompts, params_for(params, len(prompts)), strict=True))
        requests = [await self._request(prompt, each, options) for prompt, each in pairs]
        groups = [self._sequences(request) for request in requests]
        sequences = [sequence for group in groups for sequence in group]
        events: list[list[Event]] = [[] for _ in sequences]
        async with self._submit(sequences) as job:
            async for i, event in job:
                if isinstance(event, Event):
                    events[i].append(event)
        made = iter([build_result(*each) for each in zip(events, map(_seed, sequences), strict=True)])
        results = [[next(made) for _ in group] for group in groups]
        firsts = [replace(first, others=tuple(others)) for first, *others in results]
        return firsts[0] if single else firsts

    async def _request(self, prompt: Prompt, params: Any, options: dict[str, Any]) -> Request:
        """Make the request in another thread: tokenizing and compiling grammars would block the event loop."""
        return await asyncio.to_thread(self.llm.request, prompt, params, **options)

    def _sequences(self, request: Request) -> list[CheckedRequest]:
        """One checked request with n = 1 for each of the request's n texts, with that text's seed."""
        target = self.llm.engine.target
        each = [replace(request.params, n=1, seed=seed) for seed in derive_seeds(request.params)]
        return [validate_request(replace(request, params=params), target) for params in each]

    @asynccontextmanager
    async def _submit(self, sequences: list[CheckedRequest]) -> AsyncIterator[Job]:
        """Submit the sequences as a job, cancelled when the block ends. OutriderError where the thread has ended."""
        job = None
        try:
            job = self._thread.submit(sequences)
            self._jobs.add(job)
            yield job
        except Unavailable as error:
            failure = self._thread.failure
            why = CLOSED if failure is None else f"the engine has stopped after a fault ({failure!r}); make a new one"
            raise OutriderError(why) from failure or error
        finally:
            if job is not None:
                self._jobs.discard(job)
                job.cancel()


def _seed(sequence: CheckedRequest) -> int:
    return sequence.request.params.seed or 0
