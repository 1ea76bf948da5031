"""What an operator decides about a server, checked before it starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Literal

from outrider.core.errors import ConfigError

MAX_QUEUE = 256
DEADLINE, DRAIN_TIMEOUT = 600.0, 30.0  # seconds
MAX_BODY = 8 << 20  # bytes of one request; a context of a million tokens fits

MIN_KEY = 8  # characters; shorter keys can be guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a server listens, whom it lets in, and how much it accepts."""

    served_name: str
    """What clients call the model."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Any of these gives access to every route; without keys every request is let in."""
    allow_hosts: tuple[str, ...] = ()
    """Host headers accepted besides the loopback names and `host`."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call; none by default."""
    max_queue: int = MAX_QUEUE
    """Max sequences that wait for the batch, or are being prepared for it."""
    deadline: float = DEADLINE
    """Seconds a request may take once its body is read: compiling, tokenizing and waiting included."""
    drain_timeout: float = DRAIN_TIMEOUT
    """Seconds that open requests get after SIGTERM."""
    max_body: int = MAX_BODY
    """Max bytes of a request's body."""
    strict: bool = False
    """Refuse fields that are ignored otherwise, and named in a response header."""
    body_timeout: float = 30.0
    """Seconds a request's body may take to arrive."""
    allow_special_tokens: Literal["none", "prompts", "all"] = "prompts"
    """Where special tokens that clients write are control tokens: prompts of text completions, or messages too."""
    log_format: Literal["text", "json"] = "text"
    """Lines of text, or one JSON object a line."""
    otlp_endpoint: str = ""
    """The HTTP address of an OTLP collector that traces are sent to; empty: none are."""
    log_prompts: bool = False
    """Write prompts into the log; never otherwise."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queue", 0, 1 << 20),
            ("deadline", 0.001, 86400 * 7),
            ("drain_timeout", 0, 86400),
            ("max_body", 1, 1 << 30),
            ("body_timeout", 0.001, 86400),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be {low} to {high}, got {getattr(self, name)}")
        if any(len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError(
                f"an API key is {MIN_KEY} or more printable ASCII characters without spaces; "
                "make one with: openssl rand -hex 32"
            )
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, and no API key is set: "
                "give --api-key (or OUTRIDER_API_KEY), or listen on 127.0.0.1"
            )

    @property
    def address(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
