"""A server that answers as vLLM 0.32 does, with words in place of a model. As a script, it takes vLLM's arguments."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

SPEC = {"num_drafts": 10, "num_draft_tokens": 30, "num_accepted_tokens": 21}
PER_POSITION = (9, 7, 5)


def words_of(prompt: Any, count: int) -> list[str]:
    """The tokens of an answer, which its prompt decides."""
    key = zlib.crc32(json.dumps(prompt).encode()) % 1000
    return [f"{key}.{i} " for i in range(count)]


class FakeVllm:
    """What it is asked, and what goes wrong."""

    def __init__(self, model: str = "fake", *, spec: bool = True) -> None:
        self.model, self.spec = model, spec
        self.bodies: list[dict[str, Any]] = []
        """Every body that asked for text."""
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.health = 200
        self.hold_after: int | None = None
        """Streams wait for `go` after so many tokens; whole answers wait before the first."""
        self.hold_health = False
        self.go = asyncio.Event()
        self.refuse: tuple[int, Any] | None = None
        """Status and body of every answer."""
        self.spoil: bytes | None = None
        """Sent in place of the second token; then the stream ends."""
        self.cancelled = 0
        """Streams whose client left."""
        self.app = self._make()

    def _make(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            if self.hold_health:
                await self.go.wait()
            return Response(status_code=self.health)

        @app.get("/version")
        async def version() -> dict[str, str]:
            return {"version": "0.32.0"}

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            card = {"id": self.model, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 512}
            return {"object": "list", "data": [card | {"root": "/x", "parent": None, "permission": []}]}

        @app.get("/metrics")
        async def metrics() -> Response:
            label = f'engine="0",model_name="{self.model}"'
            lines = [f"vllm:spec_decode_{name}_total{{{label}}} {value}.0" for name, value in SPEC.items()]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{i}"}} {value}.0'
                for i, value in enumerate(PER_POSITION)
            ]
            return Response("# TYPE vllm:x counter\n" + "\n".join(lines) + "\n", media_type="text/plain")

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, Any]:
            self.bodies.append(await request.json())
            return {"count": 2, "max_model_len": 512, "tokens": [1, 2], "token_strs": None}

        for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            app.add_api_route(path, self._answer, methods=["POST"])
        return app

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(request.url.path)
        if self.refuse is not None:
            return JSONResponse(self.refuse[1], self.refuse[0])
        if body["model"] != self.model:
            error = {"message": "no such model", "type": "NotFoundError", "param": "model", "code": 404}
            return JSONResponse({"error": error}, 404)
        if body.get("stream"):
            named = request.url.path == "/v1/responses"
            events = self._named(body) if named else self._chunks(body, request.url.path)
            return StreamingResponse(self._watched(events), media_type="text/event-stream")
        if self.hold_after is not None:
            await self.go.wait()
        return JSONResponse(self._whole(body, request.url.path))

    async def _watched(self, events: AsyncIterator[str | bytes]) -> AsyncIterator[str | bytes]:
        try:
            async for event in events:
                yield event
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _shape(self, body: dict[str, Any]) -> tuple[list[str], int]:
        prompt = body.get("messages") or body.get("prompt") or body.get("input")
        count = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens") or 5
        return words_of(prompt, count), body.get("n") or 1

    def _usage(self, tokens: int, n: int) -> dict[str, Any]:
        usage = {"prompt_tokens": 7, "total_tokens": 7 + tokens * n, "completion_tokens": tokens * n}
        return usage | {"prompt_tokens_details": {"cached_tokens": 3}}

    def _metrics(self) -> dict[str, Any]:
        if not self.spec:
            return {}
        record = {"mean_acceptance_length": 2.0, "draft_acceptance_rate": 0.5, "acceptance_histogram": [1, 1, 1, 0]}
        counts = {"num_spec_steps": 3, "num_accepted_draft_tokens": 3, "num_draft_tokens": 6, "num_spec_tokens": 3}
        return {"metrics": {"speculative_decoding": record | counts}}

    def _whole(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        words, n = self._shape(body)
        text = "".join(words)
        common = {"id": "cmpl-1", "created": 1, "model": self.model}
        if path == "/v1/responses":
            content = [{"type": "output_text", "text": text}]
            usage = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": len(words)}
            item = {"id": "msg", "type": "message", "role": "assistant", "content": content}
            return common | {"object": "response", "status": "incomplete", "output": [item], "usage": usage}
        part = {"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text}
        choices = [{"index": i, "finish_reason": "length"} | part for i in range(n)]
        return common | {"choices": choices, "usage": self._usage(len(words), n)} | self._metrics()

    async def _chunks(self, body: dict[str, Any], path: str) -> AsyncIterator[str | bytes]:
        words, n = self._shape(body)
        chat = "chat" in path

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            chunk = {"id": "cmpl-1", "created": 1, "model": self.model, "choices": choices}
            return f"data: {json.dumps(chunk | more)}\n\n"

        if chat:
            yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
        for i, word in enumerate(words):
            if i == self.hold_after:
                await self.go.wait()
            if i == 1 and self.spoil is not None:
                yield self.spoil
                return
            for k in range(n):
                part = {"delta": {"content": word}} if chat else {"text": word}
                end = {"finish_reason": "length" if i == len(words) - 1 else None}
                yield event([{"index": k} | part | end])
        if (body.get("stream_options") or {}).get("include_usage"):
            yield event([], usage=self._usage(len(words), n), **self._metrics())
        yield "data: [DONE]\n\n"

    async def _named(self, body: dict[str, Any]) -> AsyncIterator[str]:
        words, _ = self._shape(body)
        whole = self._whole(body, "/v1/responses")
        events: list[dict[str, Any]] = [{"type": "response.created", "response": whole | {"status": "in_progress"}}]
        events += [{"type": "response.output_text.delta", "delta": word} for word in words]
        events += [{"type": "response.completed", "response": whole | {"status": "completed"}}]
        for i, told in enumerate(events):
            if i - 1 == self.hold_after:
                await self.go.wait()
            yield f"event: {told['type']}\ndata: {json.dumps(told | {'sequence_number': i})}\n\n"


def main() -> None:
    """`fake_vllm.py serve MODEL --served-model-name NAME --host H --port P ...`; `--fail` ends at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb")
    parser.add_argument("model")
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--fail", action="store_true")
    given, others = parser.parse_known_args()
    sys.stdout.write(f"words {json.dumps(others)}\n")
    sys.stdout.flush()
    if given.fail:
        sys.exit("ValueError: no device is large enough")
    if "FAKE_WORKER" in os.environ:  # as vLLM's engine: a process that holds the output and outlives its parent
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        sys.stdout.write(f"worker {worker.pid}\n")
        sys.stdout.flush()
    fake = FakeVllm(given.served_model_name)
    fake.hold_after = int(os.environ["FAKE_HOLD"]) if "FAKE_HOLD" in os.environ else None
    uvicorn.run(fake.app, host=given.host, port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
