"""One server behind this one: its address, what it serves, its state and its open requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from outrider.core.errors import ConfigError

EngineKind = Literal["vllm", "outrider"]
ReplicaState = Literal["loading", "ready", "slow", "draining", "dead"]
"""`loading`: never ready so far; `slow`: does not answer /health in time; `draining`: /health does not answer 200;
`dead`: cannot be reached or used."""
SLOW_SECONDS = 5.0
"""How long a slow replica may still be given requests, where none is ready."""


@dataclass(frozen=True, slots=True)
class ReplicaCard:
    """What a replica says of itself."""

    kind: EngineKind
    model: str
    """What it calls the model."""
    version: str
    max_model_len: int
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The other fields that an Outrider server tells of its model."""


class OpenResponse(Protocol):
    """A response that is being read."""

    def cut(self, error: Exception) -> None:
        """End it with this error."""
        ...


@dataclass(slots=True, eq=False)
class Replica:
    """A server's address and state. Changed only in the event loop."""

    url: str
    """Scheme, host and port, and a path where the server is under one; no slash at the end."""
    state: ReplicaState = "loading"
    problem: str = ""
    """Why it is not ready."""
    card: ReplicaCard | None = None
    """None until it is first ready."""
    load: int = 0
    """Sequences given to it that have not ended."""
    requests: int = 0
    """Requests given to it so far."""
    failures: int = 0
    """Requests that it broke off, did not answer or refused."""
    changed: float = 0.0
    """When its state last changed, by time.perf_counter."""
    open: set[OpenResponse] = field(default_factory=set[OpenResponse])

    @property
    def name(self) -> str:
        return self.url

    def usable(self, now: float) -> bool:
        """Whether it may be given requests at all."""
        return self.state == "ready" or (self.state == "slow" and now - self.changed < SLOW_SECONDS)

    def cut_all(self, error: Exception) -> None:
        for response in list(self.open):
            response.cut(error)


def check_url(url: str) -> str:
    """The server's address from an `--engine-url`, without /v1 at its end. ConfigError if it is no http(s) address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"--engine-url takes an address such as http://127.0.0.1:8001, got {url!r}")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def read_card(models: Any, version: Any) -> ReplicaCard:
    """The card from the JSON of /v1/models and /version. ValueError where it is no server that can be used."""
    try:
        card = models["data"][0]
        owner, model, length = card["owned_by"], str(card["id"]), int(card["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError("/v1/models does not say which model is served, by what, and its max_model_len") from error
    if owner not in ("vllm", "outrider"):
        raise ValueError(f"/v1/models says that {str(owner)[:40]!r} serves it; only vLLM and Outrider can be used")
    told = version.get("version", "") if isinstance(version, dict) else ""
    named = ("id", "object", "created", "owned_by", "max_model_len", "permission", "root", "parent")
    facts = {name: value for name, value in card.items() if name not in named} if owner == "outrider" else {}
    return ReplicaCard(owner, model, str(told), length, facts)
