"""What the routes share: checks of a request, its translation, and the job that answers it."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive

from outrider import __version__
from outrider.core.outputs import TokenLogprob
from outrider.engine.events import Event
from outrider.server.http.disconnect import ClientDisconnected, cancel_on_disconnect
from outrider.server.http.errors import APIError
from outrider.server.openai.chat_response import ChatResponseBuilder
from outrider.server.openai.completion_response import CompletionResponseBuilder, EchoedPrompt
from outrider.server.openai.http_responses import json_response, stream_response
from outrider.server.openai.ignored_fields import ignored_fields, refused_field
from outrider.server.openai.request_schema import (
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from outrider.server.openai.response_builder import ChoiceBuffer, ResponseBuilder, ResponseMeta, ResponseOptions
from outrider.server.openai.responses_builder import ResponsesBuilder
from outrider.server.openai.responses_request import ResponsesRequest, chat_request, renamed_error
from outrider.server.openai.structured_output import (
    UNCONSTRAINED,
    StructuredOutput,
    compile_structured_output,
    needs_structured_output,
)
from outrider.server.openai.token_texts import TokenTexts
from outrider.server.openai.translate import (
    TranslatedRequest,
    callable_tools,
    count_sequences,
    translate_chat,
    translate_completion,
)
from outrider.server.ops.request_record import CLIENT_CLOSED_REQUEST, CURRENT_RECORD
from outrider.server.queue.engine_thread import EngineThread
from outrider.server.queue.fair_queue import FairThreadPool
from outrider.server.queue.jobs import DeadlineExceeded, JobOwner, ScoreRequest
from outrider.server.settings import Settings

COMPILE_THREADS = 4  # grammars compiled at once
TOKENIZE_THREADS = 4  # prompts tokenized at once
MAX_IGNORED_NAMES = 16  # fields named in the x-outrider-ignored header; more are counted
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Whose request it is, when its time is up, and how a disconnect is noticed."""

    owner: JobOwner
    receive: Receive

    async def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Await the work; when the client leaves or time is up, cancel it: ClientDisconnected or DeadlineExceeded."""
        try:
            async with asyncio.timeout(self.owner.deadline - time.perf_counter()):
                return await cancel_on_disconnect(self.receive, work)
        except TimeoutError:
            raise DeadlineExceeded from None


class RequestChecks:
    """The checks of every request, and what is known of its client."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def check_body(self, body: CompletionFields | TokenizeRequest | DetokenizeRequest) -> dict[str, str]:
        """Headers that name the ignored fields. APIError for another model, or a field that is refused."""
        if body.model not in (None, self.settings.served_name):
            raise APIError(
                404,
                f"the model {body.model[:100]!r} does not exist; this server has {self.settings.served_name!r}",
                code="model_not_found",
                param="model",
            )
        refused = refused_field(body)
        if refused is not None:
            name, why = refused
            raise APIError(400, f"{name} is not taken from clients: {why}", param=name, code="not_allowed")
        names = ignored_fields(body)
        if names and self.settings.strict:
            raise APIError(400, f"not honoured here: {', '.join(names)}", param=names[0][:64], code="unknown_parameter")
        return {"x-outrider-ignored": _header(names)} if names else {}

    def client(self, request: Request) -> str:
        """The client's name: derived from its API key, or else its address."""
        peer = request.client.host if request.client else "unknown"
        return getattr(request.state, "client", None) or peer

    def salt(self, body: CompletionFields, request: Request) -> str:
        """Caches are shared only between requests of the same key and cache_salt."""
        key = self.client(request) if self.settings.api_keys else ""
        return f"{key}\0{body.cache_salt or ''}" if key or body.cache_salt else ""

    def context(self, request: Request) -> RequestContext:
        deadline = time.perf_counter() + self.settings.deadline
        return RequestContext(JobOwner(self.client(request), deadline, CURRENT_RECORD.get()), request.receive)


