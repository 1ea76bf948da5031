"""A request's figures from what its response says: usage, finish reasons, and vLLM's own record of speculation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.core.sequence import FinishReason
from outrider.engine.events import Event
from outrider.engine.stats import Stats, Tally

SPECULATION = "speculation"
"""The name under which a replica's drafts are counted: it does not tell the name of its drafter."""


@dataclass(slots=True)
class Figures:
    """Filled from the JSON objects of one response, whole or in chunks."""

    first: float = 0.0
    """When the first token of a stream came, by time.perf_counter; 0 where the response is not streamed."""
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    speculation: dict[str, Any] = field(default_factory=dict[str, Any])
    finishes: dict[int, str] = field(default_factory=dict[int, str])
    """The finish reason of each choice that has ended."""

    def read(self, value: dict[str, Any]) -> None:
        """Take the figures from a chunk or a whole response; also from /v1/responses, whose usage has other names."""
        response = value.get("response")
        value = response if isinstance(response, dict) else value
        if isinstance(usage := value.get("usage"), dict):
            self.usage = usage
        metrics = value.get("metrics")
        if isinstance(metrics, dict) and isinstance(metrics.get("speculative_decoding"), dict):
            self.speculation = metrics["speculative_decoding"]
        for choice in value.get("choices") or ():
            if isinstance(choice, dict) and choice.get("finish_reason"):
                self.finishes[int(choice.get("index", 0))] = str(choice["finish_reason"])
        if value.get("object") == "response" and value.get("status") in ("completed", "incomplete"):
            self.finishes[0] = "stop" if value["status"] == "completed" else "length"

    def stats(self) -> Stats:
        """The figures of all choices together; what the replica did not tell is 0."""
        usage = self.usage
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        made = Stats(
            prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
            shared_tokens=_count(details, "cached_tokens"),
            tokens=_count(usage, "completion_tokens", "output_tokens"),
            first=self.first,
        )
        if self.speculation:
            made.drafters[SPECULATION] = _tally(self.speculation)
        return made

    def events(self, count: int) -> list[Event]:
        """A last event for each of `count` sequences; the first event has the stats of all."""
        stats = [self.stats(), *(Stats() for _ in range(count - 1))]
        finishes = [self.finishes.get(i, "stop") for i in range(count)]
        return [Event(-1, finish=_finish(why), stats=each) for why, each in zip(finishes, stats, strict=True)]


def _finish(reason: str) -> FinishReason:
    return "length" if reason == "length" else "stop"


def _count(values: dict[str, Any], *names: str) -> int:
    found = next((values[name] for name in names if isinstance(values.get(name), int)), 0)
    return int(found)


def _tally(told: dict[str, Any]) -> Tally:
    """vLLM's record: entry j of the histogram is the number of drafts with j accepted tokens."""
    return Tally(
        rounds=_count(told, "num_spec_steps"),
        drafted=_count(told, "num_draft_tokens"),
        accepted=_count(told, "num_accepted_draft_tokens"),
        by_accepted=[int(each) for each in told.get("acceptance_histogram") or ()],
    )
