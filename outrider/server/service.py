"""What the routes share: whose request it is, which model is meant, and how the worker is asked."""

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
from outrider.server.chat import ChatTeller
from outrider.server.completions import CompletionTeller, Echo
from outrider.server.connection import ClientGone, EventStream, Teller, chunks, unless_gone, whole
from outrider.server.jobs import Score, TimeUp
from outrider.server.problems import Problem
from outrider.server.record import LEFT
from outrider.server.schema import REFUSED, ChatRequest, Common, CompletionRequest, Open, refused, unhonoured
from outrider.server.settings import Settings
from outrider.server.structure import FREE, Structure, asks_for_structure, structure_of
from outrider.server.telling import Head, Told, Wishes
from outrider.server.tokens import TokenTexts
from outrider.server.translate import Asked, count_texts, translate_chat, translate_completion
from outrider.server.worker import Worker
from outrider.server.workshop import Workshop

COMPILERS = 4  # grammars being compiled at once
TOKENIZERS = 4  # prompts being tokenized at once
MAX_NAMED = 16  # fields named in the header; more are counted
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Visit:
    """Whose request it is, how to hear that they left, and when its time is up, by time.perf_counter."""

    client: str
    receive: Receive
    deadline: float

    async def while_wanted(self, work: Coroutine[Any, Any, T]) -> T:
        """Do the work; ClientGone or TimeUp, and the work cancelled, as soon as nobody waits for it any more."""
        try:
            async with asyncio.timeout(self.deadline - time.perf_counter()):
                return await unless_gone(self.receive, work)
        except TimeoutError:
            raise TimeUp from None


class Service:
    """One worker behind the routes of one server."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings = worker, settings
        # apart, so that nobody waits for another's grammar
        self.compiling = Workshop("outrider-compile", COMPILERS)
        self.tokenizing = Workshop("outrider-tokenize", TOKENIZERS)

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.worker.llm.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with whatever may change a text for a given seed, and with the drafter."""
        llm, loaded, target = self.worker.llm, self.worker.llm.loaded, self.worker.llm.engine.target
        # a folder is named for the commit it was fetched at, or for the file it was converted from
        model = (loaded.name, loaded.folder.name, loaded.format, target.device, loaded.pinned, target.context)
        parts = (__version__, *model, llm.mode, llm.rule, llm.drafter.name, llm.drafter.max_tokens)
        return "fp_" + hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:12]

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        headers, visit = self.admit(body), self._visit(request)
        try:
            with self.worker.place(body.n or 1, visit.client):
                translating = self._translate(body, visit.client, self.salt(body, request))
                structure, asked = await visit.while_wanted(translating)
        except ClientGone:
            return Response(status_code=LEFT)
        wishes = _wishes(body, (body.top_logprobs or 0) if body.logprobs else None)
        teller = ChatTeller(self._head("chat.completion"), asked, wishes, self.texts, structure.form)
        return await self._answer(body, visit, asked, teller, headers)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        headers, visit, salt = self.admit(body), self._visit(request), self.salt(body, request)
        try:
            with self.worker.place(count_texts(body), visit.client):
                llm = self.worker.llm
                translating = self.tokenizing.do(visit.client, lambda: translate_completion(body, llm, salt))
                asked = await visit.while_wanted(translating)
            echoes = await self._echoes(body, visit, asked, salt) if body.echo else []
        except ClientGone:
            return Response(status_code=LEFT)
        wishes = _wishes(body, body.logprobs)
        teller = CompletionTeller(self._head("text_completion"), asked, wishes, self.texts, echoes)
        return await self._answer(body, visit, asked, teller, headers)

    def admit(self, body: Open) -> dict[str, str]:
        """Headers that name what is not honoured. A Problem: another model is meant, or what is asked is refused."""
        model = getattr(body, "model", None)
        if model not in (None, self.settings.served_name):
            raise Problem(
                404,
                f"the model {model[:100]!r} does not exist; this server has {self.settings.served_name!r}",
                code="model_not_found",
                param="model",
            )
        name = refused(body)
        if name is not None:
            raise Problem(400, f"{name} is not taken from clients: {REFUSED[name]}", param=name, code="not_allowed")
        names = unhonoured(body)
        if names and self.settings.strict:
            raise Problem(400, f"not honoured here: {', '.join(names)}", param=names[0][:64], code="unknown_parameter")
        return {"x-outrider-ignored": _header(names)} if names else {}

    def client(self, request: Request) -> str:
        """Who is asking, for turns in the queue: the key's name, or else the address."""
        peer = request.client.host if request.client else "unknown"
        return getattr(request.state, "client", None) or peer

    def salt(self, body: Common, request: Request) -> str:
        """Caches are shared only under the same key and the same cache_salt."""
        key = self.client(request) if self.settings.api_keys else ""
        return f"{key}\0{body.cache_salt or ''}" if key or body.cache_salt else ""

    def _visit(self, request: Request) -> Visit:
        return Visit(self.client(request), request.receive, time.perf_counter() + self.settings.deadline)

    async def _translate(self, body: ChatRequest, client: str, salt: str) -> tuple[Structure, Asked]:
        llm, structure = self.worker.llm, FREE
        if asks_for_structure(body):
            structure = await self.compiling.do(client, lambda: structure_of(body, llm.tokenizer))
        constraint = structure.constraint
        return structure, await self.tokenizing.do(client, lambda: translate_chat(body, llm, salt, constraint))

    async def _answer(
        self, body: Common, visit: Visit, asked: Asked, teller: Teller, headers: dict[str, str]
    ) -> Response:
        job = None
        if asked.requests:
            job = self.worker.submit(asked.requests, client=visit.client, deadline=visit.deadline)
        if not body.stream:
            return await whole(visit.receive, job, teller, headers)
        options = body.stream_options
        return EventStream(chunks(job, teller, bool(options and options.include_obfuscation)), job, headers)

    async def _echoes(self, body: CompletionRequest, visit: Visit, asked: Asked, salt: str) -> list[Echo]:
        """The prompts to be told before their choices, scored first where log-probabilities are wanted."""
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        written = [each if isinstance(each, str) else None for each in given]
        written = written if len(written) == len(asked.prompts) else [None] * len(asked.prompts)
        scores: list[tuple[TokenLogprob, ...] | None] = [None] * len(asked.prompts)
        if body.logprobs is not None:
            asks = [Score(prompt, body.logprobs, salt) for prompt in asked.prompts]
            job = self.worker.submit(asks, client=visit.client, deadline=visit.deadline)

            async def collect() -> None:
                async for index, told in job:
                    if isinstance(told, Event):
                        Told().add(told)  # raises what the model failed with
                    else:
                        scores[index] = told

            try:
                await visit.while_wanted(collect())
            finally:
                job.cancel()
        told = zip(written, asked.prompts, scores, strict=True)
        spelling = self.tokenizing.do(visit.client, lambda: [Echo(*each, self.texts) for each in told])
        return await visit.while_wanted(spelling)

    def _head(self, kind: str) -> Head:
        return Head.make(kind, self.settings.served_name, self.fingerprint)


def _wishes(body: Common, logprobs: int | None) -> Wishes:
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return Wishes(logprobs, bool(body.include_provenance), usage)


def _header(names: list[str]) -> str:
    """Field names as a header may carry them: a client chose them, so nothing of theirs but plain letters."""
    plain = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in names[:MAX_NAMED]]
    more = len(names) - len(plain)
    return ", ".join(plain) + (f", and {more} more" if more else "")
