"""What the routes share: whose request it is, which model is meant, and how the worker is asked."""

from __future__ import annotations

import asyncio
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

from fastapi import Request
from fastapi.responses import Response

from outrider import __version__
from outrider.core import TokenLogprob
from outrider.engine.events import Event
from outrider.server.chat import ChatTeller
from outrider.server.completions import CompletionTeller, Echo
from outrider.server.connection import GONE, ClientGone, EventStream, Teller, chunks, unless_gone, whole
from outrider.server.jobs import Score
from outrider.server.problems import Problem
from outrider.server.schema import REFUSED, ChatRequest, Common, CompletionRequest, Open, refused, unhonoured
from outrider.server.settings import Settings
from outrider.server.structure import FREE, asks_for_structure, structure_of
from outrider.server.telling import Head, Told, Wishes
from outrider.server.tokens import TokenTexts
from outrider.server.translate import Asked, translate_chat, translate_completion
from outrider.server.worker import Worker

COMPILERS = 4  # grammars being compiled at once
MAX_NAMED = 16  # fields named in the header; more are counted


class Service:
    """One worker behind the routes of one server."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self.worker, self.settings = worker, settings
        # apart from the threads that tokenize, so that nobody waits for another's grammar
        self._compilers = ThreadPoolExecutor(COMPILERS, "outrider-compile")

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.worker.llm.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with whatever may change a text for a given seed, and with the drafter."""
        llm = self.worker.llm
        parts = (llm.loaded.name, llm.loaded.format, llm.mode, llm.drafter.name, __version__)
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        headers = self.admit(body)
        llm, structure = self.worker.llm, FREE
        if asks_for_structure(body):
            loop = asyncio.get_running_loop()
            structure = await loop.run_in_executor(self._compilers, structure_of, body, llm.tokenizer)
        salt = self.salt(body, request)
        asked = await asyncio.to_thread(translate_chat, body, llm, salt, structure.constraint)
        wishes = _wishes(body, (body.top_logprobs or 0) if body.logprobs else None)
        teller = ChatTeller(self._head("chat.completion"), asked, wishes, self.texts, structure.form)
        return await self._answer(body, request, asked, teller, headers)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        headers = self.admit(body)
        asked = await asyncio.to_thread(translate_completion, body, self.worker.llm, self.salt(body, request))
        try:
            echoes = await self._echoes(body, request, asked) if body.echo else []
        except ClientGone:
            return Response(status_code=GONE)
        wishes = _wishes(body, body.logprobs)
        teller = CompletionTeller(self._head("text_completion"), asked, wishes, self.texts, echoes)
        return await self._answer(body, request, asked, teller, headers)

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

    async def _answer(
        self, body: Common, request: Request, asked: Asked, teller: Teller, headers: dict[str, str]
    ) -> Response:
        job = self.worker.submit(asked.requests, client=self.client(request)) if asked.requests else None
        if not body.stream:
            return await whole(request.receive, job, teller, headers)
        options = body.stream_options
        return EventStream(chunks(job, teller, bool(options and options.include_obfuscation)), headers)

    async def _echoes(self, body: CompletionRequest, request: Request, asked: Asked) -> list[Echo]:
        """The prompts to be told before their choices, scored first where log-probabilities are wanted."""
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        written = [each if isinstance(each, str) else None for each in given]
        written = written if len(written) == len(asked.prompts) else [None] * len(asked.prompts)
        scores: list[tuple[TokenLogprob, ...] | None] = [None] * len(asked.prompts)
        if body.logprobs is not None:
            salt = self.salt(body, request)
            asks = [Score(prompt, body.logprobs, salt) for prompt in asked.prompts]
            job = self.worker.submit(asks, client=self.client(request))

            async def collect() -> None:
                async for index, told in job:
                    if isinstance(told, Event):
                        Told().add(told)  # raises what the model failed with
                    else:
                        scores[index] = told

            try:
                await unless_gone(request.receive, collect())
            finally:
                job.cancel()
        return await asyncio.to_thread(
            lambda: [
                Echo(text, prompt, score, self.texts)
                for text, prompt, score in zip(written, asked.prompts, scores, strict=True)
            ]
        )

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
