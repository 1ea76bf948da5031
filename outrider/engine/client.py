"""What a server needs of an engine: the protocol that `LocalEngine` implements, and any other engine can."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.core.outputs import TokenLogprob
from outrider.core.prompt import RenderedChat
from outrider.core.sampling import Token
from outrider.engine.events import Event
from outrider.engine.prepare import LateWork
from outrider.engine.request import CheckedRequest, Request
from outrider.engine.stats import Stats
from outrider.engine.text import Detokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What does not change while an engine runs."""

    model: str
    revision: str
    """Identifies the weights: a commit, or the name of the folder or file they come from."""
    number_format: str
    """float32, bfloat16, float16, int8 or int4."""
    stored_format: str = ""
    """The format of the weights on disk, such as Q4_K or float32; empty where it is not known."""
    device: str
    pinned: bool
    """Whether speculation leaves the text bit-identical on CUDA."""
    weight_bytes: int
    """Size of the weights on disk."""
    memory: str
    """How the device's memory is divided, for people to read; empty where that is not planned."""
    threads: str = ""
    """The CPU threads that passes begin with, for people to read; empty where passes run elsewhere."""
    vocab_size: int
    context: int
    """Max tokens of one sequence that the model supports, prompt included."""
    page_count: int
    page_size: int
    """Tokens a page of the cache holds."""
    max_batch: int
    mode: str
    rule: str
    drafter: str
    drafter_aliases: tuple[str, ...]
    max_draft_tokens: int
    """Max tokens drafted for one sequence in one round."""
    uses_prediction: bool
    """Whether the drafter drafts from a request's `prediction`."""

    @property
    def max_length(self) -> int:
        """Max tokens of one sequence: the model's context, or the cache where that is smaller."""
        return min(self.context, self.page_count * self.page_size)


class EngineTokenizer(Detokenizer, Protocol):
    """The tokenizer of an engine's model. Any thread may call it."""

    def encode(self, text: str, *, special: bool = True, allow_special_tokens: bool = True) -> list[Token]: ...
    def encode_rendered(self, chat: RenderedChat, *, special: bool = False) -> list[Token]: ...
    def decode_all(self, ids: Seq[Token]) -> str: ...
    def token_text(self, token: Token) -> str: ...
    def id_to_token(self, token: Token) -> str | None: ...
    def to_json(self) -> str: ...
    def render_chat(
        self,
        messages: Seq[Any],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Any = None,
        allow_special_tokens: bool = False,
    ) -> RenderedChat: ...


class PromptScoring(Protocol):
    """The scoring of one given text. Call `step` until `done`, then `close`; rounds may run between steps."""

    logprobs: list[TokenLogprob]
    """Of every token but the first."""

    @property
    def done(self) -> bool: ...
    def step(self) -> bool:
        """Score the next tokens. False: no page is free; call again when a sequence has ended."""
        ...

    def close(self) -> None:
        """Free its pages. Called once."""
        ...


class EngineClient(Protocol):
    """An engine as a server uses it.

    `facts`, `tokenizer` and `validate` may be used from any thread. One thread calls everything else.
    """

    @property
    def facts(self) -> EngineFacts: ...
    @property
    def tokenizer(self) -> EngineTokenizer: ...
    def validate(self, request: Request) -> CheckedRequest:
        """The request, checked; RequestError where this engine cannot serve it."""
        ...

    def submit(self, request: CheckedRequest) -> int:
        """Queue a request with n = 1; returns its sequence id."""
        ...

    def step(self) -> Seq[Event]:
        """Run one round; returns an event for each sequence that moved on or ended."""
        ...

    def cancel(self, seq_id: int) -> Event | None:
        """End a sequence and free its pages; returns its last event, or None where it has already ended."""
        ...

    def score_prompt(self, request: CheckedRequest) -> PromptScoring:
        """Score the request's prompt: `params.logprobs` alternatives at each token."""
        ...

    def stats_of(self, seq_id: int) -> Stats | None:
        """The figures of a sequence so far, which the engine keeps changing; None where it has ended."""
        ...

    @property
    def pages_used(self) -> int: ...
    @property
    def late_work(self) -> LateWork:
        """What was compiled, captured or allocated after start-up. Any thread may ask."""
        ...

    @property
    def busy(self) -> bool:
        """Whether any sequence waits or runs."""
        ...
