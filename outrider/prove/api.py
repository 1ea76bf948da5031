"""A client of OpenAI-compatible servers: completions, log-probabilities, and what each kind lets a request switch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from outrider.core.errors import ConfigError, OutriderError, reason

TIMEOUT_SECONDS = 300
KEY_FIX = "set OPENAI_API_KEY to the server's key"
START_FIX = "`outrider serve MODEL` starts one at http://127.0.0.1:8000/v1, or give the address of one that runs"
Body = dict[str, Any]


class ApiError(OutriderError):
    """The server refused a request, or did not answer it."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What a request to one kind of server can switch, and whether it can have options that OpenAI's API lacks."""

    name: str
    off: Body | None = None
    """The fields that turn speculation off for a request; None: there are none."""
    salt: str = ""
    """The field that separates the caches of requests; empty: there is none."""
    cold: Body | None = None
    """The fields that keep a request from using the cache, where there is no salt; None: there are none."""
    more: bool = False
    """Whether it takes top_k and min_p, and states log-probabilities of the raw logits whatever the options are."""


KINDS: Mapping[str, ServerKind] = {
    "outrider": ServerKind("outrider", off={"speculation": {"off": True}}, salt="cache_salt", more=True),
    "vllm": ServerKind("vllm", salt="cache_salt", more=True),
    "llamacpp": ServerKind("llamacpp", off={"speculative.n_max": 0}, cold={"cache_prompt": False}, more=True),
    "sglang": ServerKind("sglang"),
}
"""The kinds, by the field `owned_by` of /v1/models."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice of a response."""

    text: str
    finish: str
    tokens: tuple[str, ...] = ()
    """The texts of the tokens; empty where the server states no log-probabilities."""
    logprobs: tuple[float, ...] = ()
    top: tuple[dict[str, float], ...] = ()
    cached: int = 0
    """Prompt tokens found in the cache; 0 where the server does not say."""


@dataclass(slots=True)
class Api:
    """A server at one address."""

    url: str
    key: str = field(default="", repr=False)
    model: str | None = None

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"a server's URL is an address such as http://127.0.0.1:8000/v1, got {self.url!r}")
        self.url = self.url.rstrip("/")
        if not self.url.endswith("/v1"):
            self.url += "/v1"

    def kind(self) -> ServerKind:
        """The kind of this server. Also sets `model` to the first model's name where none was given."""
        cards = self._call("/models").get("data") or [{}]
        own = next((card for card in cards if card.get("id") == self.model), cards[0])
        if self.model is None:
            self.model = own.get("id")
        owner = str(own.get("owned_by", "")).lower()
        return KINDS.get(owner, ServerKind(owner or "unknown"))

    def complete(self, prompt: str, **options: Any) -> Completion:
        """Continue a prompt. ApiError where the server refuses."""
        answer = self._call("/completions", {"model": self.model, "prompt": prompt} | options)
        choice = answer["choices"][0]
        listed = choice.get("logprobs") or {}
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return Completion(
            text=choice["text"],
            finish=str(choice.get("finish_reason")),
            tokens=tuple(listed.get("tokens") or ()),
            logprobs=tuple(-1e9 if each is None else each for each in listed.get("token_logprobs") or ()),
            top=tuple(each or {} for each in listed.get("top_logprobs") or ()),
            cached=details.get("cached_tokens") or 0,
        )

    def complete_together(self, bodies: Seq[Body], workers: int) -> list[Completion]:
        """One completion for each request body, in order, up to `workers` at a time."""
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda body: self.complete(**body), bodies))

    def _call(self, path: str, body: Body | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, headers)  # noqa: S310 - http and https alone, see __post_init__
        try:
            with urlopen(request, timeout=TIMEOUT_SECONDS) as response:  # noqa: S310 - the same
                return json.load(response)
        except HTTPError as error:
            told = error.read(2000).decode(errors="replace")
            fix = f"; {KEY_FIX}" if error.code in (401, 403) else ""
            raise ApiError(f"{self.url}{path} answers {error.code}: {told}{fix}", error.code) from error
        except (URLError, HTTPException, TimeoutError, ConnectionError, ValueError) as error:
            raise ApiError(
                f"{self.url}{path} does not answer ({reason(error)}); is the server running there? {START_FIX}"
            ) from error