class Service(RequestChecks):
    """One engine's thread behind the routes of one server."""

    def __init__(self, engine_thread: EngineThread, settings: Settings) -> None:
        super().__init__(settings)
        self.engine_thread = engine_thread
        # two pools, so that no request waits for another's grammar
        self.compile_pool = FairThreadPool("outrider-compile", COMPILE_THREADS)
        self.tokenize_pool = FairThreadPool("outrider-tokenize", TOKENIZE_THREADS)

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.engine_thread.engine.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with everything that may change a text for a given seed, and with the drafter."""
        facts = self.engine_thread.engine.facts
        model = (facts.model, facts.revision, facts.number_format, facts.device, facts.pinned, facts.context)
        parts = (__version__, *model, facts.mode, facts.rule, facts.drafter, facts.max_draft_tokens)
        return "fp_" + hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        headers, context = self.check_body(body), self.context(request)
        try:
            structured, translated = await self._translate(body, context, self.salt(body, request))
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        options, meta = _chat_options(body), self._meta("chat.completion")
        builder = ChatResponseBuilder(meta, translated, options, self.texts, structured.tool_format)
        return await self._respond(body, context, builder, headers)

    async def create_response(self, body: ResponsesRequest, request: Request) -> Response:
        headers, context = self.check_body(body), self.context(request)
        chat = chat_request(body)
        try:
            structured, translated = await self._translate(chat, context, self.salt(body, request))
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except APIError as error:
            raise renamed_error(error) from error
        options, meta = _chat_options(chat), self._meta("response")
        builder = ResponsesBuilder(meta, translated, options, self.texts, body, structured.tool_format)
        return await self._respond(body, context, builder, headers)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        headers, context, salt = self.check_body(body), self.context(request), self.salt(body, request)
        client = context.owner.client
        try:
            with self.engine_thread.reserve(count_sequences(body), client):
                engine = self.engine_thread.engine
                allow = self.settings.allow_special_tokens != "none"
                translating = self.tokenize_pool.run(client, lambda: translate_completion(body, engine, salt, allow))
                translated = await context.run(translating)
            echoes = await self._echoes(body, context, translated) if body.echo else []
        except ClientDisconnected:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        options = _response_options(body, body.logprobs)
        meta = self._meta("text_completion")
        builder = CompletionResponseBuilder(meta, translated, options, self.texts, echoes)
        return await self._respond(body, context, builder, headers)

    async def _translate(
        self, body: ChatRequest, context: RequestContext, salt: str
    ) -> tuple[StructuredOutput, TranslatedRequest]:
        """The request and its constraint, made while its room in the queue is reserved; raises what `reserve` does."""
        client = context.owner.client
        with self.engine_thread.reserve(body.n or 1, client):
            return await context.run(self._compile_and_translate(body, client, salt))

    async def _compile_and_translate(
        self, body: ChatRequest, client: str, salt: str
    ) -> tuple[StructuredOutput, TranslatedRequest]:
        engine, structured = self.engine_thread.engine, UNCONSTRAINED
        if needs_structured_output(body):
            asked = callable_tools(body)
            compiling = self.compile_pool.run(client, lambda: compile_structured_output(asked, engine.tokenizer, salt))
            structured = await compiling
        constraint = structured.constraint
        allow = self.settings.allow_special_tokens == "all"
        translating = self.tokenize_pool.run(client, lambda: translate_chat(body, engine, salt, constraint, allow))
        return structured, await translating

    async def _respond(
        self, body: CompletionFields, context: RequestContext, builder: ResponseBuilder, headers: dict[str, str]
    ) -> Response:
        requests = builder.request.requests
        job = self.engine_thread.submit(requests, context.owner) if requests else None
        if not body.stream:
            return await json_response(context.receive, job, builder, headers)
        options = body.stream_options
        return stream_response(job, builder, headers, obfuscate=bool(options and options.include_obfuscation))

    async def _echoes(
        self, body: CompletionRequest, context: RequestContext, translated: TranslatedRequest
    ) -> list[EchoedPrompt]:
        """The prompts to repeat before their choices, scored first where log-probabilities are wanted."""
        tokens = translated.prompt_tokens
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        texts = [each if isinstance(each, str) else None for each in given]
        texts = texts if len(texts) == len(tokens) else [None] * len(tokens)  # one prompt, sent as token ids
        scores: list[tuple[TokenLogprob, ...] | None] = [None] * len(tokens)
        if body.logprobs is not None:
            job = self.engine_thread.submit([ScoreRequest(each) for each in translated.prompts], context.owner)

            async def collect() -> None:
                async for index, output in job:
                    if isinstance(output, Event):
                        ChoiceBuffer().add(output)  # an event is an error here: raises it
                    else:
                        scores[index] = output

            try:
                await context.run(collect())
            finally:
                job.cancel()
        prompts = zip(texts, tokens, scores, strict=True)
        make = self.tokenize_pool.run(
            context.owner.client, lambda: [EchoedPrompt(*each, self.texts) for each in prompts]
        )
        return await context.run(make)

    def _meta(self, kind: str) -> ResponseMeta:
        return ResponseMeta.make(kind, self.settings.served_name, self.fingerprint)


def _response_options(body: CompletionFields, logprobs: int | None) -> ResponseOptions:
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return ResponseOptions(logprobs, bool(body.include_provenance), usage)


def _chat_options(body: ChatRequest) -> ResponseOptions:
    return _response_options(body, (body.top_logprobs or 0) if body.logprobs else None)


def _header(names: list[str]) -> str:
    """Field names as a header may carry them: a client chose them, so anything but plain characters is replaced."""
    plain = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in names[:MAX_IGNORED_NAMES]]
    more = len(names) - len(plain)
    return ", ".join(plain) + (f", and {more} more" if more else "")
