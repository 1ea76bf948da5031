"""The engine of this process as the `EngineClient` that the server uses."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.engine.client import EngineFacts, EngineTokenizer
from outrider.engine.events import Event
from outrider.engine.prepare import LateWork
from outrider.engine.request import CheckedRequest, Request, validate_request
from outrider.engine.scoring import Scoring
from outrider.engine.stats import Stats
from outrider.llm import LLM


class LocalEngine:
    """An `LLM` as an `EngineClient`."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.facts = llm, _facts(llm)

    @property
    def tokenizer(self) -> EngineTokenizer:
        return self.llm.tokenizer

    def validate(self, request: Request) -> CheckedRequest:
        return validate_request(request, self.llm.engine.target)

    def submit(self, request: CheckedRequest) -> int:
        (seq_id,) = self.llm.engine.submit(request)
        return seq_id

    def step(self) -> Seq[Event]:
        return self.llm.engine.step()

    def cancel(self, seq_id: int) -> Event | None:
        return self.llm.engine.cancel(seq_id)

    def score_prompt(self, request: CheckedRequest) -> Scoring:
        prompt, params, salt = request.request.prompt, request.request.params, request.request.salt
        return Scoring(self.llm.engine.target, prompt, params.logprobs or 0, salt)

    def stats_of(self, seq_id: int) -> Stats | None:
        engine = self.llm.engine
        return engine.live(seq_id).stats if engine.alive(seq_id) else None

    @property
    def pages_used(self) -> int:
        return self.llm.engine.target.pool.used

    @property
    def late_work(self) -> LateWork:
        return self.llm.late_work

    @property
    def busy(self) -> bool:
        return self.llm.engine.busy


def _facts(llm: LLM) -> EngineFacts:
    loaded, target, traits = llm.loaded, llm.engine.target, llm.drafter.traits
    return EngineFacts(
        model=loaded.name,
        revision=loaded.folder.name,  # named for the commit it was fetched at, or the file it was converted from
        number_format=loaded.format,
        stored_format=loaded.stored,
        device=str(target.device),
        pinned=loaded.pinned,
        weight_bytes=loaded.weight_bytes,
        memory=str(loaded.memory or ""),
        threads=loaded.threads,
        vocab_size=target.vocab_size,
        context=target.context,
        page_count=target.pool.count,
        page_size=target.pool.size,
        max_batch=llm.max_batch,
        mode=llm.mode,
        rule=llm.rule,
        drafter=traits.name,
        drafter_aliases=traits.aliases,
        max_draft_tokens=traits.max_tokens,
        uses_prediction=traits.uses_prediction,
    )
